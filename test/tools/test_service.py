"""A client retries transient errors, holds no slot meanwhile, and never exceeds its deadline."""

import asyncio
import email.utils
import math
import pickle
import time

import pytest
from fakes.scripted import Reply, scripted_server
from helpers.limit import limit
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.limits import CircuitOpen, RateLimiter
from torchrl_agentic.tools.service import Patience, ServiceClient, ServiceError, retry_after_s

TRY_S = limit(2)
QUICK = Patience(deadline_s=limit(5), tries=4, first_s=0.01, longest_s=0.02)
ENDLESS = Patience(deadline_s=limit(30), tries=100_000, first_s=0.01, longest_s=0.02)
OK = Reply(body={"fine": True})


async def _ask(replies, *, patience=QUICK, limiter=None, timeout=TRY_S, check=None):
    async with (
        scripted_server(replies) as server,
        ServiceClient("the service", limiter, patience=patience) as client,
    ):
        try:
            return await client.post(f"{server.url}/x", {"q": 1}, timeout=timeout, check=check), server
        except ServiceError as error:
            return error, server


@pytest.mark.parametrize(
    "bad",
    [
        Reply(429),
        Reply(502),
        Reply(503),
        Reply(504),
        Reply(how="cut"),
        Reply(body={"a": "b" * 50}, how="half"),
    ],
    ids=["429", "502", "503", "504", "cut", "half"],
)
async def test_transient_errors_are_retried(bad):
    answer, server = await _ask([bad, bad, OK])
    assert answer.data == {"fine": True}
    assert (answer.tries, len(server.requests)) == (3, 3)


async def test_a_try_that_takes_too_long_is_tried_again():
    answer, server = await _ask([Reply(how="hang"), OK], timeout=0.1, patience=ENDLESS)
    assert answer.data == {"fine": True}
    assert answer.tries >= len(server.requests) > 1  # a try may end before its request has arrived


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Reply(500, {"detail": "boom"}), "server"),
        (Reply(200, b"<html>hello"), "garbage"),
        (Reply(200, b""), "garbage"),
        (Reply(200, b"[" * 100_000), "garbage"),
    ],
)
async def test_permanent_errors_are_not_retried(bad, reason):
    error, server = await _ask([bad])
    assert isinstance(error, ServiceError)
    assert error.reason == reason
    assert len(server.requests) == 1


async def test_a_refusal_is_an_answer():
    answer, _ = await _ask([Reply(422, {"detail": "no code"})])
    assert (answer.status, answer.data) == (422, {"detail": "no code"})
    answer, _ = await _ask([Reply(404, b"not here")])
    assert (answer.status, answer.data) == (404, "not here")


async def test_a_check_makes_failures_of_answers_that_look_fine():
    def check(data):
        if data.get("status") == "SandboxError":
            raise ServiceError("the sandbox failed", "sandbox_error", is_transient=True)

    answer, _ = await _ask([Reply(body={"status": "SandboxError"}), OK], check=check)
    assert answer.tries == 2


async def test_tries_come_to_an_end():
    error, server = await _ask([Reply(503, b"busy")])
    assert isinstance(error, ServiceError)
    assert error.reason == "busy"
    assert "503: busy" in str(error)
    assert len(server.requests) == QUICK.tries


async def test_the_deadline_bounds_tries_and_pauses_together():
    """The service asks for an hour; the error has its last response."""
    patience = Patience(deadline_s=limit(0.3), tries=100, first_s=0.01)
    error, server = await _ask([Reply(429, headers={"Retry-After": "3600"})], patience=patience)
    assert isinstance(error, ServiceError)
    assert error.reason == "deadline"
    assert "429" in str(error)
    assert len(server.requests) == 1


async def test_a_server_that_never_answers_is_given_up_at_the_deadline():
    error, _ = await _ask([Reply(how="hang")], timeout=60, patience=Patience(deadline_s=0.2))
    assert isinstance(error, ServiceError)
    assert error.reason == "deadline"


async def test_no_slot_is_held_while_backing_off():
    """The first call must retry; only if it releases the slot, the second one can run."""
    limiter = RateLimiter(max_concurrent=1)
    second_came = asyncio.Event()

    async def answer(path: str, data: dict) -> Reply:
        if data["who"] == "second":
            second_came.set()
            return OK
        if second_came.is_set():
            return OK
        return Reply(502)

    async with scripted_server(answer) as server:
        patience = Patience(deadline_s=limit(10), tries=100_000, first_s=0.02, longest_s=0.02)
        async with ServiceClient("the service", limiter, patience=patience) as client:
            first = asyncio.create_task(client.post(server.url, {"who": "first"}, timeout=limit(5)))
            while not server.requests:
                await asyncio.sleep(0.01)
            await client.post(server.url, {"who": "second"}, timeout=limit(5))
            assert (await first).tries > 1
    assert limiter.stats().in_flight == 0


async def test_limiter_adapts_to_responses_of_the_service():
    limiter = RateLimiter(max_concurrent=8)
    await _ask([Reply(429), OK], limiter=limiter)
    stats = limiter.stats()
    assert (stats.overloads, stats.concurrent) == (1, 4)


async def test_failing_service_opens_the_circuit():
    limiter = RateLimiter(break_after=2, break_seconds=2 * QUICK.deadline_s)
    async with (
        scripted_server([Reply(500)]) as server,
        ServiceClient("it", limiter, patience=QUICK) as client,
    ):
        for _ in range(2):
            with pytest.raises(ServiceError):
                await client.post(server.url, {}, timeout=limit(1))
        with pytest.raises(CircuitOpen):  # it is tried again after the deadline only
            await client.post(server.url, {}, timeout=limit(1))
    assert len(server.requests) == 2


async def test_a_call_outlives_a_circuit_that_closes_in_time():
    limiter = RateLimiter(break_after=2, break_seconds=0.2)
    replies = [Reply(502), Reply(502), OK]
    answer, server = await _ask(replies, limiter=limiter)
    assert answer.data == {"fine": True}
    assert len(server.requests) == 3


async def test_a_sandbox_that_failed_opens_no_circuit():
    limiter = RateLimiter(break_after=2, break_seconds=60)

    def check(data):
        if data.get("status") == "SandboxError":
            raise ServiceError("the sandbox failed", "sandbox_error", is_transient=True)

    bad = Reply(body={"status": "SandboxError"})
    answer, _ = await _ask([bad, bad, bad, OK], limiter=limiter, check=check)
    assert answer.tries == 4


async def test_a_service_that_answers_too_late_has_too_much_to_do():
    limiter = RateLimiter(max_concurrent=8)
    await _ask([Reply(how="hang"), OK], limiter=limiter, timeout=0.1, patience=ENDLESS)
    assert limiter.stats().overloads > 0


async def test_a_service_that_has_moved_says_where_to():
    error, _ = await _ask([Reply(307, b"", {"Location": "http://other/"})])
    assert isinstance(error, ServiceError)
    assert "307" in str(error)
    assert "http://other/" in str(error)


async def test_a_refusal_is_not_checked():
    def check(data):
        raise ServiceError("no result", "garbage")

    answer, _ = await _ask([Reply(403, {"message": "Forbidden"})], check=check)
    assert (answer.status, answer.data) == (403, {"message": "Forbidden"})


@pytest.mark.parametrize(
    "error", [ServiceError("a", "b", is_transient=True, retry_after=3.0, status=503), CircuitOpen(2.0)]
)
def test_errors_can_be_pickled(error):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


async def test_connections_are_used_again():
    async with scripted_server([OK]) as server, ServiceClient("the service", max_connections=2) as client:
        await asyncio.gather(*(client.post(server.url, {}, timeout=limit(5)) for _ in range(20)))
    assert server.connections <= 2
    assert len(server.requests) == 20


async def test_a_cancelled_call_gives_its_slot_back():
    limiter = RateLimiter(max_concurrent=1)
    async with (
        scripted_server([Reply(how="hang")]) as server,
        ServiceClient("the service", limiter) as client,
    ):
        task = asyncio.create_task(client.post(server.url, {}, timeout=60))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert limiter.stats().in_flight == 0


async def test_unreachable_service_is_reported():
    async with ServiceClient("the service", patience=QUICK) as client:
        with pytest.raises(ServiceError, match="cannot be reached") as info:
            await client.post("http://127.0.0.1:1/x", {}, timeout=1)
    assert info.value.reason == "connection"


async def test_waiting_time_is_separate_from_run_time():
    """The wait is measured while the call queues; both times do not overlap, so their sum is bounded."""
    limiter, now = RateLimiter(max_concurrent=1), asyncio.get_running_loop().time
    began = now()
    async with limiter.slot():
        call = asyncio.create_task(_ask([OK], limiter=limiter))
        while not limiter.stats().waiting:
            await asyncio.sleep(0)
        queued = now()
        await asyncio.sleep(0.1)
        waited_s = now() - queued
    answer, _ = await call
    assert answer.queue_s >= waited_s
    assert answer.queue_s + answer.run_s <= now() - began


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    answer, _ = await _ask([OK])
    assert answer.data == {"fine": True}


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("0", None),
        ("-3", None),
        ("nan", None),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_in_seconds(header, seconds):
    assert retry_after_s(header, time.time()) == seconds


def test_retry_after_as_a_date():
    now = 1_700_000_000.0
    assert retry_after_s(email.utils.formatdate(now + 30, usegmt=True), now) == 30
    assert retry_after_s(email.utils.formatdate(now - 30, usegmt=True), now) is None


@given(st.text() | st.floats().map(str))
def test_no_retry_after_is_a_mistake_of_ours(header):
    seconds = retry_after_s(header, 0.0)
    assert seconds is None or seconds > 0 or math.isnan(seconds)


@pytest.mark.parametrize("name", ["deadline_s", "tries", "first_s", "longest_s"])
def test_invalid_patience_is_rejected(name):
    with pytest.raises(ValueError, match=name):
        Patience(**{name: 0})
