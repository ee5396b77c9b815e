"""Identical calls of one group run once, and each call has the result that it would have alone."""

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.wrapper_tools import Gated, Notes, Scripted, add
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import Injected, RateLimiter
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.dispatch.call_cache import CallCache, check_cached, why_not_cached
from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import ImagePart, ParsedCall, Status, TextPart, ToolResult
from torchrl_agentic.testing import run_skipping
from torchrl_agentic.tools import Approved, Budgeted, Cached, Hedged, Recorded, Retrying, Truncated, Wrapped
from torchrl_agentic.tools.base import Effects, Tool, Toolset
from torchrl_agentic.tools.function import tool


def session_of(dispatcher, cache, name):
    """Return the session of a trajectory of a group."""
    session = dispatcher.session(name)
    session.cache = cache.of(name)
    return session


async def ask(session, name, call_id="c", **args):
    (result,) = await session.run([ParsedCall(name, args, call_id)])
    return result


@contextlib.asynccontextmanager
async def group_of(tool, n, names=None, **options):
    """Open the sessions of a group of n trajectories; also returns the numbers of the hits."""
    hits = []
    dispatcher = Dispatcher([tool], **options)
    cache = CallCache(names, on_hit=lambda: hits.append(len(hits)))
    yield [session_of(dispatcher, cache, f"t{number}") for number in range(n)], hits
    await dispatcher.close()


async def test_equal_calls_that_overlap_run_once():
    tool = Gated()
    async with group_of(tool, 4) as (sessions, hits):
        calls = [asyncio.create_task(ask(one, "gated", f"c{n}")) for n, one in enumerate(sessions)]
        await tool.begun.acquire()
        tool.go_on.set()
        results = await asyncio.gather(*calls)
    assert [result.text for result in results] == ["1"] * 4
    assert [result.meta for result in results] == [None, *[{"cached": True}] * 3]
    assert (tool.calls, hits) == (1, [0, 1, 2])


async def test_later_calls_get_the_same_result_as_an_object_of_their_own():
    whole = ToolResult(
        (TextPart("a"), ImagePart(b"png")), reward=0.5, metrics={"n": 1}, notes=("own",), stop=True
    )
    async with group_of(Scripted(whole), 2) as (sessions, _):
        first = await ask(sessions[0], "scripted", q=1)
        noted = ParsedCall("scripted", {"q": 1}, "d", notes=("fence",))
        (again,) = await sessions[1].run([noted])
    assert replace(first, timing=None) == whole
    assert replace(again, timing=None) == replace(whole, notes=("fence", "own"), meta={"cached": True})
    assert (again.timing.run_s, again.timing is first.timing) == (0.0, False)


async def test_a_shared_call_takes_no_slot_of_a_limiter():
    limiter, tool = RateLimiter(max_concurrent=1), Gated()
    async with group_of(tool, 4, rate_limits={"gated": limiter}) as (sessions, _):
        calls = [asyncio.create_task(ask(one, "gated")) for one in sessions]
        await tool.begun.acquire()
        assert limiter.stats().waiting == 0
        tool.go_on.set()
        await asyncio.gather(*calls)
        await ask(sessions[0], "gated")
    assert limiter.stats().granted == 1


async def test_each_group_has_results_of_its_own():
    tool = Scripted(1, 2)
    dispatcher = Dispatcher([tool])
    found = [await ask(session_of(dispatcher, CallCache(), name), "scripted", q=1) for name in ("a", "b")]
    assert [result.text for result in found] == ["1", "2"]
    await dispatcher.close()


async def test_other_arguments_tags_and_tools_are_other_calls():
    dispatcher = Dispatcher([Scripted(*range(9)), add])
    session = session_of(dispatcher, CallCache(), "t")
    calls = [
        ParsedCall("scripted", {"q": 1, "key": "k"}, "a"),
        ParsedCall("scripted", {"key": "k", "q": 1}, "b"),
        ParsedCall("scripted", {"q": 1.0, "key": "k"}, "c"),
        ParsedCall("scripted", {"q": 1, "key": "k"}, "d", tag="x"),
        ParsedCall("scripted", {"q": 10**9999}, "e"),
        ParsedCall("scripted", {"q": 10**9999}, "f"),
        ParsedCall("add", {"a": 1}, "g"),
    ]
    assert [(await session.run([one]))[0].text for one in calls] == ["0", "0", "1", "2", "3", "4", "1"]
    await dispatcher.close()


async def test_a_tool_that_has_changed_is_asked_again():
    tool = Scripted(1, 2)
    async with group_of(tool, 1) as ((session,), _):
        assert (await ask(session, "scripted")).text == "1"
        session.dispatcher.rebind(tool)
        assert [(await ask(session, "scripted")).text for _ in range(2)] == ["2", "2"]


async def test_the_next_call_runs_if_the_running_one_is_cancelled():
    tool = Gated()
    async with group_of(tool, 4) as (sessions, hits):
        calls = [asyncio.create_task(ask(one, "gated")) for one in sessions]
        await tool.begun.acquire()
        calls[0].cancel()
        await tool.begun.acquire()
        tool.go_on.set()
        results = await asyncio.gather(*calls[1:])
    assert [result.text for result in results] == ["2"] * 3
    assert (tool.calls, len(hits)) == (2, 2)


async def test_a_waiting_call_can_be_cancelled_without_the_others():
    tool = Gated()
    async with group_of(tool, 3) as (sessions, _):
        calls = [asyncio.create_task(ask(one, "gated")) for one in sessions]
        await tool.begun.acquire()
        calls[1].cancel()
        await asyncio.wait([calls[1]])
        tool.go_on.set()
        assert (await calls[0]).text == (await calls[2]).text == "1"


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
        async with group_of(tool, 4, per_call_timeout=5) as (sessions, hits):
            results = await asyncio.gather(*(ask(one, "hangs") for one in sessions))
            return [result.status for result in results], list(hits)

    tool = Hangs()
    statuses, hits = run_skipping(run())
    assert statuses == [Status.TIMEOUT, *[Status.OK] * 3]
    assert (tool.log, hits) == ([0.0, 5.0, 5.0, 5.0], [])


class Waits(Gated):
    """Waits, then has a given outcome once, then returns a text."""

    def __init__(self, outcome):
        super().__init__()
        self.outcome = outcome

    async def run(self, args, ctx):
        number = await super().run(args, ctx)
        if self.outcome is None:
            return f"fine {number}"
        outcome, self.outcome = self.outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (InfrastructureError("x"), Status.INFRA),
        (TimeoutError(), Status.TIMEOUT),
        (RuntimeError("a bug"), Status.CRASH),
        (ToolResult.from_text("", status=Status.SKIPPED), Status.SKIPPED),
    ],
    ids=["infra", "timeout", "crash", "skipped"],
)
async def test_a_failure_is_that_of_one_call_only(outcome, status):
    tool = Waits(outcome)
    async with group_of(tool, 3) as (sessions, hits):
        calls = [asyncio.create_task(ask(one, "gated")) for one in sessions]
        await tool.begun.acquire()
        tool.go_on.set()
        results = await asyncio.gather(*calls)
        assert [result.status for result in results] == [status, Status.OK, Status.OK]
        assert (await ask(sessions[0], "gated")).status is Status.OK
    assert hits == []


@pytest.mark.parametrize("error", [ToolError("no such page"), StopSignal("enough")], ids=["error", "stop"])
async def test_an_error_of_the_model_answers_all_that_wait(error):
    tool = Waits(error)
    async with group_of(tool, 3) as (sessions, hits):
        calls = [asyncio.create_task(ask(one, "gated")) for one in sessions]
        await tool.begun.acquire()
        tool.go_on.set()
        results = await asyncio.gather(*calls)
        later = await ask(sessions[0], "gated")
    is_stop = isinstance(error, StopSignal)
    assert len({(result.parts, result.status, result.stop) for result in results}) == 1
    assert (results[0].stop, later.stop, tool.calls) == (is_stop, is_stop, 1 if is_stop else 2)
    assert len(hits) == 2 + is_stop


async def test_the_results_that_are_kept_are_bounded():
    tool = Scripted(*range(9))
    dispatcher = Dispatcher([tool])
    session = session_of(dispatcher, CallCache(max_entries=2), "t")
    assert [(await ask(session, "scripted", q=q)).text for q in (1, 2, 1, 3, 1, 2)] == list("010203")
    await dispatcher.close()


class Store(Toolset):
    """A world of two values per trajectory, with tools that read and write them."""

    reward = None

    def __init__(self):
        self.ran = Counter()
        read = Effects(reads=["a"]), Effects(reads=["b"]), Effects(reads=["a", "b"])
        self.tools = [
            Access(self, "pure", Effects.PURE, lambda world, n: n * n),
            Access(self, "read_a", read[0], lambda world, n: world["a"] + n),
            Access(self, "read_b", read[1], lambda world, n: [world["b"], n]),
            Access(self, "read_both", read[2], lambda world, n: dict(world)),
            Access(self, "write_a", Effects(writes=["a"]), lambda world, n: world.update(a=n)),
            Access(self, "add_b", Effects(reads=["a"], writes=["b"]), add_b),
            Access(self, "shift", Effects.EXCLUSIVE, lambda world, n: world.update(a=world["b"], b=n)),
        ]

    async def setup(self):
        return self.tools

    async def teardown(self):
        pass

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        yield {"a": 0, "b": 0}

    @contextlib.asynccontextmanager
    async def branch(self, world, trajectory):
        yield dict(world)

    def dispatcher(self, **options):
        found = Dispatcher(**options)
        for one in self.tools:
            found.add(one, toolset=self)
        return found


def add_b(world, n):
    world["b"] += world["a"] + n
    if n == 2:
        raise ToolError(f"b is {world['b']}")


READERS = {"pure", "read_a", "read_b", "read_both"}
TAKES_S = {n: random.Random(n).random() / 100 for n in range(9)}


class Access(Tool):
    """One tool of a `Store`: takes its time, then acts on the world of its trajectory."""

    description = "Read or write."
    input_schema = {"type": "object", "properties": {"n": {"type": "integer"}}}  # noqa: RUF012

    def __init__(self, store, name, effects, act):
        self.store, self.name, self.effects, self.act = store, name, effects, act

    async def run(self, args, ctx):
        self.store.ran[self.name] += 1
        await asyncio.sleep(TAKES_S[args["n"]])
        found = self.act(ctx.world, args["n"])
        if args["n"] == 3:
            raise ToolError(f"{self.name} saw {found}")
        return ToolResult.from_value(found, reward=float(args["n"]))


accesses = st.tuples(st.sampled_from([one.name for one in Store().tools]), st.integers(0, 4))
turns = st.lists(st.lists(accesses, min_size=1, max_size=4), max_size=4)
programs = st.recursive(
    st.tuples(turns, st.just([])), lambda inner: st.tuples(turns, st.lists(inner, max_size=3)), max_leaves=6
)
"""Turns of calls, then branches, each a program of its own."""


def results_of(program, *, is_cached):
    """Run the programs of a group at once; return the result of each call, the hits, and the runs."""
    store, hits, found = Store(), [], {}

    async def run():
        dispatcher = store.dispatcher()
        cache = CallCache(READERS, on_hit=lambda: hits.append(1))

        async def trajectory(session, steps, branches):
            for number, calls in enumerate(steps):
                parsed = [ParsedCall(n, {"n": value}, f"c{i}") for i, (n, value) in enumerate(calls)]
                results = await session.run(parsed)
                found[session.trajectory, number] = [
                    (one.parts, one.status, one.reward, one.stop, one.metrics, one.notes) for one in results
                ]
            twins = [dispatcher.session(f"{session.trajectory}.{n}") for n in range(len(branches))]
            await session.branch(twins)
            await asyncio.gather(*(trajectory(one, *rest) for one, rest in zip(twins, branches, strict=True)))
            await session.close()

        sessions = [dispatcher.session(f"t{number}") for number in range(len(program))]
        for session in sessions if is_cached else ():
            session.cache = cache.of(session.trajectory)
        await asyncio.gather(*(trajectory(one, *rest) for one, rest in zip(sessions, program, strict=True)))
        await dispatcher.close()

    run_skipping(run())
    return found, len(hits), store.ran


@given(st.lists(programs, min_size=1, max_size=4))
def test_each_call_of_random_programs_has_the_result_that_it_has_without_a_cache(group):
    expected, _, all_ran = results_of(group, is_cached=False)
    found, hits, ran = results_of(group, is_cached=True)
    assert found == expected
    assert all_ran.total() == ran.total() + hits
    assert all(ran[name] == all_ran[name] for name in all_ran.keys() - READERS)


reads = st.lists(st.tuples(st.sampled_from(sorted(READERS)), st.sampled_from([0, 1, 2, 4])), max_size=8)


@given(st.lists(reads, max_size=5))
def test_reads_of_a_group_that_writes_nothing_run_once(group):
    _, _, ran = results_of([([[one] for one in calls], []) for calls in group], is_cached=True)
    different = {call for calls in group for call in calls}
    assert ran == Counter(name for name, _ in different)


async def asked(session, *names, n=1):
    """Run one read after the other; return their texts."""
    return [(await ask(session, name, n=n)).text for name in names]


async def test_a_write_separates_a_trajectory_from_its_group():
    store = Store()
    dispatcher, cache = store.dispatcher(), CallCache(READERS)
    one, other = (session_of(dispatcher, cache, name) for name in ("one", "other"))
    await asked(one, "read_a", "read_b", "pure")
    await asked(one, "write_a", n=4)
    assert await asked(one, "read_a", "read_a", "read_b", "pure") == ["5", "5", "[0, 1]", "1"]
    assert await asked(other, "read_a", "read_b", "pure") == ["1", "[0, 1]", "1"]
    assert store.ran == {"read_a": 2, "read_b": 1, "pure": 1, "write_a": 1}
    await asked(other, "shift")
    assert await asked(other, "read_a", "read_b", "pure") == ["1", "[1, 1]", "1"]
    assert store.ran == {"read_a": 3, "read_b": 2, "pure": 1, "write_a": 1, "shift": 1}
    await dispatcher.close()


async def test_branches_share_what_they_read_until_they_write():
    store = Store()
    dispatcher, cache = store.dispatcher(), CallCache(READERS)
    source = session_of(dispatcher, cache, "source")
    await asked(source, "write_a", n=4)
    branches = [dispatcher.session(name) for name in ("left", "right")]
    await source.branch(branches)
    for session in (source, *branches):
        assert await asked(session, "read_a") == ["5"]
    assert store.ran["read_a"] == 1
    for n, session in enumerate(branches):
        await asked(session, "write_a", n=n)
        assert await asked(session, "read_a") == [str(n + 1)]
    assert await asked(source, "read_a") == ["5"]
    assert store.ran["read_a"] == 3
    await dispatcher.close()


async def test_a_trajectory_that_ran_elsewhere_shares_only_what_reads_nothing():
    store = Store()
    dispatcher, cache = store.dispatcher(), CallCache(READERS)
    one, other = (session_of(dispatcher, cache, name) for name in ("one", "other"))
    other.resume(one.counts())
    for session in (one, other, other):
        await asked(session, "read_a", "pure")
    await asked(other, "write_a")
    assert await asked(other, "read_a") == ["2"]
    assert store.ran == {"read_a": 4, "pure": 1, "write_a": 1}
    await dispatcher.close()


@pytest.mark.parametrize("writer", ["write_a", "shift"])
def test_what_a_stopped_call_may_still_change_is_not_cached(writer):
    """Its last change comes after the result that says it was stopped."""

    async def run():
        store = Store()
        (tool,) = (one for one in store.tools if one.name == writer)
        background = []

        async def late(world):
            await asyncio.sleep(100)
            world["a"] = 7

        async def slow(args, ctx):
            background.append(asyncio.create_task(late(ctx.world)))
            await asyncio.sleep(99)

        tool.run = slow
        dispatcher = store.dispatcher(per_call_timeout=5)
        session = session_of(dispatcher, CallCache(READERS), "t")
        assert (await ask(session, writer, n=1)).status is Status.TIMEOUT
        before = await asked(session, "read_a", "read_a", "pure", "pure")
        await background[0]
        after = await asked(session, "read_a")
        other = await asked(session, "read_b", "read_b")
        await dispatcher.close()
        return before, after, other, store.ran

    before, after, other, ran = run_skipping(run())
    assert (before, after, other) == (["1", "1", "1", "1"], ["8"], ["[0, 1]"] * 2)
    assert (ran["read_a"], ran["pure"], ran["read_b"]) == (3, 1, 1 if writer == "write_a" else 2)


async def test_early_calls_of_a_trajectory_use_its_cache():
    async with group_of(Scripted(1, 2), 1) as ((session,), hits):
        await ask(session, "scripted")
        async with session.twin() as twin:
            assert (await ask(twin, "scripted")).text == "1"
    assert len(hits) == 1


class Own(Wrapped):
    """A wrapper of a user that keeps state."""

    keeps_state = True


@tool
async def check(answer: str, ground_truth: Injected[str]) -> bool:
    """Check an answer."""
    return answer == ground_truth


class Wants(Scripted):
    """Reads the state of the environment."""

    wants_state = True


def shared():
    """Return tools that `True` covers."""
    return {
        "plain": add,
        "row": check,
        "Cached": Cached(add),
        "Hedged": Hedged(Truncated(Retrying(add))),
    }


def named():
    """Return tools that must be named."""
    return {
        "reads": Scripted(effects=Effects(reads=["files"])),
        "session": Reader(),
    }


def refused(path):
    """Return tools that cannot be cached, each with a part of the reason."""
    return {
        "writes": (Scripted(effects=Effects(writes=["files"])), "writes files"),
        "exclusive": (Scripted(effects=Effects.EXCLUSIVE), "exclusive"),
        "notes": (Notes(), "writes note"),
        "state": (Wants(), "environment's state"),
        "Budgeted": (Budgeted(add, calls=3), "Budgeted has to see every call"),
        "inner": (Truncated(Budgeted(add, calls=3)), "Budgeted has to see every call"),
        "Approved": (Approved(add, lambda *_: True), "Approved has to see every call"),
        "Recorded": (Recorded(add, path / "cassette.jsonl"), "Recorded has to see every call"),
        "own": (Own(add), "Own has to see every call"),
        "reward": (Rewarding(), "final reward"),
    }


class Reader(Scripted):
    """Has sessions, and only reads."""

    def __init__(self):
        super().__init__("x", effects=Effects(reads=["files"]))

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        yield self


class Rewarding(Reader):
    """Gives trajectories a reward."""

    async def final_reward(self):
        return 1.0


def bound_of(tool):
    (bound,) = Dispatcher([tool]).bound.values()
    return bound


@pytest.mark.parametrize("name", shared())
def test_tools_that_see_only_arguments_and_the_row_are_cached(name):
    bound = bound_of(shared()[name])
    assert CallCache().covers(bound)
    assert not CallCache(["other"]).covers(bound)


@pytest.mark.parametrize("name", named())
def test_tools_that_read_more_must_be_named(name):
    bound = bound_of(named()[name])
    assert not CallCache().covers(bound)
    assert CallCache([bound.tool.name]).covers(bound)
    check_cached([bound.tool.name], {bound.tool.name: bound})


def test_tools_of_a_world_must_be_named():
    store = Store()
    bound = store.dispatcher().bound
    assert [name for name, one in bound.items() if CallCache().covers(one)] == []
    assert {name for name, one in bound.items() if CallCache(bound).covers(one)} == READERS

    class Rewarded(Store):
        async def final_reward(self, world):
            return 1.0

    pure = Rewarded().dispatcher().bound["pure"]
    assert "final reward" in why_not_cached(pure, is_named=True)


@pytest.mark.parametrize("name", list(refused(Path("unused"))))
def test_tools_that_change_things_or_see_each_call_are_not_cached(name, tmp_path):
    tool, reason = refused(tmp_path)[name]
    bound = bound_of(tool)
    assert not CallCache().covers(bound)
    assert not CallCache([bound.tool.name]).covers(bound)
    with pytest.raises(ValueError, match=f"cannot be cached: .*{reason}"):
        check_cached([bound.tool.name], {bound.tool.name: bound})


def test_a_tool_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"group_cache names the tool 'ad', .*did you mean"):
        check_cached(["ad"], {"add": bound_of(add)})
