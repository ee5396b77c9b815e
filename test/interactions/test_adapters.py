"""Functions and verl's interaction classes as interactions, and rejected objects."""

import asyncio
import threading

import pytest
from helpers.limit import limit
from helpers.simulated_users import AsyncClerk, Clerk, Shopper, eager, parrot

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import UserFailed
from torchrl_agentic.interactions import (
    FunctionUser,
    Interaction,
    Reply,
    ScriptedUser,
    VerlInteraction,
    as_interaction,
    in_thread,
)
from torchrl_agentic.interactions.base import name_of
from torchrl_agentic.interactions.user_tool import UserTool, final_score, reply, set_arguments
from torchrl_agentic.messages import Message

ASKED = (Message("user", "q"), Message("assistant", "a"))
SOLD = (*ASKED, Message("user", "r"), Message("assistant", "sold"))
CLERKS = pytest.mark.parametrize("kind", [Clerk, AsyncClerk])


def dispatcher_of(item, **options):
    return Dispatcher([UserTool(as_interaction(item), "user:x")], validate_inputs=False, **options)


async def talk(item, *conversations, kwargs=None, trajectory="0.0"):
    """One trajectory: a reply to each conversation, then the final_score of the last."""
    dispatcher = dispatcher_of(item)
    session = dispatcher.session(trajectory)
    set_arguments(session, kwargs or {})
    try:
        said = [await reply(session, "x", messages) for messages in conversations]
        return said, await final_score(session, "x", conversations[-1])
    finally:
        await session.close()
        await dispatcher.close()


async def test_function_reply_is_its_return_value():
    assert await talk(parrot, ASKED) == ([Reply("a")], None)
    assert (await talk(eager, ASKED))[0] == [Reply("I want tea.", 0.5)]


async def test_function_gets_the_row_arguments_that_it_names():
    assert (await talk(eager, ASKED, kwargs={"goal": "milk", "other": 1}))[0] == [Reply("I want milk.", 0.5)]

    def all_of_it(messages, **kwargs):
        return str(kwargs)

    assert (await talk(all_of_it, ASKED, kwargs={"a": 1}))[0] == [Reply("{'a': 1}")]


async def test_function_that_returns_none_ends_the_conversation():
    assert (await talk(lambda messages: None, ASKED))[0] == [Reply(is_over=True)]


async def test_a_function_runs_off_the_event_loop_if_it_blocks():
    def where(messages):
        return str(threading.get_ident())

    async def here(messages):
        return str(threading.get_ident())

    ours = str(threading.get_ident())
    assert (await talk(where, ASKED))[0][0].text != ours
    assert (await talk(here, ASKED))[0][0].text == ours


async def test_blocking_users_answer_at_the_same_time():
    """Each waits for the other: one after the other, neither would answer."""
    both = threading.Barrier(2, timeout=limit(30))

    def wait(messages):
        both.wait()
        return "met"

    dispatcher = dispatcher_of(wait)
    sessions = [dispatcher.session(f"t{index}") for index in range(2)]
    said = await asyncio.gather(*(reply(session, "x", ASKED) for session in sessions))
    assert said == [Reply("met")] * 2
    await dispatcher.close()


@pytest.mark.parametrize("value", [42, ["text"], Reply(text=None), Reply("x", score="much")])
async def test_invalid_reply_is_a_failure_logged_once(value, caplog):
    with pytest.raises(UserFailed, match="user:x"):
        await talk(lambda messages: value, ASKED)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_text_that_cannot_be_encoded_is_replaced():
    assert (await talk(lambda messages: "a\ud800b", ASKED))[0] == [Reply("a?b")]


async def test_a_user_that_takes_too_long_is_logged_once_and_gives_nothing(caplog):
    dispatcher = dispatcher_of(Shopper(), per_call_timeout=0.01)
    session = dispatcher.session("0.0")
    with pytest.raises(UserFailed, match="did not finish"):
        await reply(session, "x", (Message("assistant", "hang"),))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "user:x (trajectory 0.0)" in caplog.text
    await dispatcher.close()


@CLERKS
async def test_an_object_in_verl_s_shape_talks_and_judges(kind):
    clerk = kind({})
    said, judged = await talk(clerk, ASKED, SOLD, kwargs={"goal": "milk"})
    assert said == [Reply("heard 1", 0.5, metadata={"k": 1}), Reply("heard 2", 0.5, True, {"k": 1})]
    assert judged == 2.0


@CLERKS
async def test_interaction_starts_with_the_row_arguments_and_is_finalised_once(kind):
    clerk, seen = kind({"name": "clara"}), []
    start = clerk.start_interaction
    clerk.start_interaction = lambda i, **kwargs: seen.append((i, kwargs)) or start(i, **kwargs)
    await talk(clerk, ASKED, kwargs={"goal": "milk"})
    assert [kwargs for _, kwargs in seen] == [{"name": "clara", "goal": "milk"}]
    prefix = "mine-" if kind is AsyncClerk else ""
    assert clerk.finalized == [prefix + seen[0][0]]
    assert clerk.instances == {}


@CLERKS
async def test_equal_names_of_trajectories_are_other_instances(kind):
    """Clones of an environment share the object, and name their trajectories alike."""
    clerk = kind({})
    await asyncio.gather(*(talk(clerk, ASKED) for _ in range(2)))
    assert len(set(clerk.finalized)) == 2


async def test_its_blocking_methods_all_run_off_the_event_loop():
    clerk = Clerk({})
    await talk(clerk, ASKED)
    assert clerk.threads
    assert threading.get_ident() not in clerk.threads


async def test_it_gets_messages_as_dicts_with_their_calls():
    clerk, seen = Clerk({}), []
    generate = clerk.generate_response
    clerk.generate_response = lambda i, messages, **more: (
        seen.append(messages) or generate(i, messages, **more)
    )
    calls = [{"id": "c1", "function": {"name": "f"}}]
    asked = (Message("assistant", "a", tuple(calls)), Message("tool", "3", tool_call_id="c1"), *ASKED)
    await talk(clerk, asked)
    assert seen == [
        [
            {"role": "assistant", "content": "a", "tool_calls": calls},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
        ]
    ]


async def test_interaction_that_fails_to_start_is_not_finalised(caplog):
    clerk = Clerk({})
    with pytest.raises(UserFailed):
        await talk(clerk, ASKED, kwargs={"goal": "nothing"})
    assert clerk.finalized == []
    assert "nothing to sell" in caplog.text


async def test_interaction_cancelled_while_starting_is_finalised():
    """It may have started, so it must be finalised."""
    started, finalized = asyncio.Event(), []

    class Slow:
        async def start_interaction(self, instance_id, **kwargs):
            started.set()
            await asyncio.Event().wait()

        async def generate_response(self, instance_id, messages, **kwargs): ...

        async def finalize_interaction(self, instance_id):
            finalized.append(instance_id)

    async def hold():
        async with as_interaction(Slow()).session("0.0"):
            pass

    task = asyncio.create_task(hold())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(finalized) == 1


async def test_a_base_class_s_score_judges_nothing():
    """Verl's own returns 0.0, which would hide the scores of the replies."""

    class BaseInteraction(Clerk):
        pass

    BaseInteraction.calculate_score = Clerk.calculate_score

    class Own(BaseInteraction):
        pass

    assert (await talk(Own({}), ASKED))[1] is None


@pytest.mark.parametrize("value", ["text", (True, "text"), None])
async def test_error_for_a_wrong_verl_response_shows_its_form(value, caplog):
    clerk = Clerk({})
    clerk.generate_response = lambda *_, **__: value
    with pytest.raises(UserFailed):
        await talk(clerk, ASKED)
    assert "(should_terminate, text, score, metadata)" in caplog.text


def test_names_come_from_the_object_or_its_class():
    class GSM8KInteraction(Interaction):
        async def respond(self, messages): ...

    class Plain:
        def start_interaction(self): ...

        def generate_response(self): ...

    assert name_of(GSM8KInteraction()) == "gsm8k"
    assert name_of(as_interaction(Plain())) == "plain"
    assert name_of(as_interaction(Clerk({"name": "clara"}))) == "clara"
    assert name_of(as_interaction(parrot)) == "parrot"
    assert name_of(as_interaction(lambda messages: "x")) == "user"
    assert name_of(ScriptedUser([], name="s")) == "s"


def test_error_for_an_object_that_is_not_an_interaction_shows_the_form():
    class Blocking(Interaction):
        def respond(self, messages): ...

    for item, words in (
        (Clerk, "is a class"),
        ("text", "an interaction is"),
        (3, "got int"),
        (Blocking(), "async def respond"),
    ):
        with pytest.raises(TypeError, match=words):
            as_interaction(item)
    with pytest.raises(TypeError, match="a list of replies"):
        ScriptedUser("hello")


def test_interaction_is_returned_unchanged():
    user = ScriptedUser(["x"])
    assert as_interaction(user) is user
    assert isinstance(as_interaction(parrot), FunctionUser)
    assert isinstance(as_interaction(Clerk({})), VerlInteraction)


async def test_error_for_unexpected_row_arguments_names_them(caplog):
    class Plain(Interaction):
        async def respond(self, messages):
            return "hi"

    assert (await talk(Plain(), ASKED))[0] == [Reply("hi")]
    with pytest.raises(UserFailed):
        await talk(Plain(), ASKED, kwargs={"goal": 1})
    assert "takes no interaction_kwargs, and the row has goal" in caplog.text


async def test_blocking_work_of_an_interaction_runs_on_the_simulator_s_threads():
    class Thinker(Interaction):
        async def respond(self, messages):
            return await in_thread(lambda: threading.current_thread().name)

    assert (await talk(Thinker(), ASKED))[0][0].text == "torchrl_agentic-tool"
    assert await in_thread(lambda: 1) == 1


async def test_set_up_and_tear_down_are_called_once_for_the_process():
    class Owner(Interaction):
        events: list[str] = []  # noqa: RUF012

        async def setup(self):
            self.events.append("setup")

        async def teardown(self):
            self.events.append("teardown")

        async def respond(self, messages):
            return "hi"

    dispatcher = dispatcher_of(Owner())
    for index in range(2):
        async with dispatcher.session(f"t{index}") as session:
            await reply(session, "x", ASKED)
    await dispatcher.close()
    assert Owner.events == ["setup", "teardown"]
