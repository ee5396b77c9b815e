"""UserSimulator: users and tools take turns in one conversation, row by row."""

import asyncio
import math
import multiprocessing
import pickle
import threading
from contextlib import asynccontextmanager

import pytest
from helpers.chat_envs import (
    STOP,
    add,
    advance,
    answer,
    begin,
    call,
    chat_env,
    conversations,
    dataset_env,
    scripted_user_env,
    step,
)
from helpers.limit import limit
from helpers.model_families import FAMILIES
from helpers.simulated_users import Clerk, Shopper, parrot
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.envs import Compose, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.llm import ChatEnv, DatasetChatEnv

from torchrl_agentic import EndTrajectory, RateLimiter, StopTool, ToolCompose
from torchrl_agentic.interactions import Interaction, Reply, ScriptedUser, in_thread
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.trajectory.reasons import REASONS
from torchrl_agentic.transforms import TurnTokenizer, UserSimulator

CALL = call("add", a=1, b=2)


def tools():
    return ToolCompose([add, StopTool()])


def user_env(shape, user, *between, **options):
    return chat_env(shape, tools(), *between, UserSimulator(user, **options))


def told(td, name):
    return td["agentic", f"user_{name}"].flatten().tolist()


def ended(td):
    return [td[key].flatten().tolist() for key in ("done", "terminated", "truncated")]


def said(td):
    return [
        [(m.role, m.content) for m in chat if m.role in ("user", "tool")][1:] for chat in conversations(td)
    ]


def test_tools_and_users_take_turns():
    env = user_env((2,), ScriptedUser(["u1", "u2"]))
    td = advance(env, begin(env), "hello", CALL)
    assert said(td) == [[("user", "u1")], [("tool", "3")]]
    td = advance(env, td, CALL, "it is 3")
    assert said(td) == [[("user", "u1"), ("tool", "3")], [("tool", "3"), ("user", "u1")]]
    td = advance(env, td, "and?", CALL + CALL)
    assert said(td)[0][2:] == [("user", "u2")]
    assert said(td)[1][2:] == [("tool", "3"), ("tool", "3")]
    assert told(td, "turn") == [2, 1]


@pytest.mark.parametrize("text", ["<tool_call>{oops</tool_call>", call("unknown")])
def test_user_does_not_reply_to_an_error_result(text):
    env = user_env((1,), ScriptedUser(["u1"]))
    td = advance(env, begin(env), text)
    assert [role for role, _ in said(td)[0]] == ["tool"]


def test_user_that_leaves_ends_its_row_with_a_last_message():
    env = user_env((3,), Shopper())
    td = step(env, begin(env), "sold", "bye", "hello")["next"]
    assert ended(td) == [[True, True, False], [True, True, False], [False] * 3]
    assert said(td) == [[("user", "Thanks.")], [], [("user", "tea 1")]]
    assert told(td, "turn") == [1, 1, 1]


def test_replies_are_scored_in_their_turn_and_add_up_at_the_end():
    env = user_env((2,), Shopper())
    td = step(env, begin(env), "hello", CALL)["next"]
    assert told(td, "score") == [0.25, 0.0]
    td = step(env, advance(env, begin(env), "hello", CALL), "sold", "sold")["next"]
    assert told(td, "score") == [1.0, 1.0]
    assert told(td, "final_score") == [1.25, 1.0]


def test_final_score_of_an_interaction_replaces_earlier_scores():
    user = Shopper(judged=0.75)
    env = user_env((1,), user)
    td = step(env, advance(env, begin(env), "hello"), "sold")["next"]
    assert told(td, "final_score") == [0.75]
    assert user.diary[1][2] == ["q0", "hello", "tea 1", "sold", "Thanks."]


def test_row_ended_by_a_tool_is_scored_without_a_user_message():
    user = Shopper(judged=0.5)
    env = user_env((2,), user)
    td = step(env, begin(env), STOP, "hello")["next"]
    assert [role for role, _ in said(td)[0]] == ["tool"]
    assert told(td, "final_score") == [0.5, 0.0]
    assert ended(td) == [[True, False], [True, False], [False, False]]
    assert user.events("close") == ["0.0"]


def test_a_row_is_judged_once():
    """A row that is done stays done until its reset."""
    user = Shopper()
    env = user_env((2,), user)
    td = advance(env, begin(env), "sold", "hello")
    td = step(env, td, "anything", "hello")["next"]
    assert user.events("score") == ["0.0"]
    assert said(td)[0] == [("user", "Thanks.")]


def test_model_sends_the_last_message_after_max_turns_of_the_user():
    user = Shopper(judged=0.5)
    env = user_env((2,), user, max_turns=1)
    td = step(env, begin(env), "hello", CALL)
    assert ended(td["next"]) == [[False, False]] * 3
    td = step(env, env.step_mdp(td), "an answer", "hello")["next"]
    assert ended(td) == [[True, False], [False, False], [True, False]]
    assert said(td) == [[("user", "tea 1")], [("tool", "3"), ("user", "tea 1")]]
    assert told(td, "final_score") == [0.5, 0.0]


def test_a_row_that_end_trajectory_ends_is_judged_and_closed():
    user = Shopper(judged=0.5)
    env = user_env((1,), user, EndTrajectory(max_turns=1))
    td = step(env, begin(env), "hello")["next"]
    assert ended(td) == [[True], [False], [True]]
    assert told(td, "final_score") == [0.5]
    assert [kind for kind, *_ in user.diary] == ["open", "score", "close"]
    assert said(td) == [[]]


@pytest.mark.parametrize("text", ["crash", "hang"])
def test_failing_user_affects_one_row_and_logs_one_line(text, caplog):
    user = Shopper()
    env = user_env((2,), user, per_reply_timeout=0.2)
    td = step(env, begin(env), text, "hello")["next"]
    assert ended(td) == [[True, False], [False, False], [True, False]]
    assert told(td, "error") == [True, False]
    assert said(td) == [[], [("user", "tea 1")]]
    assert len(caplog.records) == 1
    assert "user:shopper" in caplog.text
    assert "trajectory 0.0" in caplog.text
    env.close()
    assert user.events("close").count("0.0") == 1


def test_user_that_hangs_on_open_does_not_delay_others(caplog):
    """The step returns while the opening still hangs; a session opened too late is closed."""
    go_on, closed = threading.Event(), threading.Event()

    class Slow(Interaction):
        @asynccontextmanager
        async def session(self, trajectory, **kwargs):
            await in_thread(go_on.wait)
            yield self
            closed.set()

        async def respond(self, messages): ...

    env = user_env((1,), Slow(), per_reply_timeout=0.01)
    td = step(env, begin(env), "hello")["next"]
    assert told(td, "error") == [True]
    assert not closed.is_set()
    go_on.set()
    assert closed.wait(limit(10))
    env.close()


def test_user_that_fails_to_score_leaves_no_final_score(caplog):
    class Unjust(Shopper):
        async def score(self, messages):
            raise RuntimeError("no")

    env = user_env((1,), Unjust())
    td = step(env, begin(env), "sold")["next"]
    assert (told(td, "error"), told(td, "score")) == ([True], [1.0])
    assert math.isnan(*told(td, "final_score"))
    assert ended(td) == [[True], [False], [True]]
    assert REASONS[td["agentic", "ended_by"].item()] == "user_failed"
    assert len(caplog.records) == 1


def test_users_of_all_rows_reply_concurrently():
    """Each waits for the other: one after the other, the timeout would end both rows."""

    class Meeting(Interaction):
        both = None

        async def respond(self, messages):
            if Meeting.both is None:
                Meeting.both = asyncio.Barrier(2)
            await Meeting.both.wait()
            return "met"

    env = user_env((2,), Meeting(), per_reply_timeout=30)
    td = step(env, begin(env), "a", "b")["next"]
    assert said(td) == [[("user", "met")]] * 2


def test_limiter_bounds_concurrent_users():
    running, most = 0, 0

    class Counted(Interaction):
        async def respond(self, messages):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return "x"

    env = user_env((4,), {"x": Counted()}, rate_limits={"x": RateLimiter(max_concurrent=1)})
    step(env, begin(env), *["hello"] * 4)
    assert most == 1


def by_column(rows):
    return {key: [row[key] for row in rows] for key in rows[0]}


def rows_env(rows, users, *transforms, batch=None, place="interaction_kwargs"):
    data = [{"query": f"q{i}", place: row} for i, row in enumerate(rows)]
    loader = DataLoader(data, collate_fn=by_column)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(batch or len(rows),))
    for transform in (tools(), UserSimulator(users), *transforms):
        env.append_transform(transform)
    return env


@pytest.mark.parametrize("place", ["interaction_kwargs", "extra_info"])
def test_each_row_gets_its_named_user_with_its_arguments(place):
    rows = [{"name": "shopper", "goal": "milk"}, {"name": "clerk", "goal": "x"}, {"name": "shopper"}]
    if place == "extra_info":
        rows = [{"index": i, "interaction_kwargs": row} for i, row in enumerate(rows)]
    clerk = Clerk({})
    env = rows_env(rows, [Shopper(), clerk], place=place)
    td = advance(env, env.reset(), *["hello"] * 3)
    assert [texts[-1] for texts in said(td)] == [("user", "milk 1"), ("user", "heard 1"), ("user", "tea 1")]
    env.close()
    assert len(clerk.finalized) == 1


def test_next_trajectory_of_a_row_gets_a_new_user():
    env = rows_env([{"goal": "milk"}, {"goal": "rice"}, {"goal": "soap"}], Shopper(), batch=1)
    td = env.reset()
    goals = []
    for _ in range(3):
        stepped, td = env.step_and_maybe_reset(answer(td, "hello"))
        goals.append(said(stepped["next"])[0][-1][1])
        stepped, td = env.step_and_maybe_reset(answer(td, "sold"))
    assert goals == ["milk 1", "rice 1", "soap 1"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "nobody"}, "row 0 names the interaction 'nobody'; known: shopper, parrot"),
        ("shopper", "row 0 is a mapping"),
    ],
)
def test_a_row_that_names_no_known_user_cannot_begin_and_costs_itself_only(value, message, caplog):
    env = rows_env([value, {"name": "parrot"}], [Shopper(), parrot])
    td = step(env, env.reset(), "hello", "hello")["next"]
    assert message in caplog.text
    assert td["agentic", "not_begun"].flatten().tolist() == [True, False]
    assert [REASONS[number] for number in td["agentic", "ended_by"].flatten()] == ["not_begun", ""]
    assert td["truncated"].flatten().tolist() == [True, False]


def test_a_row_must_name_one_of_several_users(caplog):
    env = user_env((1,), [Shopper(), parrot])
    td = step(env, begin(env), "hello")["next"]
    assert "names no interaction; known: shopper, parrot" in caplog.text
    assert td["agentic", "not_begun"].all()
    assert td["truncated"].all()


def test_columns_may_be_given_to_the_reset_itself():
    env = user_env((2,), Shopper())
    kwargs = NonTensorStack(NonTensorData({"goal": "milk"}), NonTensorData({"goal": "rice"}))
    td = advance(env, begin(env, interaction_kwargs=kwargs), "a", "b")
    assert [texts[-1][1] for texts in said(td)] == ["milk 1", "rice 1"]


def test_columns_may_be_nested_tensordicts():
    env = user_env((2,), Shopper())
    kwargs = lazy_stack([TensorDict(goal=NonTensorData(goal)) for goal in ("milk", "rice")])
    td = advance(env, begin(env, interaction_kwargs=kwargs), "a", "b")
    assert [texts[-1][1] for texts in said(td)] == ["milk 1", "rice 1"]


def test_reset_of_one_row_ends_only_its_conversation():
    user = Shopper()
    env = dataset_env(2, tools(), UserSimulator(user))
    _, td = env.step_and_maybe_reset(answer(env.reset(), "sold", "hello"))
    assert told(td, "turn") == [0, 1]
    assert user.events("close") == ["0.0"]
    _, td = env.step_and_maybe_reset(answer(td, "hello", "hello"))
    assert [texts[-1] for texts in said(td)] == [("user", "tea 1"), ("user", "tea 2")]
    env.close()
    assert sorted(user.events("open")) == sorted(user.events("close")) == ["0.0", "0.1", "1.0"]


def test_row_outside_the_step_is_not_changed():
    import torch

    user = Shopper()
    env = user_env((2,), user)
    td = answer(begin(env), "hello", "hello")
    td["_step"] = torch.tensor([[True], [False]])
    td = env.step(td)["next"]
    assert user.events("open") == ["0.0"]
    assert told(td, "turn") == [1, 0]


def test_a_grid_of_conversations_keeps_its_shape():
    env = user_env((2, 2), Shopper())
    td = step(env, begin(env), "hello", "sold", CALL, "crash")["next"]
    assert td["agentic", "user_turn"].shape == td["agentic", "user_score"].shape == (2, 2, 1)
    assert td["terminated"].tolist() == [[[False], [True]], [[False], [False]]]
    assert td["truncated"].tolist() == [[[False], [False]], [[False], [True]]]
    assert said(td) == [[("user", "tea 1")], [("user", "Thanks.")], [("tool", "3")], []]


@pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension")
@pytest.mark.parametrize("options", [{}, {"max_turns": 1}])
def test_the_specs_are_kept(options):
    env = dataset_env(2, tools(), UserSimulator(ScriptedUser(["u"]), **options))
    check_env_specs(env)
    spec = env.observation_spec["agentic"]
    td = env.reset()["agentic"]
    for name in ("user_turn", "user_score", "user_final_score", "user_error"):
        assert (spec[name].shape, spec[name].dtype) == (td[name].shape, td[name].dtype)
    assert td["user_score"].shape == (2, 1)


def closed_once(user):
    opened = {trajectory: task for kind, trajectory, task in user.diary if kind == "open"}
    closed = [(trajectory, task) for kind, trajectory, task in user.diary if kind == "close"]
    return sorted(closed, key=str) == sorted(opened.items(), key=str)


@pytest.mark.parametrize("ending", ["sold", "bye", "crash", "hang", "hello", STOP])
@pytest.mark.parametrize("how", ["close", "reset", "drop"])
def test_session_closes_once_in_its_task_after_any_ending(ending, how, caplog):
    user = Shopper()
    env = user_env((1,), user, per_reply_timeout=0.2)
    td = advance(env, begin(env), "hello")
    step(env, td, ending)
    if how == "reset":
        begin(env)
    elif how == "drop":
        import gc

        del env
        gc.collect()
        env = user_env((1,), user)
    env.close()
    env.close()
    _settled(user, 1)
    assert closed_once(user)


def _settled(user, count):
    """Let what closes in the background end."""
    from torchrl_agentic.dispatch.event_loop import run

    async def wait():
        while len(user.events("close")) < count:
            await asyncio.sleep(0)

    run(asyncio.wait_for(wait(), limit(10)))


def test_interrupt_closes_each_session_once():
    """Ctrl-C in the middle of a reply; the environment continues to work."""
    import _thread
    import signal

    user = Shopper()

    def interrupt(messages):
        _thread.interrupt_main(signal.SIGINT)
        threading.Event().wait(60)

    env = user_env((1,), {"a": Shopper(diary=user.diary), "b": interrupt})
    kwargs = NonTensorStack(NonTensorData({"name": "b"}))
    td = begin(env, interaction_kwargs=kwargs)
    with pytest.raises(KeyboardInterrupt):
        step(env, td, "hello")
    td = begin(env, interaction_kwargs=NonTensorStack(NonTensorData({"name": "a"})))
    td = step(env, td, "hello")["next"]
    assert said(td) == [[("user", "tea 1")]]
    env.close()
    assert closed_once(user)


def test_a_row_that_another_transform_ends_is_closed_before_its_reset():
    from torchrl.envs import StepCounter

    user = Shopper()
    env = dataset_env(1, tools(), UserSimulator(user), StepCounter(1))
    env.step_and_maybe_reset(ScriptedPolicy([["hello"]])(env.reset()))
    assert [kind for kind, *_ in user.diary] == ["open", "close"]


def test_tools_of_a_row_that_the_user_leaves_are_closed_at_once():
    from helpers.chat_envs import Counter

    counter = Counter()
    env = chat_env((1,), ToolCompose([counter]), UserSimulator(Shopper()))
    td = advance(env, begin(env), call("count"))
    step(env, td, "bye")
    assert counter.events("close") == ["0.0"]


def test_a_clone_has_conversations_of_its_own():
    user = Shopper()
    first = UserSimulator(user)
    envs = [chat_env((1,), tools(), transform) for transform in (first, first.clone())]
    tds = [advance(env, begin(env), "hello") for env in envs]
    tds = [advance(env, td, "hello") for env, td in zip(envs, tds, strict=True)]
    assert [said(td)[0][-1] for td in tds] == [("user", "tea 2")] * 2
    envs[0].close()
    assert said(advance(envs[1], tds[1], "hello"))[0][-1] == ("user", "tea 3")
    envs[1].close()
    assert len(user.events("open")) == len(user.events("close")) == 2


def test_environment_can_be_pickled_during_a_conversation():
    """Row arguments are pickled with the TensorDict; the conversation with the user restarts."""
    env = user_env((1,), ScriptedUser())
    td = begin(env, interaction_kwargs=NonTensorStack(NonTensorData({"replies": ["u1", "u2", "u3"]})))
    td = advance(env, advance(env, td, "hello"), "hello")
    copy = pickle.loads(pickle.dumps(env))
    assert [said(advance(one, td.clone(), "hello"))[0][-1][1] for one in (env, copy)] == ["u3", "u1"]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_fork_does_not_close_conversations_of_its_parent():
    """Their owner tasks are on an event loop that the child has not; closing them there would hang."""
    env = user_env((1,), ScriptedUser(["u1", "u2"]))
    advance(env, begin(env), "hello")
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work():
        there.send(said(advance(env, begin(env), "hello")))

    process = context.Process(target=work)
    process.start()
    assert here.poll(9)  # before the closing of another loop's session would be given up
    assert here.recv() == [[("user", "u1")]]
    process.join(limit(30))
    assert process.exitcode == 0


@pytest.mark.filterwarnings("ignore:(Prompt|Full) history should have one more batch dimension")
def test_user_simulator_works_in_batched_environments():
    env = SerialEnv(2, scripted_user_env)
    rollout = env.rollout(2, ScriptedPolicy(lambda chat: "hello"), break_when_any_done=False)
    assert told(rollout[..., -1]["next"], "turn") == [2, 2]
    env.close()


def test_ending_before_the_user_replies_is_rejected():
    for order in (0, 1):
        both = [EndTrajectory(when_no_calls=True), UserSimulator(ScriptedUser(["u"]))]
        env = chat_env((1,), tools(), *(reversed(both) if order else both))
        with pytest.raises(ValueError, match="when_no_calls"):
            begin(env)


def test_wrong_order_of_transforms_is_rejected():
    env = chat_env((1,), UserSimulator(ScriptedUser(["u"])), tools())
    with pytest.raises(ValueError, match=r"Compose\(ToolCompose"):
        begin(env)
    env = chat_env(
        (1,), tools(), TurnTokenizer(FAMILIES["qwen2_5"].tokenizer()), UserSimulator(ScriptedUser(["u"]))
    )
    with pytest.raises(ValueError, match="must see what UserSimulator writes"):
        begin(env)


def test_without_tools_the_error_names_the_requirement():
    env = TransformedEnv(ChatEnv(batch_size=(1,)), Compose(UserSimulator(ScriptedUser(["u"]))))
    with pytest.raises(RuntimeError, match="ToolCompose"):
        step(env, begin(env), "hello")


@pytest.mark.parametrize(
    ("items", "options", "words"),
    [
        ([], {}, "at least one"),
        ([parrot, parrot], {}, "two interactions are named 'parrot'"),
        (parrot, {"max_turns": 0}, "max_turns must be 1 or more"),
        (parrot, {"per_reply_timeout": 0}, "per_reply_timeout must be above 0"),
        (parrot, {"per_reply_timeout": float("nan")}, "per_reply_timeout must be above 0"),
        (
            parrot,
            {"rate_limits": {"x": RateLimiter(max_concurrent=1)}},
            "no interaction has this name",
        ),
    ],
)
def test_invalid_arguments_are_rejected(items, options, words):
    with pytest.raises(ValueError, match=words):
        UserSimulator(items, **options)


def test_the_role_of_the_user_can_be_another():
    env = user_env((1,), ScriptedUser(["u"]), role="customer")
    td = advance(env, begin(env), "hello")
    assert conversations(td)[0][-1].role == "customer"


def test_empty_user_reply_counts_as_a_turn():
    env = user_env((1,), ScriptedUser([Reply("")]))
    assert said(advance(env, begin(env), "hello")) == [[("user", "")]]


def test_recorder_gets_user_messages():
    turns = []
    compose = ToolCompose([add], recorder=turns.append)
    env = chat_env((1,), compose, UserSimulator(ScriptedUser(["u1"])))
    advance(env, advance(env, begin(env), "hello"), CALL)
    assert [message.content for message in turns[1].context] == ["u1"]
