"""A dead service costs a step its `per_call_timeout` at most, then nothing until it is there again."""

import asyncio
import contextlib
import logging
import socket
import time

import pytest
from fakes.scripted import Reply, scripted_server
from helpers.limit import limit

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.messages import ParsedCall, Status
from torchrl_agentic.testing import VirtualClock, run_skipping
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.sandbox_fusion import SandboxFusionTool
from torchrl_agentic.tools.service import Patience, ServiceClient

SOON_S = limit(20.0)
"""A generous bound for what takes a second when nothing else runs."""
BROKEN = Reply(500, {"detail": "boom"})
RAN = Reply(
    body={
        "status": "Success",
        "message": "",
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "4"},
    }
)


@contextlib.asynccontextmanager
async def rows(tool, number=16, **options):
    """Give a function that lets each of so many trajectories call the tool once."""
    dispatcher = Dispatcher([tool], **options)
    sessions = [dispatcher.session(f"t{row}") for row in range(number)]

    async def step(**args):
        calls = [ParsedCall(tool.name, args or {"code": "2+2"}, "c")]
        answers = await dispatcher.run([(session, calls, None) for session in sessions])
        return [result for (result,) in answers]

    try:
        yield step
    finally:
        await dispatcher.close()


def interpreter(url, **options):
    return SandboxFusionTool(url, rate_limit=4, enable_global_rate_limit=False, **options)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def dead_port():
    """A local port without a listener."""
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{mine.getsockname()[1]}"


async def test_a_dead_service_gives_every_row_infra_within_the_timeout_and_one_log_line(dead_port, caplog):
    async with rows(interpreter(dead_port), per_call_timeout=0.5) as step, asyncio.timeout(SOON_S):
        results = await step()
    assert [result.status for result in results] == [Status.INFRA] * 16
    opened, line = warnings_of(caplog)
    assert "is not called for a while: the sandbox service cannot be reached" in opened
    assert "code_interpreter: 16 calls got INFRA" in line
    assert "(trajectory t" in line


async def test_a_service_that_never_answers_gives_every_row_infra_within_the_timeout():
    async with (
        scripted_server([Reply(how="hang")]) as server,
        rows(interpreter(server.url), per_call_timeout=0.5) as step,
        asyncio.timeout(SOON_S),
    ):
        results = await step()
    assert [result.status for result in results] == [Status.INFRA] * 16
    assert len(server.requests) < 16


@pytest.mark.parametrize("reply", [Reply(how="hang"), Reply(how="cut"), BROKEN])
async def test_the_step_after_an_outage_does_not_try_the_service(reply, caplog):
    async with (
        scripted_server([reply]) as server,
        rows(interpreter(server.url), per_call_timeout=0.5) as step,
        asyncio.timeout(SOON_S),
    ):
        await step()
        await asyncio.sleep(0.1)  # the server accepts connections of tries that ended meanwhile
        tried = server.connections
        caplog.clear()
        results = await step()
        assert server.connections == tried
    assert [result.status for result in results] == [Status.INFRA] * 16
    assert "tried again in" in results[0].text
    (line,) = warnings_of(caplog)
    assert "16 calls got INFRA" in line


async def test_one_call_that_fails_ends_the_step_while_the_circuit_is_half_open():
    """The others wait for the one trial call, and none retries."""
    clock = VirtualClock()
    limiter = RateLimiter(
        max_concurrent=4, break_after=1, break_seconds=30, clock=clock, call_later=clock.call_later
    )
    async with (
        scripted_server([Reply(how="cut")]) as server,
        ServiceClient("it", limiter, patience=Patience(deadline_s=60)) as client,
    ):
        limiter.record_failure()
        clock.advance(30)
        assert limiter.circuit == "half_open"
        asked = [client.post(server.url, {}, timeout=5) for _ in range(8)]
        async with asyncio.timeout(SOON_S):
            found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(error, InfrastructureError) for error in found)
    assert server.connections == 1


async def test_waiting_in_a_moving_queue_may_exceed_the_call_timeout():
    """Twelve calls, one at a time, each of which takes a tenth of the timeout."""
    per_call_s = limit(1)

    async def answer(path, data):
        await asyncio.sleep(per_call_s / 10)
        return RAN

    async with scripted_server(answer) as server:
        tool = SandboxFusionTool(server.url, rate_limit=1, enable_global_rate_limit=False)
        async with rows(tool, 12, per_call_timeout=per_call_s) as step:
            results = await step()
    assert [(result.status, result.text) for result in results] == [(Status.OK, "4")] * 12
    assert max(result.timing.queue_s for result in results) > per_call_s


async def test_program_timeout_equals_the_remaining_call_time():
    """Otherwise the service would have no time to report the timeout."""
    asked = []

    async def answer(path, data):
        asked.append(data["run_timeout"])
        return RAN

    async with scripted_server(answer) as server:
        for per_call, most in ((None, 30.0), (300.0, 30.0), (30.0, 28.0), (4.0, 3.4)):
            async with rows(interpreter(server.url), 1, per_call_timeout=per_call) as step:
                await step()
            assert max(0.0, most - limit(2)) < asked.pop() <= most


@pytest.mark.parametrize(("waited_s", "status"), [(0.0, Status.TIMEOUT), (0.5, Status.INFRA)])
async def test_program_with_a_shortened_timeout_gives_infra(waited_s, status):
    stopped = {"status": "TimeLimitExceeded", "return_code": None, "execution_time": 0.1}
    replies = [Reply(502), Reply(body={"status": "Failed", "message": "", "run_result": stopped})]
    patience = Patience(first_s=max(waited_s, 0.001), longest_s=max(waited_s, 0.001))
    async with (
        scripted_server(replies[0 if waited_s else 1 :]) as server,
        rows(interpreter(server.url, patience=patience), 1, per_call_timeout=1.0) as step,
    ):
        (result,) = await step()
    assert result.status is status


async def test_an_event_loop_that_stalls_over_the_deadline_does_not_put_the_blame_on_the_model():
    """The client gives up a little before the deadline of the call; both are over when the loop goes on."""
    async with (
        scripted_server([Reply(how="hang")]) as server,
        rows(interpreter(server.url), per_call_timeout=0.5) as step,
        asyncio.timeout(SOON_S),
    ):
        asyncio.get_running_loop().call_later(0.3, time.sleep, 0.4)
        results = await step()
    assert [result.status for result in results] == [Status.INFRA] * 16


class Down(Tool):
    """Fails for no fault of the model's."""

    name = "down"

    async def run(self, args, ctx):
        if ctx.trajectory == "t3":
            raise ToolError("yours")
        raise InfrastructureError("busy" if ctx.trajectory < "t2" else "gone")


async def test_infra_results_are_logged_once_per_tool_and_step(caplog):
    async with rows(Down(), 6) as step:
        await step(x=1)
    (line,) = warnings_of(caplog)
    assert line == (
        "tool down: 5 calls got INFRA: 3 x down is not available at the moment: gone; "
        "2 x down is not available at the moment: busy; first: (trajectory t0, turn 0, call c), "
        "(trajectory t1, turn 0, call c), (trajectory t2, turn 0, call c)"
    )


class Waits(Tool):
    """Waits in a line of its own, for an event; then forever."""

    name = "waits"

    def __init__(self, event):
        self.event, self.deadlines = event, []

    async def run(self, args, ctx):
        _, later = await ctx.queue(self.event.wait())
        self.deadlines += [ctx.deadline, later.deadline]
        await asyncio.Event().wait()


def test_waiting_in_a_queue_of_the_tool_is_not_run_time():
    async def main():
        event = asyncio.Event()
        tool = Waits(event)
        async with rows(tool, 1, per_call_timeout=5) as step:
            running = asyncio.create_task(step(x=1))
            await asyncio.sleep(15)
            assert not running.done()
            event.set()
            (result,) = await running
        return result, tool.deadlines

    result, (first, later) = run_skipping(main())
    assert result.status is Status.TIMEOUT
    assert later - first == pytest.approx(15)
    assert (result.timing.queue_s, result.timing.run_s) == (pytest.approx(15), pytest.approx(5))


def test_end_of_the_turn_ends_waiting_in_a_queue():
    async def main():
        async with rows(Waits(asyncio.Event()), 1, per_call_timeout=1, per_turn_timeout=5) as step:
            (result,) = await step(x=1)
        return result

    result = run_skipping(main())
    assert result.status is Status.TIMEOUT
    assert result.timing.queue_s == pytest.approx(5)
