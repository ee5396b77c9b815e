"""Every return value or exception of a tool becomes one result, and conflicting calls never overlap."""

import asyncio
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from helpers.limit import limit

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import StopSignal, ToolError
from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.messages import ParsedCall, Status, TextPart, ToolResult
from torchrl_agentic.tools.base import Effects, Tool
from torchrl_agentic.tools.function import tool


class Bare(ToolError):
    def __init__(self) -> None:
        pass


class Unprintable(StopSignal):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "answer",
    [
        lambda: ToolResult((TextPart(5),)),
        lambda: ToolResult.from_text(None),
        lambda: ToolResult.from_text("x", stop=False).__class__((TextPart("x"),), reward="high"),
        lambda: (_ for _ in ()).throw(Bare()),
        lambda: (_ for _ in ()).throw(Unprintable()),
    ],
)
async def test_unprintable_result_is_a_crash_of_its_call_only(answer):
    """Without a bound on time, a call that never gets its result would hang the turn for ever."""

    async def odd() -> object:
        return answer()

    async def good() -> str:
        return "good"

    dispatcher = Dispatcher([tool(odd), tool(good)], per_call_timeout=None)
    async with dispatcher.session("t") as session, asyncio.timeout(limit(5)):
        bad, fine = await session.run([ParsedCall("odd", {}, "c1"), ParsedCall("good", {}, "c2")])
    assert (bad.status, fine.text) == (Status.CRASH, "good")


async def generated():
    for number in range(3):
        yield number


async def slow_seven():
    return 7


UNREADABLE = "Error: odd finished, but its result cannot be read (UnreadableResult)"
FINISHED = {
    "no JSON": (object, "ok", "<object object>"),
    "generator": (lambda: (number for number in range(3)), "ok", "[0, 1, 2]"),
    "iterator": (lambda: map(str, range(3)), "ok", '["0", "1", "2"]'),
    "async generator": (generated, "ok", "[0, 1, 2]"),
    "coroutine": (slow_seven, "ok", "7"),
    "endless": (itertools.count, "crash", UNREADABLE),
    "mixed": (lambda: (ToolResult(), 1.0), "crash", UNREADABLE),
    "bad part": (lambda: ToolResult((TextPart(5),)), "crash", UNREADABLE),
    "raised": (lambda: 1 / 0, "crash", "Error: odd crashed (ZeroDivisionError); it did not finish"),
    "closing": (
        lambda: (_ for _ in ()).throw(GeneratorExit()),
        "crash",
        "Error: odd crashed (RuntimeError); it did not finish",
    ),
}  # fmt: skip


class Odd(Tool):
    name = "odd"

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    async def run(self, args: Any, ctx: Any) -> Any:
        value = self.make()
        return await value if inspect.iscoroutine(value) else value


@pytest.mark.parametrize("case", FINISHED)
async def test_a_tool_that_has_run_is_not_said_to_have_failed(case: str):
    """As a function on a thread, as a coroutine function, and as a class."""
    make, status, text = FINISHED[case]

    def odd():
        return make()

    async def coroutine():
        return make()

    tools = [tool(odd), tool(coroutine, name="odd")]
    if case not in ("async generator", "closing"):  # such a `run` is refused when the tool is added
        tools.append(Odd(make))
    for item in tools:
        dispatcher = Dispatcher([item], per_call_timeout=None)
        async with dispatcher.session("t") as session, asyncio.timeout(limit(5)):
            (result,) = await session.run([ParsedCall("odd", {}, "c1")])
        if case == "closing":
            assert (result.status, "it did not finish" in result.text) == (Status.CRASH, True)
        else:
            assert (result.status, result.text) == (status, text)


async def test_generator_functions_are_tools_whose_errors_are_their_own():
    @tool
    def counting(up_to: int):
        """Count."""
        if up_to > 2:
            raise ToolError("too many")
        yield from range(up_to)

    @tool
    async def waiting(up_to: int):
        """Count."""
        for number in range(up_to):
            if number == 2:
                raise ToolError("too many")
            yield number

    async with Dispatcher([counting, waiting]).session("t") as session:
        calls = [ParsedCall(name, {"up_to": n}, "c") for name in ("counting", "waiting") for n in (2, 3)]
        results = await session.run(calls)
    assert [result.text for result in results] == ["[0, 1]", "Error: too many"] * 2


async def test_half_surrogates_of_tools_do_not_reach_the_conversation():
    """Tokenizers refuse them, long after the tool has returned."""

    async def half() -> str:
        return "a\ud800b"

    async with Dispatcher([tool(half)]).session("t") as session:
        (result,) = await session.run([ParsedCall("half", {}, "c1")])
    assert result.text.encode() == b"a?b"


async def test_a_call_waits_for_the_end_of_a_conflicting_one_that_ran_out_of_time():
    """The first is answered at its time, but still cleans up; the second must not begin meanwhile."""
    seen: list[str] = []

    async def write(name: str) -> str:
        seen.append(f"begin {name}")
        try:
            if name == "one":
                await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append(f"end {name}")
        return name

    writer = tool(write, effects=Effects(writes=["file"]))
    async with Dispatcher([writer], per_call_timeout=0.05).session("t") as session:
        calls = [ParsedCall("write", {"name": name}, name) for name in ("one", "two")]
        first, second = await session.run(calls)
    assert (first.status, second.status) == (Status.TIMEOUT, Status.OK)
    assert seen == ["begin one", "end one", "begin two", "end two"]


def test_limit_that_is_not_a_limiter_is_rejected():
    with pytest.raises(TypeError, match="RateLimiter\\(max_concurrent=3\\)"):
        Dispatcher(
            [tool(test_limit_that_is_not_a_limiter_is_rejected, name="f", schema={"type": "object"})],
            rate_limits={"f": 3},
        )
    with pytest.raises(ValueError, match="whole"):
        RateLimiter(max_concurrent=2.5)


async def test_replacing_tool_answers_immediately():
    class Counter:
        name, description, input_schema = "count", "Count.", {"type": "object"}

        def __init__(self, start: int) -> None:
            self.n = start

        def session(self, trajectory: str):
            return _opened(Counter(self.n))

        async def run(self, args, ctx) -> int:
            self.n += 1
            return self.n

    dispatcher = Dispatcher([Counter(0)])
    async with dispatcher.session("t") as session:
        assert (await session.run([ParsedCall("count", {}, "c1")]))[0].text == "1"
        dispatcher.remove("count")
        dispatcher.add(Counter(100))
        assert (await session.run([ParsedCall("count", {}, "c2")]))[0].text == "101"


class _opened:
    def __init__(self, live: object) -> None:
        self.live = live

    async def __aenter__(self) -> object:
        return self.live

    async def __aexit__(self, *_: object) -> None:
        pass


async def test_look_alike_session_separates_trajectories():
    class Counter:
        name, description, input_schema, n = "count", "Count.", {"type": "object"}, 0

        def session(self, trajectory: str):
            return _opened(Counter())

        async def run(self, args, ctx) -> int:
            self.n += 1
            return self.n

    dispatcher = Dispatcher([Counter()])
    call = [ParsedCall("count", {}, "c")]
    async with dispatcher.session("a") as a, dispatcher.session("b") as b:
        texts = [(await session.run(call))[0].text for session in (a, b, a)]
    assert texts == ["1", "1", "2"]


async def test_stopped_call_gets_its_result():
    told: list[object] = []

    @tool
    async def hang() -> None:
        """Never end."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as stopped:
            told.extend(stopped.args)
            raise

    dispatcher = Dispatcher([hang], per_call_timeout=0.01)
    session = dispatcher.session("t")
    (result,) = await session.run([ParsedCall("hang", {}, "c")])
    await dispatcher.close()
    assert result.status is Status.TIMEOUT
    assert told == [result]
