"""A tool is retried only after transient errors, only if that is safe, and never past its deadline."""

import asyncio
import errno
import logging
import socket
import urllib.error

import httpx
import pytest
from helpers.limit import limit
from helpers.wrapper_tools import Notes, Scripted, ask, by_hand, ctx

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.limits import CircuitOpen, RateLimiter
from torchrl_agentic.messages import ParsedCall, Status, ToolResult
from torchrl_agentic.testing import VirtualClock
from torchrl_agentic.tools import Approved, Cached, Retrying
from torchrl_agentic.tools.base import Effects, Tool

INFRA = InfrastructureError("overloaded")
CHANGES = Effects(writes=["db"])


def at_once(seconds, callback):
    """Time that does not pass."""
    callback()


def retrying(*outcomes, effects=Effects.PURE, **options):
    return Retrying(Scripted(*outcomes, effects=effects), call_later=at_once, **options)


@pytest.mark.parametrize(
    "bad",
    [
        INFRA,
        TimeoutError(),
        ToolResult.from_text("lost", status=Status.INFRA),
        ToolResult.from_text("late", status=Status.TIMEOUT),
    ],
    ids=["raises infra", "raises timeout", "infra", "timeout"],
)
async def test_transient_errors_are_retried_and_counted(bad):
    (result,) = await ask(retrying(bad, bad, "fine"), {})
    assert (result.text, result.status, result.metrics) == ("fine", Status.OK, {"retries": 2})


class Final(InfrastructureError):
    is_transient = False


@pytest.mark.parametrize("bad", [ToolError("wrong"), Final("moved"), RuntimeError("a bug")])
async def test_permanent_errors_are_not_retried(bad):
    tool = retrying(bad)
    (result,) = await ask(tool, {})
    assert result.is_error
    assert len(tool.seen) == 1


def of_library(package, name):
    """An exception as a client raises it: a subclass of the one that is looked for."""
    base = type(name, (Exception,), {"__module__": f"{package}.exceptions"})
    return type("Special", (base,), {})("no answer")


@pytest.mark.parametrize(
    "lost",
    [
        ConnectionRefusedError("nobody there"),
        BrokenPipeError(),
        TimeoutError("late"),
        socket.gaierror(-2, "no such name"),
        urllib.error.URLError("unreachable"),
        OSError(errno.EHOSTUNREACH, "no route"),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("cut"),
        of_library("aiohttp", "ClientConnectionError"),
        of_library("requests", "ConnectionError"),
        of_library("httpcore", "NetworkError"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_failing_connection_is_retried_and_gives_infra(lost):
    (result,) = await ask(retrying(lost, lost, "fine"), {})
    assert (result.text, result.metrics) == ("fine", {"retries": 2})
    (result,) = await ask(retrying(lost), {})
    assert result.status is (Status.TIMEOUT if isinstance(lost, TimeoutError) else Status.INFRA)
    (result,) = await ask(retrying(lost, attempts=1), {})
    assert result.status is (Status.TIMEOUT if isinstance(lost, TimeoutError) else Status.INFRA)


@pytest.mark.parametrize(
    "bug",
    [
        FileNotFoundError(errno.ENOENT, "no file"),
        PermissionError(errno.EACCES, "not yours"),
        KeyError("x"),
        urllib.error.HTTPError("http://x", 404, "Not Found", {}, None),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_other_exceptions_are_bugs_unless_they_are_named(bug, caplog):
    caplog.set_level(logging.CRITICAL)
    tool = retrying(bug, "fine")
    (result,) = await ask(tool, {})
    assert (result.status, len(tool.seen)) == (Status.CRASH, 1)
    (result,) = await ask(retrying(bug, "fine", on=(type(bug),)), {})
    assert (result.text, result.metrics) == ("fine", {"retries": 1})
    (result,) = await ask(retrying(bug, on=[type(bug)]), {})
    assert result.status is Status.INFRA
    assert type(bug).__name__ in result.text


@pytest.mark.parametrize("on", [KeyError, ("KeyError",), (ToolError,), (KeyboardInterrupt,)])
def test_invalid_exception_type_for_retries_is_rejected(on):
    with pytest.raises(TypeError):
        retrying("x", on=on)


async def test_the_first_try_that_is_answered_is_passed_on_as_it_is():
    whole = ToolResult.from_text("x")
    assert await by_hand(retrying(whole)) is whole


async def test_retries_are_bounded_and_their_number_is_logged(caplog):
    (result,) = await ask(retrying(INFRA, attempts=4), {})
    assert (result.status, result.metrics) == (Status.INFRA, {"retries": 3})
    assert result.text == "Error: scripted is not available at the moment: overloaded"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "overloaded (trajectory t, turn 0, call c0)" in line


async def test_retries_within_retries_are_added_up():
    inner = retrying(INFRA, ToolResult.from_text("", status=Status.INFRA), INFRA, "fine", attempts=2)
    (result,) = await ask(Retrying(inner, call_later=at_once), {})
    assert result.metrics == {"retries": 2}


@pytest.mark.parametrize("effects", [CHANGES, Effects.EXCLUSIVE])
def test_a_tool_that_changes_things_needs_a_key(effects):
    with pytest.raises(ValueError, match="Pass an idempotency_key"):
        retrying("x", effects=effects)
    with pytest.raises(ValueError, match="a second try could do them twice"):
        Retrying(Notes())
    assert retrying("x", effects=Effects(reads=["db"]))


async def test_all_tries_of_a_call_carry_one_key_and_other_calls_another():
    tool = retrying(INFRA, "fine", effects=CHANGES, idempotency_key="key")
    await ask(tool, {"q": 1}, {"q": 2, "key": "the model's"})
    assert tool.seen == [
        {"q": 1, "key": "t/c0"},
        {"q": 1, "key": "t/c0"},
        {"q": 2, "key": "the model's"},
        {"q": 2, "key": "the model's"},
    ]


async def test_a_call_without_a_key_is_not_tried_again():
    def key(args, ctx):
        return args.get("key")

    tool = retrying(INFRA, effects=CHANGES, idempotency_key=key)
    await ask(tool, {})
    assert len(tool.seen) == 1
    await ask(tool, {"key": "k"})
    assert len(tool.seen) == 1 + 3


def test_a_key_that_names_no_argument_is_found_out_early():
    with pytest.raises(ValueError, match="no argument 'id'; it has: q, key"):
        retrying("x", effects=CHANGES, idempotency_key="id")


async def test_no_try_begins_after_the_deadline():
    """The first pause would exceed the remaining time, so there is none."""
    tool = Retrying(Scripted(INFRA), first_s=60, longest_s=60)
    now = asyncio.get_running_loop().time()
    with pytest.raises(InfrastructureError):
        await asyncio.wait_for(tool.run({}, ctx(deadline=now + 30)), limit(20))
    assert len(tool.seen) == 1


PAUSES = [pytest.param(INFRA, 8, id="of its own"), pytest.param(CircuitOpen(99.0), 99, id="of the service")]


@pytest.mark.parametrize(("failure", "pause_s"), PAUSES)
async def test_a_pause_is_as_long_as_the_clock_or_the_service_says(failure, pause_s):
    clock = VirtualClock()
    tool = Retrying(Scripted(failure, "fine"), first_s=8, call_later=clock.call_later)
    running = asyncio.create_task(by_hand(tool))
    while not clock.due:
        await asyncio.sleep(0)
    clock.advance(pause_s - 0.1)
    await asyncio.sleep(0)
    assert len(tool.seen) == 1
    clock.advance(8.2)
    assert (await running).text == "fine"


@pytest.mark.parametrize(("failure", "pause_s"), PAUSES)
async def test_callers_do_not_return_at_the_same_time(failure, pause_s, monkeypatch):
    monkeypatch.setattr("random.random", lambda: 0.5)
    clock = VirtualClock()
    tool = Retrying(Scripted(failure, "fine"), first_s=8, call_later=clock.call_later)
    running = asyncio.create_task(by_hand(tool))
    while not clock.due:
        await asyncio.sleep(0)
    clock.advance(pause_s + 3.9)
    await asyncio.sleep(0)
    assert len(tool.seen) == 1
    clock.advance(0.2)
    assert (await running).text == "fine"


@pytest.mark.parametrize(
    "options", [{"attempts": 0}, {"first_s": 0}, {"first_s": float("nan")}, {"first_s": 2, "longest_s": 1}]
)
def test_invalid_numbers_are_rejected(options):
    with pytest.raises(ValueError, match="expected attempts"):
        retrying("x", **options)


async def test_a_try_that_queued_leaves_the_next_one_its_time():
    """Waiting for approval moves the deadline: a value read before is outdated."""
    outcomes = iter([InfrastructureError("gone"), None])

    class Fails(Tool):
        name, description, effects = "f", "Fail once.", Effects.PURE

        async def run(self, args, ctx):
            if error := next(outcomes):
                raise error
            assert ctx.deadline > asyncio.get_running_loop().time()
            return "fine"

    async def slowly(*_):
        await asyncio.sleep(0.4)
        return True

    inner = Approved(Fails(), slowly, wait_s=5)
    dispatcher = Dispatcher([Retrying(inner, first_s=0.01)], per_call_timeout=0.3)
    (result,) = await dispatcher.session("t").run([ParsedCall("f", {}, "a")])
    await dispatcher.close()
    assert result.text == "fine"


async def test_no_slot_is_held_during_a_pause_and_each_try_takes_one():
    limiter = RateLimiter(max_concurrent=1)
    pauses = []
    flaky = Retrying(Scripted(INFRA, "fine"), call_later=lambda seconds, go_on: pauses.append(go_on))
    dispatcher = Dispatcher([flaky], rate_limits={flaky.name: limiter})
    async with dispatcher.session("t") as session:
        first = asyncio.create_task(session.run([ParsedCall(flaky.name, {}, "c0")]))
        while not pauses:
            await asyncio.sleep(0)
        async with asyncio.timeout(limit(10)), limiter.slot():  # another caller of the service
            pauses[0]()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not first.done()
        (result,) = await first
    assert (result.text, result.metrics) == ("fine", {"retries": 1})
    assert limiter.stats().granted == 3
    assert limiter.stats().in_flight == 0


@pytest.mark.parametrize("attempts", [1, 2])
async def test_failures_in_a_row_open_the_circuit_of_the_limiter(attempts, caplog):
    limiter = RateLimiter(max_concurrent=4, break_after=4, break_seconds=60)
    flaky = retrying(*[INFRA] * 3, "fine", *[INFRA] * 9, attempts=attempts)
    for _ in range(20):
        await ask(flaky, {}, rate_limits={flaky.name: limiter})
        if limiter.circuit == "open":
            break
    assert limiter.circuit == "open"
    assert limiter.stats().granted == 3 + 1 + 4
    (result,) = await ask(flaky, {}, rate_limits={flaky.name: limiter})
    assert result.status is Status.INFRA
    assert "failed repeatedly" in result.text
    assert "overloaded" not in result.text, "which may be of another trajectory"
    assert "overloaded" in caplog.text
    assert limiter.stats().granted == 8


async def test_a_call_that_has_timed_out_takes_no_slot_again():
    class Stubborn(Scripted):
        async def run(self, args, ctx):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise INFRA from None  # as some clients do

    limiter = RateLimiter(max_concurrent=1)
    tool = Retrying(Stubborn(), call_later=at_once)
    (result,) = await ask(tool, {}, rate_limits={tool.name: limiter}, per_call_timeout=0.05)
    assert result.status is Status.TIMEOUT
    assert limiter.stats().in_flight == 0
    assert limiter.stats().granted == 1


async def test_a_slot_is_held_once_and_not_after_its_end():
    limiter = RateLimiter(max_concurrent=2)
    slot = limiter.slot()
    await slot.acquire()
    with pytest.raises(RuntimeError, match="held already"):
        await slot.acquire()
    slot.close()
    with pytest.raises(RuntimeError, match="has ended"):
        await slot.acquire()
    assert limiter.stats().in_flight == 0


async def test_a_result_from_a_cache_says_nothing_about_the_service():
    limiter = RateLimiter(max_concurrent=4, break_after=3)
    tool = Cached(Scripted("known", *[INFRA] * 3), "global")
    for query in ("a", "b", "a", "c", "a", "d"):
        await ask(tool, {"q": query}, rate_limits={tool.name: limiter})
    assert limiter.circuit == "open"
