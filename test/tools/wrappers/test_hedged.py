"""A slow call is made a second time; the first answer wins; second calls keep to their share."""

import asyncio
import contextlib
import math
import pickle
from dataclasses import replace

import pytest
from helpers.limit import limit
from helpers.wrapper_tools import Notes, Scripted, add, by_hand, ctx
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import RateLimiter, ToolCompose
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import ImagePart, ParsedCall, Status, TextPart, Timing, ToolResult
from torchrl_agentic.testing import run_skipping
from torchrl_agentic.tools import Approved, Budgeted, Cached, Cassette, Hedged, Recorded, Retrying, Truncated
from torchrl_agentic.tools.base import Effects, Tool, Toolset
from torchrl_agentic.tools.wrappers.hedged import LATENCIES_KEPT, Hedging, choose

OK, INFRA = ToolResult.from_text("fine"), ToolResult.from_text("", status=Status.INFRA)


class Timed(Tool):
    """Takes given seconds for each call, then returns or raises a given outcome; logs what happens when."""

    name = "timed"
    description = "Wait."
    effects = Effects.PURE

    def __init__(self, *plan):
        self.plan, self.log = list(plan), []

    def note(self, what):
        self.log.append((what, asyncio.get_running_loop().time()))

    async def run(self, args, ctx):
        number = sum(what.startswith("begin") for what, _ in self.log)
        seconds, outcome = self.plan[number]
        self.note(f"begin {number}")
        try:
            await self.wait(seconds, ctx)
        except asyncio.CancelledError:
            self.note(f"stop {number}")
            raise
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def wait(self, seconds, ctx):
        await asyncio.sleep(seconds)


def eager(tool, after=1.0):
    """Hedge with a budget that one call already fills."""
    return Hedged(tool, after, max_extra=1.0)


def ask_at(tool, *, calls=1, **options):
    """Run calls after each other in one trajectory, on the skipping clock; return results and the time."""

    async def run():
        dispatcher = Dispatcher([tool], **options)
        async with dispatcher.session("t") as session:
            results = [(await session.run([ParsedCall("timed", {}, f"c{n}")]))[0] for n in range(calls)]
            now = asyncio.get_running_loop().time()
        await dispatcher.close()
        return results if calls > 1 else results[0], now

    return run_skipping(run())


def test_the_second_call_answers_first_and_the_first_is_cancelled():
    tool = Timed((10, "slow"), (2, "quick"))
    result, now = ask_at(eager(tool))
    assert (result.text, result.status, now) == ("quick", Status.OK, 3.0)
    assert result.metrics == {"hedged": 1, "hedge_won": 1}
    assert tool.log == [("begin 0", 0.0), ("begin 1", 1.0), ("stop 0", 3.0)]


def test_the_first_call_answers_first_and_the_second_is_cancelled():
    tool = Timed((3, "first"), (5, "second"))
    result, now = ask_at(eager(tool))
    assert (result.text, now, result.metrics) == ("first", 3.0, {"hedged": 1, "hedge_won": 0})
    assert tool.log[-1] == ("stop 1", 3.0)


def test_a_quick_call_runs_once_and_its_result_is_unchanged():
    whole = ToolResult((TextPart("a"), ImagePart(b"png")), reward=1.0, meta={"k": 1}, metrics={"n": 2})
    tool = Timed((0.5, whole))
    result, now = ask_at(eager(tool))
    assert replace(result, timing=None) == whole
    assert (now, len(tool.log)) == (0.5, 1)


@pytest.mark.parametrize("winner", ["first", "second"])
def test_a_hedged_result_keeps_all_that_the_tool_returned(winner):
    whole = ToolResult(
        (TextPart("a"), ImagePart(b"png")), reward=1.0, meta={"k": 1}, metrics={"n": 2}, notes=("x",)
    )
    seconds = (3, 9) if winner == "first" else (9, 3)
    result, _ = ask_at(eager(Timed(*((each, whole) for each in seconds))))
    assert replace(result, timing=None, metrics=None) == replace(whole, metrics=None)
    assert result.metrics == {"n": 2, "hedged": 1, "hedge_won": int(winner == "second")}


@pytest.mark.parametrize(
    "failure",
    [InfrastructureError("lost"), TimeoutError(), ConnectionResetError(), INFRA],
    ids=["InfrastructureError", "TimeoutError", "ConnectionError", "INFRA"],
)
def test_one_of_two_calls_may_fail_and_the_other_one_answers(failure):
    second, now = ask_at(eager(Timed((2, failure), (3, "fine"))))
    assert (second.text, now) == ("fine", 4.0)
    first, now = ask_at(eager(Timed((5, "fine"), (1, failure))))
    assert (first.text, now) == ("fine", 5.0)


def test_two_failures_are_the_failure_of_the_first():
    failures = InfrastructureError("first"), InfrastructureError("second")
    for seconds in ((2, 3), (4, 1)):
        result, now = ask_at(eager(Timed(*zip(seconds, failures, strict=True))))
        assert (result.status, now) == (Status.INFRA, 4.0)
        assert "first" in result.text


def test_a_failure_before_the_second_call_is_not_repeated():
    tool = Timed((0.5, InfrastructureError("lost")))
    result, now = ask_at(eager(tool))
    assert (result.status, now, len(tool.log)) == (Status.INFRA, 0.5, 1)


@pytest.mark.parametrize(
    ("answer", "status"),
    [(ToolError("no such page"), Status.ERROR), (StopSignal("enough"), Status.OK)],
    ids=["ToolError", "StopSignal"],
)
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_the_model_is_an_answer(answer, status, number):
    plan = [(9, "late"), (9, "late")]
    plan[number] = (3, answer)
    result, now = ask_at(eager(Timed(*plan)))
    assert (result.status, result.stop) == (status, isinstance(answer, StopSignal))
    assert now == 3.0 + number


def test_a_bug_of_the_first_call_is_reported(caplog):
    result, now = ask_at(eager(Timed((2, RuntimeError("a bug")), (9, "late"))))
    assert (result.status, now) == (Status.CRASH, 2.0)
    assert "a bug" in caplog.text


def test_a_tool_that_exits_ends_its_call_only():
    result, _ = ask_at(eager(Timed((2, SystemExit(3)), (9, "late"))))
    assert result.status is Status.CRASH


def test_a_call_that_runs_out_of_time_stops_both_calls():
    tool = Timed((90, ""), (90, ""))
    result, now = ask_at(eager(tool), per_call_timeout=5)
    assert (result.status, now) == (Status.TIMEOUT, 5.0)
    assert sorted(tool.log[2:]) == [("stop 0", 5.0), ("stop 1", 5.0)]


def test_no_second_call_starts_behind_the_deadline():
    async def run():
        loop = asyncio.get_running_loop()
        call = asyncio.create_task(tool.run({}, ctx(deadline=loop.time() + 1.0)))
        await asyncio.sleep(50)
        call.cancel()
        await asyncio.wait((call,))

    tool = eager(Timed((99, ""), (99, "")))
    run_skipping(run())
    assert [what for what, _ in tool.log] == ["begin 0", "stop 0"]


def test_a_recorder_inside_reads_why_both_calls_were_stopped(tmp_path):
    cassette = Cassette(tmp_path / "cassette.jsonl")
    ask_at(eager(Recorded(Timed((90, ""), (90, "")), cassette)), per_call_timeout=5)
    assert [cassette[number].outcome.status for number in range(2)] == [Status.TIMEOUT] * 2


def test_outside_recorder_writes_one_line_for_two_calls(tmp_path):
    cassette = Cassette(tmp_path / "cassette.jsonl")
    tool = Timed((9, "slow"), (1, "quick"))
    ask_at(Recorded(eager(tool), cassette))
    assert (len(cassette), cassette[0].outcome.text) == (1, "quick")


class Queues(Timed):
    """Queues before it runs: the first number of each plan is the time in the queue."""

    async def wait(self, seconds, ctx):
        _, ctx = await ctx.queue(asyncio.sleep(seconds[0]))
        await asyncio.sleep(seconds[1])
        self.note(f"deadline {ctx.deadline}")


def test_time_in_a_queue_of_the_tool_is_not_slow():
    tool = Queues(((50, 0.5), "fine"))
    result, now = ask_at(eager(tool), per_call_timeout=10)
    assert (result.text, now, result.timing.queue_s, result.timing.run_s) == ("fine", 50.5, 50.0, 0.5)
    assert tool.log == [("begin 0", 0.0), ("deadline 60.0", 50.5)]


def test_slow_call_behind_a_queue_is_hedged_by_its_running_time():
    tool = Queues(((50, 9), "slow"), ((0, 2), "quick"))
    result, now = ask_at(eager(tool), per_call_timeout=10)
    assert (result.text, now, result.timing.queue_s) == ("quick", 53.0, 50.0)
    assert ("begin 1", 51.0) in tool.log


def test_queueing_of_the_second_call_does_not_stop_the_clock_of_the_first():
    result, now = ask_at(eager(Queues(((0, 99), ""), ((99, 0), ""))), per_call_timeout=10)
    assert (result.status, now) == (Status.TIMEOUT, 10.0)


def test_queueing_is_no_latency():
    plan = [((9.0, 0.1), "x")] * 20
    tool = Hedged(Queues(*plan))
    ask_at(tool, calls=20)
    assert tool.hedging.delay_s == pytest.approx(0.1)


@pytest.mark.parametrize(("concurrent", "calls"), [(1, 1), (2, 2)])
def test_each_second_call_takes_a_slot_of_the_limiter(concurrent, calls):
    """With one slot, which the first call holds, none is left."""
    limiter = RateLimiter(max_concurrent=concurrent)
    tool = Timed((5, "first"), (2, "second"))
    hedged = eager(tool)
    result, _ = ask_at(hedged, rate_limits={"timed": limiter})
    assert result.text == ("first", "second")[calls - 1]
    assert sum(what.startswith("begin") for what, _ in tool.log) == calls
    assert (hedged.hedging.extra, limiter.stats().in_flight) == (calls - 1, 0)
    assert limiter.stats().granted == calls
    assert (result.metrics is None) == (calls == 1)


def test_second_call_is_not_made_while_others_wait_for_a_slot():
    async def run():
        limiter = RateLimiter(max_concurrent=2)
        tool = Timed((5, "a"), (5, "b"), (1, "c"), (1, "d"))
        dispatcher = Dispatcher([eager(tool)], rate_limits={"timed": limiter})
        async with dispatcher.session("t") as session:
            await session.run([ParsedCall("timed", {}, f"c{n}") for n in range(4)])
        await dispatcher.close()
        return tool.log

    assert run_skipping(run()) == [(f"begin {n}", 0.0 if n < 2 else 5.0) for n in range(4)]


def test_an_open_circuit_refuses_the_second_call_only():
    limiter = RateLimiter(max_concurrent=9, break_after=1)

    class Breaks(Timed):
        async def wait(self, seconds, ctx):
            ctx.limiter.record_failure()
            await asyncio.sleep(seconds)

    result, now = ask_at(eager(Breaks((5, "first"))), rate_limits={"timed": limiter})
    assert (result.text, now) == ("first", 5.0)


def test_a_session_closes_after_the_calls_that_were_cancelled():
    log = []

    class Connected(Timed):
        @contextlib.asynccontextmanager
        async def session(self, trajectory):
            yield self
            log.append("closed")

        async def wait(self, seconds, ctx):
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                await asyncio.sleep(0.5)
                log.append("ended")
                raise

    result, now = ask_at(eager(Connected((9, "slow"), (1, "quick"))))
    assert (result.text, now) == ("quick", 2.0)
    assert log == ["ended", "closed"]


def test_blocking_function_is_hedged_on_another_thread():
    """The first one blocks until the second one has answered."""
    import threading

    def look() -> str:
        """Look."""
        number = len(begun)
        begun.append(threading.get_ident())
        if number == 0:
            released.wait(limit(20))
        return f"answer {number}"

    async def run():
        dispatcher = Dispatcher([Hedged(look, 0.01, max_extra=1.0)])
        async with dispatcher.session("t") as session:
            (result,) = await session.run([ParsedCall("look", {}, "c")])
        released.set()
        await dispatcher.close()
        return result

    begun, released = [], threading.Event()
    assert asyncio.run(run()).text == "answer 1"
    assert len(set(begun)) == 2


class Shop(Toolset):
    """A toolset with a world."""

    def __init__(self, tool):
        self.tool = tool

    async def setup(self):
        return [self.tool]

    async def teardown(self):
        pass

    @contextlib.asynccontextmanager
    async def session(self, trajectory):
        yield {}


@pytest.mark.parametrize(("effects", "calls"), [(None, 1), (Effects(reads=["shop"]), 2)])
def test_tools_of_a_world_are_hedged_only_if_they_declare_effects(effects, calls):
    class Unmarked(Timed):
        pass

    Unmarked.effects = effects
    tool = Unmarked((3, "first"), (1, "second"))

    async def run():
        dispatcher = Dispatcher()
        shop = Shop(eager(tool))
        dispatcher.add(shop.tool, toolset=shop)
        async with dispatcher.session("t") as session:
            await session.run([ParsedCall("timed", {}, "c")])
        await dispatcher.close()

    run_skipping(run())
    assert sum(what.startswith("begin") for what, _ in tool.log) == calls


def test_the_first_twenty_calls_run_once_and_later_slow_ones_twice():
    slow = Timed(*[(1, "x")] * 18, (50, "slow"), (50, "slow"), (50, "slow"), (1, "quick"))
    hedged = Hedged(slow, "p90", max_extra=1.0)
    results, now = ask_at(hedged, calls=21, per_call_timeout=None)
    assert [result.text for result in results[17:]] == ["x", "slow", "slow", "quick"]
    assert now == 18 + 100 + 2
    assert (hedged.hedging.calls, hedged.hedging.extra) == (21, 1)


def test_a_service_that_is_slow_as_a_whole_gets_no_more_than_its_share():
    async def run():
        dispatcher = Dispatcher([hedged], per_call_timeout=None)
        async with dispatcher.session("t") as session:
            for turn in range(10):
                await session.run([ParsedCall("timed", {}, f"c{turn}.{n}") for n in range(64)])
        await dispatcher.close()

    hedged = Hedged(Timed(*[(9, "slow")] * 1000), 1.0)
    run_skipping(run())
    assert hedged.hedging.calls == 640
    assert 80 <= hedged.hedging.extra <= 96


def test_clones_share_latencies_and_pickled_copies_start_without():
    compose = ToolCompose([Hedged(add, "p50")])
    (tool,), (twin,) = compose.tools, compose.clone().tools
    assert tool.hedging is twin.hedging
    for _ in range(20):
        tool.hedging.begin()
        tool.hedging.end(2.0, has_answered=True)
    assert (twin.hedging.delay_s, pickle.loads(pickle.dumps(tool)).hedging.delay_s) == (2.0, None)
    fresh = pickle.loads(pickle.dumps(Hedged(add, "p95", max_extra=0.5))).hedging
    assert (fresh.after, fresh.max_extra) == ("p95", 0.5)


async def test_tool_can_be_pickled_while_a_cancelled_call_still_ends():
    tool = eager(Stubborn(), after=0.001)
    assert (await by_hand(tool)).text == "quick"
    assert pickle.loads(pickle.dumps(tool)).name == "stubborn"
    await tool.teardown()


class Stubborn(Tool):
    """Its first call takes its time to be cancelled."""

    name = "stubborn"
    description = "Wait."
    calls = 0

    async def run(self, args, ctx):
        self.calls += 1
        if self.calls == 2:
            return "quick"
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "tool",
    [
        Notes(),
        Scripted("x", effects=Effects(writes=["orders"])),
        Scripted("x", effects=Effects.EXCLUSIVE),
    ],
    ids=["session", "writes", "exclusive"],
)
def test_a_tool_with_effects_is_refused(tool):
    with pytest.raises(ValueError, match="could do them twice"):
        Hedged(tool)


def test_tools_that_only_read_or_want_the_state_are_hedged():
    reader = Scripted("x", effects=Effects(reads=["files"]))
    reader.wants_state = True
    assert Hedged(reader).wants_state


def test_cached_tool_inside_is_refused():
    with pytest.raises(ValueError, match=r"Cached\(Hedged\(tool\)\)"):
        Hedged(Truncated(Cached(add)))


@pytest.mark.parametrize("after", ["90", "p0", "p100", "p9.5", "median", -1, 0, None, math.nan])
def test_a_wrong_time_is_refused(after):
    with pytest.raises(ValueError, match=r"after (is a percentile|must be above 0)"):
        Hedged(add, after)
    with pytest.raises(TypeError, match="after is a number above 0 seconds"):
        Hedged(add, [after])


@pytest.mark.parametrize("share", [-0.1, 0, 1.5, "0.1", None, math.nan])
def test_a_wrong_share_is_refused(share):
    with pytest.raises(ValueError, match="max_extra is a share"):
        Hedged(add, max_extra=share)


def test_a_cache_around_keeps_the_answer_that_won():
    results, now = ask_at(Cached(eager(Timed((9, "slow"), (1, "quick")))), calls=2)
    assert ([result.text for result in results], now) == (["quick", "quick"], 2.0)


def test_each_try_is_hedged_and_a_budget_around_pays_once():
    tool = Timed((9, INFRA), (1, INFRA), (9, "slow"), (1, "quick"))
    inside = Retrying(eager(tool), first_s=0.001, longest_s=0.001, attempts=2)
    result, _ = ask_at(Approved(Budgeted(inside, calls=5, tell=False), lambda *_: True))
    assert (result.text, result.metrics["calls_left"]) == ("quick", 4)
    assert (result.metrics["hedged"], result.metrics["retries"]) == (1, 1)


latencies = st.floats(0, 1e6)


def percentile(percent, values):
    """Return the delay after some calls that all answered."""
    hedging = Hedging(f"p{percent}")
    for value in values:
        hedging.begin()
        hedging.end(value, has_answered=True)
    return hedging.delay_s


@given(st.lists(latencies, min_size=200, max_size=300), st.integers(1, 4), st.integers(1, 99))
def test_a_percentile_is_that_of_the_latest_latencies(values, times, percent):
    values *= times
    latest = values[-LATENCIES_KEPT:]
    found = percentile(percent, values)
    assert found in latest
    assert sum(value <= found for value in latest) * 100 >= percent * len(latest)
    assert sum(value < found for value in latest) * 100 < percent * len(latest)


@given(st.lists(latencies, min_size=200, max_size=300), st.integers(1, 99), st.data())
def test_lower_bounds_above_the_percentile_do_not_change_it(values, percent, data):
    """Calls that were cancelled count by the time that they ran."""
    found = percentile(percent, values)
    bounded = [data.draw(st.floats(found, value)) if value > found else value for value in values]
    assert percentile(percent, bounded) == found


@given(st.lists(st.sampled_from(["begin", "hedge", "end", "stop", "back"])), st.floats(0.01, 1))
def test_second_calls_never_exceed_their_share(steps, share):
    hedging = Hedging(1.0, share)
    running = taken = 0
    for step in steps:
        if step == "begin":
            hedging.begin()
            running += 1
        elif step == "hedge":
            taken += hedging.hedge()
        elif step == "back" and taken:
            hedging.take_back()
            taken -= 1
        elif running:
            hedging.end(1.0, has_answered=step == "end")
            running -= 1
        assert hedging.extra == taken <= share * hedging.calls + 1e-6


@given(st.integers(1, 2000), st.integers(0, 2000))
def test_second_calls_at_once_follow_the_running_calls(running, ended):
    """However many calls went before: a pause saves up a few second calls only."""
    hedging = Hedging(1.0)
    for _ in range(ended):
        hedging.begin()
        hedging.end(0.1, has_answered=True)
    for _ in range(running):
        hedging.begin()
    at_once = sum(hedging.hedge() for _ in range(2 * running))
    assert at_once <= max(20, 0.15 * running)
    assert at_once >= math.floor(0.15 * running - 1e-6)


@given(st.lists(st.tuples(latencies, st.booleans()), max_size=100), st.integers(1, 99))
def test_hedging_waits_for_enough_latencies_and_forgets_short_stopped_calls(calls, percent):
    hedging, kept = Hedging(f"p{percent}"), []
    least = max(20, math.ceil(200 / (100 - percent)))
    for seconds, has_answered in calls:
        delay_s = hedging.begin()
        assert (delay_s is None) == (len(kept) < least)
        hedging.end(seconds, has_answered=has_answered)
        if has_answered or (delay_s is not None and seconds >= delay_s):
            kept.append(seconds)


FAILURES = [INFRA, InfrastructureError(), TimeoutError(), ConnectionError()]
ENDS = [ToolResult.from_text("", status=Status.SKIPPED), RuntimeError(), asyncio.CancelledError()]
ANSWERS = [OK, ToolResult.from_text("", is_error=True)]
outcomes = st.sampled_from([None, *FAILURES, *ENDS, *ANSWERS])


@given(outcomes, outcomes)
def test_a_second_call_counts_only_if_it_answers_and_the_first_one_does_not(first, second):
    chosen = choose(first, second, is_hedged=True)
    if first in ANSWERS or first in ENDS:
        assert chosen is False
    elif second in ANSWERS:
        assert chosen is True
    else:
        assert chosen is (None if None in (first, second) else False)
    assert choose(first, None, is_hedged=False) is (None if first is None else False)


def test_second_calls_report_no_queueing_of_their_own():
    queued = ToolResult.from_text("quick")
    result, now = ask_at(eager(Timed((9, "slow"), (1, replace(queued, timing=Timing(0, 5, 1))))))
    assert (result.timing.queue_s, result.timing.run_s, now) == (0.0, 2.0, 2.0)


def test_a_call_whose_share_is_used_up_tries_again():
    """The share of one call lets half a second call start; that of the next call makes it whole."""

    async def run():
        hedged = Hedged(tool, 1.0, max_extra=0.5)
        first = asyncio.create_task(by_hand(hedged))
        await asyncio.sleep(2.5)
        assert (await by_hand(hedged, "c2")).text == "b"
        return await first, asyncio.get_running_loop().time()

    tool = Timed((9, "a"), (0.1, "b"), (1, "c"))
    result, now = run_skipping(run())
    assert (result.text, now) == ("c", 4.0)
    assert tool.log[2:] == [("begin 2", 3.0), ("stop 0", 4.0)]


def test_a_second_call_that_hangs_gives_its_slot_back_to_a_first_one_that_was_retried():
    timed = Timed((0.2, INFRA), (math.inf, OK), (0.1, OK))
    hedged = eager(Retrying(timed, first_s=0.5), after=0.4)
    limiter = RateLimiter(max_concurrent=1)
    result, now = ask_at(hedged, rate_limits={"timed": limiter}, per_call_timeout=4.0)
    assert [what for what, _ in timed.log] == ["begin 0", "begin 1", "stop 1", "begin 2"]
    assert result.text == "fine"
    assert 4.0 <= now < 6.0
    assert limiter.stats().in_flight == 0
