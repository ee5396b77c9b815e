"""Transforms of others between ours, and stages of one's own, which work in both borders."""

import _thread
import asyncio
import contextlib
import itertools
import signal

import pytest
import torch
from helpers.borders import TOKENIZER, Answer, Script, differences, in_collector, in_environment
from helpers.chat_envs import begin as begun
from helpers.chat_envs import call, chat_env
from torchrl.envs import Compose, Transform

from torchrl_agentic import (
    AgentCollector,
    AnswerRewardTransform,
    Column,
    EndTrajectory,
    RecordTransform,
    Stage,
    ToolCompose,
    ToolResult,
    ToolRewardTransform,
    TurnTokenizer,
    TurnTransform,
    UserSimulator,
    tool,
)
from torchrl_agentic.interactions import Interaction, Reply
from torchrl_agentic.rollout import batch_metrics
from torchrl_agentic.testing import InProcessWorkers, ScriptedPolicy
from torchrl_agentic.trajectory.calls import CallsStage
from torchrl_agentic.trajectory.reasons import REASONS
from torchrl_agentic.transforms import history as border

ROW = {"query": "Work.", "answer": "42"}
WORK, DONE = Answer(call("work")), Answer("42")


@tool
def work() -> ToolResult:
    """Work."""
    return ToolResult.from_value("a secret", reward=0.5)


class Asks(Interaction):
    """Replies once, and notes how often it is asked and scores."""

    name = "asks"

    def __init__(self):
        self.asked, self.scored = [], []

    @contextlib.asynccontextmanager
    async def session(self, trajectory, **kwargs):
        yield self

    async def respond(self, messages):
        self.asked.append([message.text for message in messages])
        return Reply("Go on.", is_over=len(self.asked) > 3)

    async def score(self, messages):
        self.scored.append([message.text for message in messages])
        return 3.0


def transforms(*between, user=None, last=()):
    """Return a function that makes transforms, with some behind `ToolCompose` and some at the end."""

    def make(hook):
        compose = ToolCompose([work], recorder=hook)
        return Compose(
            compose,
            *(one() for one in between),
            EndTrajectory(max_turns=3, when_no_calls=user is None),
            *([] if user is None else [UserSimulator(user)]),
            TurnTokenizer(TOKENIZER, tools=compose.tools),
            ToolRewardTransform(),
            AnswerRewardTransform(lambda answer, truth: truth in answer),
            *(one() for one in last),
            *([] if hook is None else [RecordTransform(tokens=True)]),
        )

    return make


class TestTransformsOfOthersBetweenOurs:
    """TorchRL's and the user's, in an environment."""

    def test_later_stages_see_the_message_that_it_has_edited(self):
        class Redact(Transform):
            def _step(self, td, next_td):
                rows = border.prompts(next_td)
                for index, row in enumerate(rows):
                    for place, message in enumerate(row.messages):
                        if message.field("role") == "tool":
                            text = message.field("content").replace("secret", "[hidden]")
                            rows[index] = rows[index].replaced(
                                place, type(message)({**message, "content": text})
                            )
                border.set_prompts(next_td, rows)
                return next_td

        user = Asks()
        (seen,) = in_environment(transforms(Redact, user=user), [ROW], [[WORK, DONE]])
        assert [text for role, text, _ in seen.messages if role == "tool"] == ["a [hidden]"]
        assert "a [hidden]" in user.asked[0]
        decoded = TOKENIZER.decode(seen.tokens[0])
        assert ("a [hidden]" in decoded, "secret" in decoded) == (True, False)
        assert seen.columns["token_drift"] == 0

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    def test_a_row_that_it_ends_asks_no_user_and_gets_all_rewards(self, flag):
        class Ends(Transform):
            def _step(self, td, next_td):
                done = torch.ones_like(next_td["done"])
                return next_td.set("done", done).set(flag, done)

        user = Asks()
        (seen,) = in_environment(transforms(Ends, user=user), [ROW], [[DONE]])
        assert (user.asked, len(user.scored)) == ([], 1)
        assert (seen.terminated, seen.truncated) == (flag == "terminated", flag == "truncated")
        assert (seen.reward, seen.columns["user_final_score"]) == (1.0, 3.0)
        assert seen.record["reason"] == flag
        assert seen.columns["turn"] == 1

    def test_a_message_that_it_adds_reaches_user_tokens_and_record_and_is_not_answered(self):
        class Hints(Transform):
            def _step(self, td, next_td):
                hint = {"role": "user", "content": "Think again."}
                border.set_prompts(next_td, [row.extended([hint]) for row in border.prompts(next_td)])
                return next_td

        user = Asks()
        (seen,) = in_environment(transforms(Hints, user=user), [ROW], [[WORK, DONE]])
        assert user.asked == []
        assert [text for role, text, _ in seen.messages if role == "user"] == ["Work.", *["Think again."] * 3]
        assert user.scored[0][-1] == "Think again."
        decoded = TOKENIZER.decode(seen.tokens[0])
        assert decoded.count("Think again.") == 3
        assert seen.columns["token_drift"] == 0
        said = [text for turn in seen.record["turns"] for _, text, _ in turn[1]]
        assert [*said, *(text for _, text, _ in seen.record["rest"])].count("Think again.") == 3


class Reminds(Stage):
    """Adds a message behind each result."""

    def run(self, turns):
        for turn in turns:
            if turn.results:
                turn.add([{"role": "user", "content": f"{len(turn.read())} messages so far"}])


class SlowlyReminds(Reminds):
    """The same, and waits first."""

    def run(self, turns):
        return self._run(turns)

    async def _run(self, turns):
        await asyncio.sleep(0)
        super().run(turns)


class Ends(Stage):
    """Ends a trajectory at a word, with a reason of its own."""

    def __init__(self, word, **flags):
        self.word, self.flags = word, flags

    def run(self, turns):
        for turn in turns:
            if self.word in turn.message.text:
                turn.end("said_it", **self.flags)


class Pays(Stage):
    """Gives a reward for each turn, and one for all of them at the end."""

    gives_rewards = True

    def run(self, turns):
        for turn in turns:
            state = turn.episode.state
            state[self] = state.get(self, 0) + 1
            turn.give(100.0 * state[self] if turn.is_over else 0.25)


COLUMNS = (
    Column("n_words", int, "sum", lambda turn: len(turn.message.text.split())),
    Column("said", list, "join", lambda turn: [turn.message.text]),
    Column("was_long", bool, "any", lambda turn: len(turn.message.text) > 10),
    Column("share", float, "last", lambda turn: len(turn.calls)),
    Column("turns_so_far", int, "last", of_episode=lambda episode: episode.n_turns),
)


class Counts(Stage):
    """Fills in columns of its own."""

    columns = COLUMNS

    def run(self, turns):
        pass


def in_collector_batch(make, script, **options):
    """Return a batch of one trajectory."""
    with AgentCollector(
        make(None),
        engine=Script({"t0": script}, None),
        tokenizer=None,
        tasks=[{"name": "t0", **ROW}],
        **options,
    ) as collector:
        return next(iter(collector))


def both(make, scripts=((WORK, WORK, DONE), (DONE,)), own=()):
    """Return what the environment reports of each row, after comparing it with the collector's report."""
    rows = [ROW] * len(scripts)
    env = in_environment(make, rows, scripts, own=own)
    for one, other in zip(env, in_collector(make, rows, scripts, own=own), strict=True):
        assert other.failure == ""
        assert not differences(one, other)
    return env


class TestStagesOfOnesOwn:
    @pytest.mark.parametrize("kind", [Reminds, SlowlyReminds])
    def test_a_message_that_it_adds_is_in_conversation_tokens_and_record_of_both(self, kind):
        long, short = both(transforms(lambda: TurnTransform(kind())))
        added = [text for role, text, _ in long.messages if role == "user"]
        assert added == ["Work.", "3 messages so far", "6 messages so far"]
        assert "6 messages so far" in TOKENIZER.decode(long.tokens[0])
        assert [text for role, text, _ in short.messages if role == "user"] == ["Work."]

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    def test_an_ending_of_its_own_has_its_reason_in_both(self, flag):
        make = transforms(lambda: TurnTransform(Ends("tool_call", **{flag: True})))
        env, _ = in_environment(make, [ROW, ROW], [[WORK], [DONE]])
        collector, _ = in_collector(make, [ROW, ROW], [[WORK], [DONE]])
        assert (collector.failure, collector.reason) == ("", "said_it")
        assert (env.record["reason"], collector.record["reason"]) == ("said_it", "said_it")
        assert (env.columns["ended_by"], collector.columns["ended_by"]) == (0, 0)
        found = differences(env, collector)
        assert set(found) == {"reason"}  # in an environment only the record has it: columns are numbers
        assert (env.terminated, env.truncated) == (flag == "terminated", flag == "truncated")
        assert env.columns["turn"] == 1

    def test_curves_of_training_name_an_ending_of_its_own(self):
        batch = in_collector_batch(transforms(lambda: TurnTransform(Ends("42", truncated=True))), [DONE])
        ended = {name: value for name, value in batch_metrics(batch).items() if name.startswith("ended/")}
        assert ended == {"ended/said_it": 1.0}

    def test_the_first_reason_counts_in_both(self):
        """`EndTrajectory` behind it would end the same turn."""
        make = transforms(lambda: TurnTransform(Ends("42", truncated=True)))
        env = in_environment(make, [ROW], [[DONE]])[0]
        collector = in_collector(make, [ROW], [[DONE]])[0]
        assert (env.record["reason"], collector.record["reason"]) == ("said_it", "said_it")
        assert env.columns["ended_by"] == collector.columns["ended_by"]

    def test_its_rewards_are_added_to_those_of_others_in_both(self):
        long, short = both(transforms(last=[lambda: TurnTransform(Pays())]))
        assert long.reward == 0.5 + 0.5 + 1.0 + 0.25 + 0.25 + 300.0
        assert short.reward == 1.0 + 100.0
        assert long.record["rewards"] == [0.75, 0.75, 301.0]

    def test_columns_of_its_own_arrive_in_step_and_batch(self):
        long, short = both(transforms(lambda: TurnTransform(Counts())), own=COLUMNS)
        assert {name: short.columns[name] for name in ("n_words", "said", "was_long", "share")} == {
            "n_words": 1, "said": ["42"], "was_long": False, "share": 0.0,
        }  # fmt: skip
        assert long.columns["said"] == [WORK.text, WORK.text, "42"]
        assert (long.columns["was_long"], long.columns["turns_so_far"]) == (True, 3)

    def test_a_column_with_the_name_of_one_of_ours_is_refused_in_both(self):
        class Overwrites(Stage):
            columns = (Column("turn", int, "last", lambda turn: 7),)

            def run(self, turns):
                del turns

        with pytest.raises(ValueError, match=r"column 'turn'.*rename it"):
            begun(chat_env((1,), ToolCompose([work]), TurnTransform(Overwrites())))
        with pytest.raises(ValueError, match=r"column 'turn'.*rename it"):
            in_collector_batch(transforms(lambda: TurnTransform(Overwrites())), [DONE])

    def test_columns_of_its_own_have_the_types_of_their_kinds_in_a_batch(self):
        (row,) = in_collector_batch(transforms(lambda: TurnTransform(Counts())), [WORK, DONE]).tensordicts
        types = {column.name: getattr(row["agentic", column.name], "dtype", list) for column in COLUMNS}
        assert types == {
            "n_words": torch.int64, "said": list, "was_long": torch.bool, "share": torch.float32,
            "turns_so_far": torch.int64,
        }  # fmt: skip

    def test_columns_of_its_own_are_in_the_specs_and_zero_at_a_reset(self):
        env = chat_env((2,), ToolCompose([work]), TurnTransform(Counts()))
        td = begun(env)
        for column in COLUMNS:
            spec = env.observation_spec["agentic", column.name]
            if column.kind is not list:
                assert td["agentic", column.name].tolist() == [[0], [0]]
                assert td["agentic", column.name].dtype == spec.dtype
            assert spec.shape[:1] == (2,)
        step = env.step(ScriptedPolicy([["one two"], [call("work")]])(td))["next"]
        assert step["agentic", "n_words"].tolist()[0] == [2]
        assert step["agentic", "share"].dtype == torch.float32
        env.close()

    def test_a_repeated_step_runs_no_stage_twice_and_writes_the_same(self):
        runs = itertools.count()

        class Once(Reminds):
            columns = (Column("number", int, "last", lambda turn: turn.episode.state[once]),)
            gives_rewards = True

            def run(self, turns):
                super().run(turns)
                for turn in turns:
                    turn.episode.state[self] = next(runs)
                    turn.give(1.0)
                    turn.end("said_it", truncated=True)

        once = Once()
        env = chat_env((2,), ToolCompose([work]), TurnTransform(once))
        td = ScriptedPolicy([[call("work")], ["x"]])(begun(env))
        first, again = (env.step(td.clone())["next"] for _ in range(2))
        assert next(runs) == 2
        for key in ("reward", "done", "truncated", ("agentic", "number"), ("agentic", "n_calls")):
            assert first[key].tolist() == again[key].tolist()
        said = [
            [[m.content for m in row] for row in map(list, one["history"].prompt.unbind(0))]
            for one in (first, again)
        ]
        assert said[0] == said[1]
        env.close()

    @pytest.mark.parametrize("where", ["before calls run", "while calls run", "behind them"])
    def test_a_step_that_was_interrupted_can_be_repeated(self, where):
        """By Ctrl-C, as it ends the wait for the event loop."""
        calls, pending = [], [where]

        def interrupt(place):
            if pending == [place]:
                pending.clear()
                raise KeyboardInterrupt

        class Calls(CallsStage):
            def run(self, turns):
                interrupt("before calls run")
                return super().run(turns)

        class Stops(Reminds):
            def run(self, turns):
                interrupt("behind them")
                super().run(turns)

        @tool
        async def count() -> str:
            """Count."""
            if pending == ["while calls run"]:
                pending.clear()
                _thread.interrupt_main(signal.SIGINT)
                await asyncio.Event().wait()  # until it is cancelled
            calls.append(1)
            return f"{len(calls)} calls"

        compose = ToolCompose([count])
        compose.stage = Calls(compose.parser)
        env = chat_env((1,), compose, TurnTransform(Stops()))
        td = ScriptedPolicy([[call("count")]])(begun(env))
        with pytest.raises(KeyboardInterrupt):
            env.step(td.clone())
        step = env.step(td.clone())["next"]
        (chat,) = border.prompts(step)
        assert [message.field("content") for message in chat.messages[2:]] == ["1 calls", "3 messages so far"]
        assert chat.messages[2].field("tool_call_id") == "call_0_0"
        assert step["agentic", "n_calls"].item() == step["agentic", "turn"].item() == 1
        env.close()

    def test_two_of_one_class_both_act(self):
        make = transforms(lambda: TurnTransform(Reminds()), lambda: TurnTransform(Reminds()))
        (long,) = both(make, [[WORK, DONE]])
        assert [text for role, text, _ in long.messages if role == "user"] == [
            "Work.", "3 messages so far", "4 messages so far",
        ]  # fmt: skip

    def test_in_front_of_tool_compose_it_is_refused_in_both_with_the_order_that_works(self):
        def make(hook):
            return Compose(TurnTransform(Counts()), ToolCompose([work]), EndTrajectory(when_no_calls=True))

        for run in (in_environment, in_collector):
            with pytest.raises(ValueError, match="Counts reads what ToolCompose writes") as error:
                run(make, [ROW], [[DONE]])
            assert "Compose(ToolCompose(...), Counts(...))" in str(error.value)

    def test_a_raise_ends_a_step_and_costs_a_collector_its_trajectory(self):
        class Raises(Stage):
            def run(self, turns):
                if any("42" in turn.message.text for turn in turns):
                    raise ZeroDivisionError("a bug of the stage")

        make = transforms(lambda: TurnTransform(Raises()))
        with pytest.raises(ZeroDivisionError, match="a bug of the stage"):
            in_environment(make, [ROW], [[DONE]])
        failed, kept = in_collector(make, [ROW, ROW], [[DONE], [Answer("no")]])
        assert (failed.failure, kept.failure) == ("crash", "")


def test_an_answer_in_the_last_turn_that_a_collector_allows_is_an_answer():
    def make(hook):
        del hook
        ending = EndTrajectory(when_no_calls=True)
        return Compose(ToolCompose([work]), ending, TurnTokenizer(TOKENIZER, tools=[work]))

    batch = in_collector_batch(make, [WORK, DONE], max_turns=2)
    assert REASONS[int(batch[-1]["agentic", "ended_by"])] == "no_calls"


BEFORE_THE_END = [
    (AnswerRewardTransform, EndTrajectory),
    (ToolRewardTransform, EndTrajectory),
    (ToolRewardTransform, UserSimulator),
]


@pytest.mark.parametrize(("first", "second"), BEFORE_THE_END, ids=lambda one: one.__name__)
def test_rewards_in_front_of_what_ends_trajectories_are_logged_with_the_order_that_works(
    first, second, caplog
):
    def make(hook):
        del hook
        ending = EndTrajectory(max_turns=1) if second is EndTrajectory else UserSimulator(Asks())
        return Compose(ToolCompose([work]), first(), ending, TurnTokenizer(TOKENIZER, tools=[work]))

    for run in (in_environment, in_collector):
        run(make, [ROW] * 2, [[DONE]] * 2)
    ours = [record.message for record in caplog.records if record.name.endswith("trajectory.episode")]
    assert len(ours) == 2
    for message in ours:
        assert f"Compose({second.__name__}(...), {first.__name__}(...))" in message


class Remembers(Stage):
    """Keeps what it has seen in a list of the trajectory, reads the right answer, and gives two rewards."""

    gives_rewards = True
    columns = (
        Column("n_seen", int, "last", of_episode=lambda episode: len(next(iter(episode.state.values()), ()))),
        Column("n_messages", int, "last", lambda turn: len(turn.read())),
        Column("n_earlier", int, "sum", lambda turn: len(turn.earlier)),
    )

    def run(self, turns):
        for turn in turns:
            turn.episode.state.setdefault(self, []).append(turn.number)
            turn.give(float(turn.lookup(["answer"]).get("answer") == "42"))
            turn.give(0.5)


def test_what_a_stage_reads_and_gives_is_the_same_in_both():
    long, short = both(transforms(lambda: TurnTransform(Remembers())), own=Remembers.columns)
    assert short.reward == 1.0 + 1.5  # the right answer, and those of the stage
    assert (long.columns["n_seen"], long.columns["n_messages"]) == (3, 6)


def test_a_stage_of_ones_own_reads_the_right_answer_on_a_worker():
    def make(hook):
        return Compose(ToolCompose([work]), EndTrajectory(when_no_calls=True), TurnTransform(Remembers()),
                       TurnTokenizer(TOKENIZER))  # fmt: skip

    (row,) = in_collector_batch(make, [WORK, DONE], workers=InProcessWorkers(1)).tensordicts
    assert float(row["reward"]) == 3.0


def test_branches_do_not_share_what_stages_keep():
    compose = ToolCompose([work])
    env = chat_env((2,), compose, TurnTransform(Remembers()))
    policy = ScriptedPolicy([[call("work")] * 3] * 2)
    td = env.step_mdp(env.step(policy(begun(env))))
    compose.branch(0, [1])
    found = env.step(policy(td))["next", "agentic", "n_seen"]
    assert found.flatten().tolist() == [2, 2]


def test_rewards_at_the_end_do_not_count_the_tries_that_were_given_up():
    @tool
    def paid() -> ToolResult:
        """Pay."""
        return ToolResult.from_value("paid", reward=1.0)

    at_the_end = ToolRewardTransform(place="end")
    env = chat_env((1,), ToolCompose([paid]), EndTrajectory(when_no_calls=True), at_the_end)
    root = begun(env)
    for number in range(3):  # three different messages behind one prompt
        tried = env.step(ScriptedPolicy([[f"try {number} " + call("paid")]])(root.copy()))
    ended = env.step(ScriptedPolicy([["Done."] * 2])(env.step_mdp(tried)))
    assert float(ended["next", "reward"]) == 1.0
