"""Equal calls run once, whether they overlap or come later; nothing that went wrong is kept."""

import asyncio
import contextlib
import pickle
import threading

import pytest
from helpers.wrapper_tools import Gated, Notes, Scripted, add, ask, by_hand, ctx

from torchrl_agentic import RateLimiter
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.messages import JsonPart, ParsedCall, Status, Timing, ToolResult
from torchrl_agentic.testing import run_skipping
from torchrl_agentic.tools import Budgeted, Cached
from torchrl_agentic.tools.base import Effects, Tool
from torchrl_agentic.tools.function import Injected, tool


async def test_a_call_that_was_answered_is_not_run_again():
    tool = Cached(Scripted("a", "b"))
    first, again, other = await ask(tool, {"q": 1}, {"q": 1}, {"q": 2})
    assert (first.text, again.text, other.text) == ("a", "a", "b")
    assert (first.meta, again.meta) == (None, {"cached": True})


@pytest.mark.parametrize("together", [False, True])
async def test_what_one_call_changes_in_its_result_is_not_in_those_of_others(together):
    def made():
        return ToolResult((JsonPart({"a": [1]}),), meta={"seen": []}, metrics={"n": [1]})

    tool = Cached(Scripted(made()), "global")
    whole = await ask(tool, *[{"q": 1}] * 2) if together else [await by_hand(tool, q=1) for _ in range(2)]
    for one in whole:
        assert one.meta["seen"] == []
        one.meta["seen"].append("changed")
        one.parts[0].data["a"].append(2)
        one.metrics["n"].append(2)
    again = await by_hand(tool, q=1)
    assert (again.parts, again.metrics) == (made().parts, made().metrics)
    assert again.meta == {"seen": [], "cached": True}


async def test_a_result_that_cannot_be_copied_is_not_shared():
    tool = Cached(Scripted(ToolResult(meta={"lock": threading.Lock()}), "b"))
    first, again = await ask(tool, {"q": 1}, {"q": 1})
    assert (first.text, again.text, len(tool.store)) == ("", "b", 0)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"a": 1, "b": [1]}, {"b": [1], "a": 1}, True),
        ({"a": 1}, {"a": 1.0}, False),
        ({"a": 1}, {"a": True}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": None}, {}, False),
        ({"a": "\ud800"}, {"a": "\ud800"}, True),
    ],
)
async def test_arguments_are_equal_if_their_json_is(one, other, equal):
    tool = Cached(Scripted(1, 2))
    assert (await by_hand(tool, **one)).text == "1"
    assert (await by_hand(tool, **other)).text == ("1" if equal else "2")


async def test_arguments_that_no_json_can_hold_are_not_cached():
    tool = Cached(Scripted(1, 2))
    assert [(await by_hand(tool, a=10**9999)).text for _ in range(2)] == ["1", "2"]


@pytest.mark.parametrize(
    ("scope", "runs"), [("trajectory", 4), ("group", 2), ("global", 1)], ids=["trajectory", "group", "global"]
)
async def test_a_cache_is_as_wide_as_its_scope(scope, runs):
    """Four trajectories in two groups."""
    group = (lambda trajectory: trajectory[0]) if scope == "group" else None
    inner = Scripted("a")
    dispatcher = Dispatcher([Cached(inner, scope, group=group)])
    for trajectory in ("a0", "a1", "b0", "b1"):
        async with dispatcher.session(trajectory) as session:
            await session.run([ParsedCall("scripted", {"q": 1}, "c1")])
            await session.run([ParsedCall("scripted", {"q": 1}, "c2")])
    assert len(inner.seen) == runs
    await dispatcher.close()


async def test_branch_sees_the_cache_of_its_source_only():
    inner = Scripted(1, 2, 3)
    dispatcher = Dispatcher([Cached(inner)])
    source, branch = dispatcher.session("source"), dispatcher.session("branch")

    async def asked(session, q):
        (result,) = await session.run([ParsedCall("scripted", {"q": q}, "c")])
        return result.text

    assert await asked(source, "a") == "1"
    await source.branch([branch])
    assert (await asked(source, "b"), await asked(branch, "a"), await asked(branch, "b")) == ("2", "1", "3")
    await dispatcher.close()


async def test_equal_calls_that_overlap_run_once():
    inner = Gated()
    tool = Cached(inner)
    calls = [asyncio.create_task(by_hand(tool)) for _ in range(5)]
    await inner.begun.acquire()
    inner.go_on.set()
    assert [result.text for result in await asyncio.gather(*calls)] == ["1"] * 5


async def test_a_leader_that_is_cancelled_hands_over_to_one_of_those_that_wait():
    inner = Gated()
    tool = Cached(inner)
    calls = [asyncio.create_task(by_hand(tool)) for _ in range(4)]
    await inner.begun.acquire()
    calls[0].cancel()
    await inner.begun.acquire()
    inner.go_on.set()
    assert [result.text for result in await asyncio.gather(*calls[1:])] == ["2"] * 3
    assert calls[0].cancelled()
    assert inner.calls == 2


async def test_waiting_call_can_be_cancelled_without_affecting_others():
    inner = Gated()
    tool = Cached(inner)
    calls = [asyncio.create_task(by_hand(tool)) for _ in range(3)]
    await inner.begun.acquire()
    calls[1].cancel()
    await asyncio.wait([calls[1]])
    inner.go_on.set()
    assert (await calls[0]).text == (await calls[2]).text == "1"


class Fails(Gated):
    """Waits, then fails as scripted, then returns a result."""

    def __init__(self, outcome):
        super().__init__()
        self.outcome = outcome

    async def run(self, args, ctx):
        calls = await super().run(args, ctx)
        if calls > 1 or self.calls > 1:
            return "fine"
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    "outcome",
    [
        InfrastructureError("x"),
        TimeoutError(),
        RuntimeError("a bug"),
        ToolResult.from_text("", status=Status.INFRA),
        ToolResult.from_text("", status=Status.SKIPPED),
    ],
)
async def test_a_failure_of_the_leaders_own_is_not_that_of_others(outcome):
    """They must not read of a budget, or of a timeout, of another trajectory; each runs by itself."""
    inner = Fails(outcome)
    tool = Cached(inner, "global")
    calls = [asyncio.create_task(by_hand(tool)) for _ in range(3)]
    await inner.begun.acquire()
    inner.go_on.set()
    _, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert [result.text for result in others] == ["fine"] * 2
    assert inner.calls == 3


class Hangs(Tool):
    """Its first call never ends, even if it is cancelled; the others take a second."""

    name, description, effects = "hangs", "Wait.", Effects.PURE

    def __init__(self):
        self.log = []

    async def run(self, args, ctx):
        number = len(self.log)
        self.log.append(asyncio.get_running_loop().time())
        if number == 0:
            for _ in range(100):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1)
        await asyncio.sleep(1)
        return number


def test_calls_that_waited_for_a_timeout_run_at_once_beside_each_other():
    """None waits for two timeouts, nor for a call that does not end when it is stopped."""

    async def run():
        dispatcher = Dispatcher([Cached(tool, "global")], per_call_timeout=5)
        sessions = [dispatcher.session(f"t{number}") for number in range(4)]
        found = await asyncio.gather(*(one.run([ParsedCall("hangs", {}, "c")]) for one in sessions))
        return [result.status for (result,) in found]

    tool = Hangs()
    assert run_skipping(run()) == [Status.TIMEOUT, *[Status.OK] * 3]
    assert tool.log == [0.0, 5.0, 5.0, 5.0]


async def test_calls_that_wait_for_an_equal_one_hold_no_slot_of_a_limiter():
    limiter, inner = RateLimiter(max_concurrent=2), Gated()
    dispatcher = Dispatcher([Cached(inner, "global")], rate_limits={"gated": limiter})
    sessions = [dispatcher.session(f"t{number}") for number in range(5)]
    calls = [asyncio.create_task(one.run([ParsedCall("gated", {}, "c")])) for one in sessions]
    await inner.begun.acquire()
    while limiter.stats().granted < 5:
        await asyncio.sleep(0)
    assert (limiter.stats().in_flight, limiter.stats().waiting) == (1, 0)
    inner.go_on.set()
    assert [result.text for (result,) in await asyncio.gather(*calls)] == ["1"] * 5
    assert (inner.calls, limiter.stats().in_flight) == (1, 0)
    await dispatcher.close()


async def test_an_error_of_the_model_holds_for_all_that_wait_and_is_not_kept():
    inner = Fails(ToolError("no such page"))
    tool = Cached(inner)
    calls = [asyncio.create_task(by_hand(tool)) for _ in range(3)]
    await inner.begun.acquire()
    inner.go_on.set()
    assert [r.status for r in await asyncio.gather(*calls)] == [Status.ERROR] * 3
    assert (await by_hand(tool)).text == "fine"


async def test_those_used_last_are_kept():
    inner = Scripted("x")
    tool = Cached(inner, max_entries=2)
    for q in (1, 2, 1, 3, 1, 2):
        await by_hand(tool, q=q)
    assert [seen["q"] for seen in inner.seen] == [1, 2, 3, 2]
    assert len(tool.store) == 2


async def test_a_hit_has_waited_in_no_line():
    """The time in the tool's own line is that of the call that ran."""
    tool = Cached(Scripted(ToolResult(timing=Timing(0, 5, 1))))
    assert (await by_hand(tool)).timing is not None
    assert (await by_hand(tool)).timing is None


async def test_a_shared_cache_runs_calls_in_the_sessions_of_their_trajectories():
    """A budget inside counts what each trajectory has run itself."""
    dispatcher = Dispatcher([Cached(Budgeted(Scripted("x"), calls=1, tell=False), "global")])
    one, other = dispatcher.session("one"), dispatcher.session("other")

    async def asked(session, q):
        (result,) = await session.run([ParsedCall("scripted", {"q": q}, "c")])
        return result.status

    assert await asked(one, 1) is Status.OK
    assert await asked(one, 2) is Status.SKIPPED
    assert await asked(one, 1) is Status.OK
    assert await asked(other, 1) is Status.OK
    assert await asked(other, 2) is Status.OK
    await dispatcher.close()


def test_several_event_loops_may_use_one_cache():
    inner = Scripted("a", "b")
    tool = Cached(inner, "global")
    stuck = asyncio.new_event_loop()
    hanging = Gated()
    tool.tool, inner = hanging, tool.tool
    waiting = stuck.create_task(by_hand(tool, q=1))
    stuck.run_until_complete(hanging.begun.acquire())
    tool.tool = inner
    assert asyncio.run(by_hand(tool, q=1)).text == "a"
    assert asyncio.run(by_hand(tool, q=1)).text == "a"
    hanging.go_on.set()
    assert stuck.run_until_complete(waiting).text == "1"
    stuck.close()


async def test_a_cache_arrives_empty_and_works():
    tool = Cached(add, "global", 7)
    await by_hand(tool, a=1)
    twin = pickle.loads(pickle.dumps(tool))
    assert (len(tool.store), len(twin.store), twin.store.max_entries) == (1, 0, 7)


class Looking(Tool):
    name, wants_state = "look", True

    async def run(self, args, ctx):
        return str(ctx)


READING = Effects(reads=["f"])


@pytest.mark.parametrize(
    "tool",
    [Notes(), Scripted("x", effects=READING), Scripted("x", effects=Effects.EXCLUSIVE), Looking()],
    ids=["sessions", "reads", "exclusive", "state"],
)
def test_only_pure_tools_can_be_cached(tool):
    with pytest.raises(ValueError, match="only pure tools can"):
        Cached(tool)


async def test_the_group_of_a_collector_shares_and_a_trajectory_without_one_does_not():
    inner = Scripted(*range(9))
    dispatcher = Dispatcher([Cached(inner, "group")])
    found = []
    for name, group in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("c", ""), ("d", "")):
        async with dispatcher.session(name) as session:
            session.group = group
            (result,) = await session.run([ParsedCall("scripted", {"q": 1}, "c1")])
            async with session.twin() as twin:
                (again,) = await twin.run([ParsedCall("scripted", {"q": 1}, "c2")])
            assert again.text == result.text
            found.append(result.text)
    assert found == ["0", "0", "1", "2", "3"]
    await dispatcher.close()


class Rewarding(Scripted):
    """Gives trajectories a reward."""

    async def final_reward(self):
        return 1.0


@pytest.mark.parametrize("scope", ["group", "global"])
def test_a_tool_whose_final_reward_may_count_its_calls_is_not_shared(scope):
    assert Cached(Rewarding("x")).scope == "trajectory"
    with pytest.raises(ValueError, match="'scripted' gives trajectories a final reward"):
        Cached(Rewarding("x"), scope)


@pytest.mark.parametrize("options", [{"scope": "all"}, {"group": len}, {"max_entries": 0}], ids=str)
def test_invalid_scope_is_rejected(options):
    with pytest.raises(ValueError, match=r"expected scope|max_entries must"):
        Cached(add, **options)


async def test_a_stop_is_kept_as_one():
    from torchrl_agentic.tools import StopTool

    tool = Cached(StopTool())
    assert [(await tool.run({}, ctx())).stop for _ in range(2)] == [True, True]


def test_results_that_depend_on_the_row_are_shared_by_those_that_have_one_row():
    @tool
    def check(answer: str, ground_truth: Injected[str]) -> bool:
        """Check."""
        return answer == ground_truth

    assert Cached(check).scope == "trajectory"
    assert Cached(check, "group").scope == "group"
    for scope, group in (("global", None), ("group", len)):
        with pytest.raises(ValueError, match="'check' reads the data set's row"):
            Cached(check, scope, group=group)
