"""From calls to results: overlap, order, sessions, deadlines, errors, ids, set-up."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from helpers.limit import limit

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.messages import CallError, ParsedCall, Status, ToolResult
from torchrl_agentic.parsers import get_parser
from torchrl_agentic.testing import run_skipping
from torchrl_agentic.tools.base import Effects, Tool, ToolContext
from torchrl_agentic.tools.function import tool
from torchrl_agentic.tools.row_data import RowData


def _call(name: str, call_id: str = "c", **args: Any) -> ParsedCall:
    return ParsedCall(name, args, call_id)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(limit(5)):
        while not condition():
            await asyncio.sleep(0.005)


class Stateful(Tool):
    """A tool with sessions, which notes what happens to it."""

    name = "stateful"

    def __init__(self, events: list[Any], fail: int = 0) -> None:
        self.events = events
        self.fail = fail

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        self.events.append(("open", trajectory, asyncio.current_task()))
        if self.fail:
            self.fail -= 1
            raise InfrastructureError("no room")
        yield Stateful(self.events)
        self.events.append(("close", trajectory, asyncio.current_task()))

    async def run(self, args: Any, ctx: ToolContext) -> str:
        self.events.append(("run", ctx.trajectory, ctx.call_id))
        return ctx.call_id


class Owned(Tool):
    """A tool with something to set up."""

    def __init__(self, name: str, events: list[str], bad: str = "") -> None:
        self.name, self.events, self.bad = name, events, bad

    async def setup(self) -> None:
        self.events.append(f"setup {self.name}")
        if self.bad == "setup":
            raise OSError("no database")

    async def teardown(self) -> None:
        self.events.append(f"teardown {self.name}")
        if self.bad == "teardown":
            raise OSError("no goodbye")

    async def run(self, args: Any, ctx: ToolContext) -> str:
        return self.name


async def test_calls_of_one_message_overlap():
    """Each waits for the other: run in sequence, neither would return."""
    both = asyncio.Barrier(2)

    async def wait() -> str:
        await both.wait()
        return "done"

    dispatcher = Dispatcher([tool(wait, name="a"), tool(wait, name="b")], per_call_timeout=2)
    async with dispatcher.session("t") as session:
        results = await session.run([_call("a", "1"), _call("b", "2")])
    assert [result.text for result in results] == ["done", "done"]


async def test_rows_overlap():
    """Even if each row's call is exclusive."""
    both = asyncio.Barrier(2)

    async def wait() -> str:
        await both.wait()
        return "done"

    dispatcher = Dispatcher([tool(wait, name="a", effects=Effects.EXCLUSIVE)], per_call_timeout=2)
    rows = [dispatcher.session(f"t{row}", row=row) for row in range(2)]
    results = await dispatcher.run([(row, [_call("a")], None) for row in rows])
    assert [[result.text for result in row] for row in results] == [["done"], ["done"]]


async def test_conflicting_calls_run_in_order_and_results_too():
    """The first writer yields for a while, and no conflicting call begins meanwhile."""
    events: list[str] = []

    async def work(n: int, ctx: ToolContext) -> int:
        events.append(f"begin {n}")
        for _ in range(5 - n):
            await asyncio.sleep(0)
        events.append(f"end {n}")
        return n

    dispatcher = Dispatcher([tool(work, name="w", effects=Effects(writes=["x"]))])
    async with dispatcher.session("t") as session:
        results = await session.run([_call("w", str(n), n=n) for n in range(4)])
    assert events == [f"{word} {n}" for n in range(4) for word in ("begin", "end")]
    assert [result.text for result in results] == ["0", "1", "2", "3"]


async def test_results_keep_the_order_of_the_calls():
    last = asyncio.Event()

    async def slow() -> str:
        await last.wait()
        return "slow"

    async def fast() -> str:
        last.set()
        return "fast"

    async with Dispatcher([slow, fast], per_call_timeout=2).session("t") as session:
        results = await session.run([_call("slow"), _call("fast")])
    assert [result.text for result in results] == ["slow", "fast"]


async def test_sessions_open_lazily_and_close_once_in_the_task_that_opened_them():
    events: list[Any] = []
    dispatcher = Dispatcher([Stateful(events)])
    session = dispatcher.session("t")
    assert events == []
    await session.run([_call("stateful", "1")])
    await session.run([_call("stateful", "2")])
    await session.close()
    await session.close()
    await dispatcher.close()
    assert [event[0] for event in events] == ["open", "run", "run", "close"]
    assert events[0][2] is events[-1][2] is not asyncio.current_task()


async def test_each_trajectory_has_a_session_of_its_own():
    events: list[Any] = []
    dispatcher = Dispatcher([Stateful(events)])
    rows = [dispatcher.session(name) for name in ("t0", "t1")]
    await dispatcher.run([(row, [_call("stateful")], None) for row in rows])
    await rows[0].close()
    assert [event[:2] for event in events if event[0] == "close"] == [("close", "t0")]
    await dispatcher.close()
    assert [event[:2] for event in events if event[0] == "close"] == [("close", "t0"), ("close", "t1")]


async def test_a_session_that_is_used_after_its_close_is_closed_with_the_dispatcher():
    """`Session.close` promises that later calls open sessions again; those must be closed too."""
    events: list[Any] = []
    dispatcher = Dispatcher([Stateful(events)])
    session = dispatcher.session("t")
    await session.run([_call("stateful")])
    await session.close()
    await session.run([_call("stateful")])
    await dispatcher.close()
    opened_and_closed = [event[0] for event in events if event[0] != "run"]
    await session.close()
    assert opened_and_closed == ["open", "close", "open", "close"]


async def test_a_session_that_fails_to_open_gives_a_result_and_the_next_call_tries_again():
    events: list[Any] = []
    async with Dispatcher([Stateful(events, fail=1)]).session("t") as session:
        first = (await session.run([_call("stateful", "1")]))[0]
        second = (await session.run([_call("stateful", "2")]))[0]
    assert (first.status, second.status) == (Status.INFRA, Status.OK)
    assert [event[0] for event in events] == ["open", "open", "run", "close"]


async def test_timed_out_call_returns_its_slot_even_if_it_ignores_cancellation():
    limiter, let_go = RateLimiter(max_concurrent=1), asyncio.Event()

    async def stubborn() -> str:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    dispatcher = Dispatcher([stubborn], rate_limits={"stubborn": limiter}, per_call_timeout=0.05)
    session = dispatcher.session("t")
    (result,) = await session.run([_call("stubborn")])
    assert result.status is Status.TIMEOUT
    assert "0.05 s" in result.text
    assert limiter.stats().in_flight == 0
    assert session.is_busy
    let_go.set()
    await session.close()
    assert not session.is_busy


async def test_the_deadline_of_a_turn_covers_queueing():
    """Eight calls on one slot, none of which ever ends by itself: all are answered by one deadline."""
    limiter, began = RateLimiter(max_concurrent=1), []

    async def forever(ctx: ToolContext) -> None:
        began.append(ctx.call_id)
        await asyncio.Event().wait()

    dispatcher = Dispatcher(
        [forever], rate_limits={"forever": limiter}, per_call_timeout=None, per_turn_timeout=0.1
    )
    async with dispatcher.session("t") as session, asyncio.timeout(limit(5)):
        results = await session.run([_call("forever", str(n)) for n in range(8)])
    assert [result.status for result in results] == [Status.TIMEOUT] * 8
    assert began == ["0"]
    assert (limiter.stats().in_flight, limiter.stats().waiting) == (0, 0)


async def test_the_deadline_of_a_turn_reaches_calls_that_wait_for_others():
    began: list[str] = []

    async def forever(ctx: ToolContext) -> None:
        began.append(ctx.call_id)
        await asyncio.Event().wait()

    dispatcher = Dispatcher([tool(forever, effects=Effects.EXCLUSIVE)], per_turn_timeout=0.1)
    async with dispatcher.session("t") as session, asyncio.timeout(limit(5)):
        results = await session.run([_call("forever", str(n)) for n in range(3)])
    assert [result.status for result in results] == [Status.TIMEOUT] * 3
    assert began == ["0"]


def test_call_timeout_starts_with_the_run():
    """Eight calls of which each may take long, one after the other: queueing does not count."""
    limiter = RateLimiter(max_concurrent=1)

    async def brief() -> str:
        await asyncio.sleep(1)
        return "ok"

    async def main() -> list[ToolResult]:
        dispatcher = Dispatcher([brief], rate_limits={"brief": limiter}, per_call_timeout=1.5)
        async with dispatcher.session("t") as session:
            return await session.run([_call("brief", str(n)) for n in range(8)])

    results = run_skipping(main())
    assert [result.status for result in results] == [Status.OK] * 8


def _raises(error: BaseException) -> Any:
    async def bad() -> None:
        raise error

    def bad_blocking() -> None:
        raise error

    return tool(bad, name="bad"), tool(bad_blocking, name="bad")


@pytest.mark.parametrize("kind", [0, 1], ids=["async", "blocking"])
@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ToolError("try b", {"k": 1}), Status.ERROR, "try b"),
        (StopSignal("finished"), Status.OK, "finished"),
        (InfrastructureError("overloaded"), Status.INFRA, "overloaded"),
        (TimeoutError("slow"), Status.TIMEOUT, "slow"),
        (ValueError("secret detail"), Status.CRASH, "ValueError"),
        (SystemExit(1), Status.CRASH, "SystemExit"),
        (KeyboardInterrupt(), Status.CRASH, "KeyboardInterrupt"),
        (BaseException("x"), Status.CRASH, "BaseException"),
        (asyncio.CancelledError(), Status.CANCELLED, "cancelled"),
        (StopIteration(), Status.CRASH, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
async def test_any_exception_is_one_result_and_other_calls_are_answered(
    kind: int, error: BaseException, status: Status, words: str
):
    async def good() -> str:
        return "good"

    async with Dispatcher([_raises(error)[kind], good]).session("t") as session, asyncio.timeout(limit(5)):
        results = await session.run([_call("bad", "1"), _call("good", "2")])
    assert [result.status for result in results] == [status, Status.OK]
    assert words in results[0].text
    assert results[0].stop is isinstance(error, StopSignal)
    if isinstance(error, ToolError):
        assert results[0].meta == {"k": 1}


async def test_a_crash_is_logged_once_with_ids_and_the_model_sees_one_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        async with Dispatcher([_raises(ValueError("secret detail"))[0]]).session("traj-7") as session:
            await session.run([])
            (result,) = await session.run([_call("bad", "call-9")])
    assert "\n" not in result.text
    assert "secret" not in result.text
    (record,) = [record for record in caplog.records if record.name.startswith("torchrl_agentic")]
    assert record.exc_info is not None
    for piece in ("bad", "traj-7", "call-9", "turn 1"):
        assert piece in record.getMessage()


async def test_only_the_first_crash_at_a_place_has_a_traceback(caplog: pytest.LogCaptureFixture):
    @tool
    async def fragile(at: int) -> str:
        """Fail.

        Args:
            at: Where.
        """
        if at:
            raise KeyError(at)
        raise KeyError("elsewhere")

    calls = [ParsedCall("fragile", {"at": at}, f"c{at}") for at in (1, 1, 0, *[1] * 10)]
    async with Dispatcher([fragile]).session("t") as session:
        results = [result for call in calls for result in await session.run([call])]
    assert [result.status for result in results] == [Status.CRASH] * 13
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False]
    assert caplog.records[2].getMessage() == "tool fragile crashed 10 times with this KeyError"


async def test_refused_call_gets_a_result_with_the_alternatives():
    async def add(a: int) -> int:
        return a

    calls = [
        _call("fly"),
        ParsedCall("", {}, "x", error=CallError("invalid_json", "call 2 was not run: bad JSON")),
        ParsedCall("", {}, "y", error=CallError("over_limit", "too many")),
        _call("add", a=True),
        _call("add", a=1, extra=2),
    ]
    async with Dispatcher([add, tool(add, name="plus")]).session("t") as session:
        results = await session.run(calls)
    assert [result.status for result in results] == [
        Status.UNKNOWN_TOOL, Status.MALFORMED, Status.SKIPPED, Status.INVALID_ARGS, Status.OK,
    ]  # fmt: skip
    assert "'fly'" in results[0].text
    assert "add, plus" in results[0].text
    assert "bad JSON" in results[1].text
    assert "integer" in results[3].text
    assert results[4].notes == ("undeclared argument: extra",)
    assert all(result.timing is not None for result in results)


async def test_arguments_that_are_too_many_or_too_deep_are_invalid():
    async def total(values: list[int]) -> int:
        return sum(values)

    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    calls = [_call("total", values=values) for values in ([1] * 200_000, deep, ["x"] * 90_000, [1] * 90_000)]
    async with Dispatcher([total]).session("t") as session:
        results = await session.run(calls)
    assert [result.status for result in results] == [*[Status.INVALID_ARGS] * 3, Status.OK]
    for result, said in zip(results, ("pass fewer", "levels deep", "values[0]:", "90000"), strict=True):
        assert said in result.text


async def test_calls_over_the_budget_of_a_turn_are_skipped():
    async def one() -> int:
        return 1

    async with Dispatcher([one], max_calls_per_turn=2).session("t") as session:
        for _ in range(2):
            results = await session.run([_call("one", str(n)) for n in range(4)])
            assert [r.status for r in results] == [Status.OK, Status.OK, Status.SKIPPED, Status.SKIPPED]
            assert "2" in results[2].text


async def test_ids_are_unique_over_turns_and_the_same_in_equal_runs():
    def ids() -> list[str]:
        session = Dispatcher().session("t")
        found: list[str] = []
        for turn in (["a", "b"], ["a", "a_2", "c"], ["a"]):
            found += [call.call_id for call in session.begin_turn([_call("x", name) for name in turn])]
        return found

    assert len(set(ids())) == 6
    assert ids() == ids()
    assert ids()[:3] == ["a", "b", "a_2"]


async def test_a_blocking_tool_does_not_delay_an_async_neighbour():
    """The blocking one returns only once the async one has run."""
    event = threading.Event()

    def block() -> bool:
        return event.wait(limit(5))

    async def free() -> str:
        event.set()
        return "free"

    async with Dispatcher([block, free]).session("t") as session:
        results = await session.run([_call("block"), _call("free")])
    assert [result.text for result in results] == ["true", "free"]


async def test_more_blocking_calls_than_threads_all_finish():
    def block(n: int) -> int:
        return n

    async with Dispatcher([block], max_threads=2).session("t") as session:
        results = await session.run([_call("block", str(n), n=n) for n in range(50)])
    assert [result.text for result in results] == [str(n) for n in range(50)]


async def test_cancelling_a_run_ends_its_tools_before_it_returns():
    begun, ended, limiter = asyncio.Event(), [], RateLimiter(max_concurrent=1)

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            ended.append(True)

    dispatcher = Dispatcher([work], rate_limits={"work": limiter}, per_call_timeout=None)
    session = dispatcher.session("t")
    task = asyncio.create_task(session.run([_call("work", str(n)) for n in range(3)]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    assert (limiter.stats().in_flight, limiter.stats().waiting) == (0, 0)
    await dispatcher.close()


async def test_a_run_that_is_cancelled_again_at_once_leaves_no_call_behind():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    dispatcher = Dispatcher([work], per_call_timeout=None)
    session = dispatcher.session("t")
    task = asyncio.create_task(session.run([_call("work")]))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)  # the run has begun to cancel its calls
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(limit(5)):
        await ended.wait()
    await session.close()
    assert not session.is_busy
    await dispatcher.close()


async def test_failing_setup_raises_and_tears_down_earlier_tools():
    events: list[str] = []
    dispatcher = Dispatcher([Owned("a", events), Owned("b", events, "setup"), Owned("c", events)])
    with pytest.raises(OSError, match="no database"):
        await dispatcher.session("t").run([_call("a")])
    assert events == ["setup a", "setup b", "teardown a"]


async def test_tools_are_set_up_once_before_the_first_run():
    events: list[str] = []
    dispatcher = Dispatcher([Owned("a", events)])
    sessions = [dispatcher.session(name) for name in "xy"]
    await asyncio.gather(*(session.run([_call("a")]) for session in sessions))
    assert events == ["setup a"]
    await dispatcher.close()
    assert events == ["setup a", "teardown a"]


async def test_closed_dispatcher_can_be_used_again():
    events: list[str] = []
    dispatcher = Dispatcher([Owned("a", events), lambda_tool()])
    for _ in range(2):
        session = dispatcher.session("t")
        assert [r.text for r in await session.run([_call("a"), _call("block")])] == ["a", "1"]
        await dispatcher.close()
        await dispatcher.close()
    assert events == ["setup a", "teardown a"] * 2


async def test_tool_torn_down_by_one_fork_is_set_up_by_another():
    events: list[str] = []
    first = Dispatcher([Owned("a", events)])
    second = first.fork()
    for dispatcher in (first, second):
        await dispatcher.session("t").run([_call("a")])
    await first.close()
    assert [r.text for r in await second.session("u").run([_call("a")])] == ["a"]
    assert events == ["setup a", "teardown a", "setup a"]
    await second.close()


async def test_a_tool_that_is_added_later_is_set_up_before_its_first_run():
    events: list[str] = []
    dispatcher = Dispatcher([Owned("a", events)])
    session = dispatcher.session("t")
    await session.run([_call("a")])
    dispatcher.add(Owned("b", events))
    assert [r.text for r in await session.run([_call("b")])] == ["b"]
    assert events == ["setup a", "setup b"]
    await dispatcher.close()


def lambda_tool() -> Any:
    return tool(lambda: 1, name="block")


async def test_errors_of_teardown_are_logged_and_the_others_torn_down(caplog: pytest.LogCaptureFixture):
    events: list[str] = []
    dispatcher = Dispatcher([Owned("a", events), Owned("b", events, "teardown")])
    await dispatcher.setup()
    await dispatcher.close()
    assert events == ["setup a", "setup b", "teardown b", "teardown a"]
    assert "no goodbye" in caplog.text
    assert "b" in caplog.text


async def test_errors_of_closing_a_session_are_logged(caplog: pytest.LogCaptureFixture):
    class Bad(Stateful):
        @asynccontextmanager
        async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
            yield self
            raise OSError("cannot close")

    async with Dispatcher([Bad([])]).session("traj-3") as session:
        await session.run([_call("stateful")])
    assert "cannot close" in caplog.text
    assert "traj-3" in caplog.text


async def test_context_has_the_position_of_the_call():
    seen: list[ToolContext] = []

    class Wants(Tool):
        name = "wants"
        wants_state = True

        async def run(self, args: Any, ctx: ToolContext) -> ToolResult:
            seen.append(ctx)
            return ToolResult.from_text("x")

    async def plain(ctx: ToolContext) -> None:
        seen.append(ctx)

    dispatcher = Dispatcher([Wants(), plain], compose="compose", per_call_timeout=9)
    session = dispatcher.session("t", row=3)
    await session.run([], state="s")
    await session.run([ParsedCall("wants", {}, "c1", "tag"), _call("plain")], state="s")
    wants, other = seen
    assert (wants.call_id, wants.tag, wants.state, wants.compose) == ("c1", "tag", "s", "compose")
    assert (wants.batch_index, wants.trajectory, wants.turn) == (3, "t", 1)
    assert wants.deadline is not None
    assert other.state is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dispatcher([lambda_tool(), lambda_tool()]), "two tools are named 'block'"),
        (lambda: Dispatcher([lambda_tool()], rate_limits={"blok": RateLimiter()}), "'blok'"),
        (lambda: Dispatcher(per_call_timeout=0), "per_call_timeout"),
        (lambda: Dispatcher(per_turn_timeout=float("nan")), "per_turn_timeout"),
        (lambda: Dispatcher(max_calls_per_turn=0), "max_calls_per_turn"),
        (lambda: Dispatcher([tool(lambda: 1, name="x", schema={"type": "array"})]), "'x'"),
    ],
)
def test_wrong_arguments_raise_in_the_constructor(make: Callable[[], Dispatcher], words: str):
    with pytest.raises(ValueError, match=words):
        make()


async def test_one_limiter_serves_two_dispatchers():
    limiter, inside, most = RateLimiter(max_concurrent=1), [0], [0]

    async def work() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        await asyncio.sleep(0)
        inside[0] -= 1

    sessions = [Dispatcher([work], rate_limits={"work": limiter}).session("t") for _ in range(2)]
    await asyncio.gather(*(session.run([_call("work", str(n)) for n in range(5)]) for session in sessions))
    assert most == [1]
    await _until(lambda: limiter.stats().in_flight == 0)


async def test_successful_calls_raise_a_limit_that_a_tool_has_lowered():
    class Busy(Tool):
        name = "busy"

        async def run(self, args, ctx) -> str:
            ctx.limiter.record_overload()
            return "served after all"

    async def work() -> None: ...

    limiter = RateLimiter(max_concurrent=8)
    dispatcher = Dispatcher([Busy(), work], rate_limits={"busy": limiter, "work": limiter})
    session = dispatcher.session("t")
    await session.run([_call("busy")])
    assert limiter.stats().concurrent < 8
    for _ in range(5):
        await session.run([_call("work", str(n)) for n in range(20)])
    assert limiter.stats().concurrent == 8
    await dispatcher.close()


async def test_a_teardown_that_wants_to_end_the_program_does_not():
    """SystemExit on the one loop would end every environment of the process."""

    class Ends(Owned):
        async def teardown(self) -> None:
            raise SystemExit(3)

    dispatcher = Dispatcher([Ends("a", [])])
    await dispatcher.setup()
    try:
        await dispatcher.close()
    except SystemExit:
        pytest.fail("SystemExit came through")


async def test_a_schema_is_compiled_once_for_all_turns_and_forks():
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    dispatcher = Dispatcher([add])
    compiled = dispatcher.bound["add"].validator
    fork = dispatcher.fork()
    for each in (dispatcher, fork):
        async with each.session("t") as session:
            for _ in range(3):
                await session.run([ParsedCall("add", {"a": 1, "b": 2}, "c")])
        assert each.bound["add"].validator is compiled


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"A": {"properties": {"n": {"type": "string"}}}}, "$ref": "#/$defs/A"},
        {"$defs": {"A": {"properties": {"n": {"type": "string"}}}}, "$ref": "#/$defs/A", "required": ["n"]},
        {"$defs": {"Opt[s]": {"type": "string"}}, "properties": {"n": {"$ref": "#/$defs/Opt%5Bs%5D"}}},
        {"definitions": {"s": {"type": "string"}}, "properties": {"n": {"$ref": "#/definitions/s"}}},
    ],
    ids=["root", "root and siblings", "escaped", "draft-07"],
)
async def test_a_parser_reads_an_argument_by_the_type_that_is_checked(schema: dict[str, Any]):
    """`12` without quotes is a text here."""

    def say(**args: Any) -> Any:
        """Say."""
        return args

    dispatcher = Dispatcher([tool(say, schema={"type": "object", **schema})])
    parser = get_parser("qwen3_coder")
    text = parser.render_call(ParsedCall("say", {"n": "12"}, "c"))
    async with dispatcher.session("t") as session:
        (result,) = await session.run(parser.parse(text, tools=dispatcher.schemas).calls)
    assert (result.status, result.text) == (Status.OK, '{"n": "12"}')


async def test_a_tool_that_takes_the_place_of_another_opens_once_after_that_one_has_closed():
    diary = []

    class Numbered(Tool):
        name, description, effects = "n", "Return a number.", Effects.PURE

        def __init__(self, number):
            self.number = number

        @asynccontextmanager
        async def session(self, trajectory):
            diary.append(("open", self.number))
            yield self
            await asyncio.sleep(0)
            diary.append(("close", self.number))

        async def run(self, args, ctx):
            return self.number

    dispatcher = Dispatcher([Numbered(1)])
    session = dispatcher.session("t")
    await session.run([ParsedCall("n", {}, "a")])
    dispatcher.remove("n")
    dispatcher.add(Numbered(2))
    found = await session.run([ParsedCall("n", {}, "b"), ParsedCall("n", {}, "c")])
    await dispatcher.close()
    assert [result.text for result in found] == ["2", "2"]
    assert diary == [("open", 1), ("close", 1), ("open", 2), ("close", 2)]


async def test_a_branch_may_use_the_tools_that_its_source_may():
    class Named(Tool):
        description = "Return its name."

        def __init__(self, name):
            self.name = name

        async def run(self, args, ctx):
            return self.name

    session = Dispatcher([Named("f"), Named("g")]).session("t")
    session.data = RowData(selections=((0, frozenset({"f"})),))
    await session.run([ParsedCall("f", {}, "a")])
    other = session.dispatcher.session("u")
    await session.branch([other])
    results = await other.run([ParsedCall("f", {}, "a"), ParsedCall("g", {}, "b")])
    assert [result.status for result in results] == [Status.OK, Status.UNKNOWN_TOOL]


async def test_branches_that_were_open_close_although_their_branching_is_cancelled_twice():
    second, goes_on, closed = asyncio.Event(), asyncio.Event(), []

    class Copied(Tool):
        name, description = "copied", "Return nothing."

        @asynccontextmanager
        async def session(self, trajectory):
            yield self

        @asynccontextmanager
        async def branch(self, live, trajectory):
            if trajectory == "second":
                second.set()
                await goes_on.wait()
            yield live
            closed.append(trajectory)

        async def run(self, args, ctx):
            return ""

    async with Dispatcher([Copied()]).session("t") as session:
        await session.run([_call("copied")])
        copies = [session.dispatcher.session(name) for name in ("first", "second")]
        task = asyncio.create_task(session.branch(copies))
        await second.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        goes_on.set()
        await asyncio.wait({task})
        assert task.cancelled()
        assert sorted(closed) == ["first", "second"]
