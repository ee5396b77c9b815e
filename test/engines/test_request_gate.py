"""`RequestGate`: requests wait for updates and end when the engine is closed."""

import asyncio

import pytest

from torchrl_agentic.engines.request_gate import RequestGate, RequestInterrupted
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import run_skipping


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def running(gate, log, name, end):
    async with gate.request():
        log.append(f"begin {name}")
        await end.wait()
        log.append(f"end {name}")


async def test_requests_begin_before_or_after_an_update_and_updates_one_after_the_other():
    gate, log, end = RequestGate(), [], asyncio.Event()
    end.set()

    async def update(name, go_on):
        async with gate.closed_for_update():
            log.append(f"begin {name}")
            await go_on.wait()
            log.append(f"end {name}")

    first, second = asyncio.Event(), asyncio.Event()
    updates = [asyncio.create_task(update(1, first)), asyncio.create_task(update(2, second))]
    await settle()
    request = asyncio.create_task(running(gate, log, "a", end))
    await settle()
    assert log == ["begin 1"]
    first.set()
    await settle()
    second.set()
    await asyncio.gather(request, *updates)
    pairs = [log[place : place + 2] for place in range(0, len(log), 2)]
    assert sorted(pairs) == [[f"begin {name}", f"end {name}"] for name in ("1", "2", "a")]


async def test_drained_waits_for_all_requests_within_its_patience():
    gate, log, end = RequestGate(), [], asyncio.Event()
    tasks = [asyncio.create_task(running(gate, log, name, end)) for name in "ab"]
    await settle()
    assert not await gate.drained(0.01)
    end.set()
    assert await gate.drained()
    await asyncio.gather(*tasks)


async def test_interrupt_ends_what_runs_and_nothing_else():
    gate, log, end = RequestGate(), [], asyncio.Event()
    task = asyncio.create_task(running(gate, log, "a", end))
    await settle()
    await gate.interrupt()
    with pytest.raises(RequestInterrupted):
        await task
    end.set()
    await running(gate, log, "b", end)
    assert log == ["begin a", "begin b", "end b"]


async def test_close_ends_what_runs_and_what_waits_but_completes_updates():
    gate, log, end, go_on = RequestGate(), [], asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(running(gate, log, "a", end))
    await settle()

    async def update():
        async with gate.closed_for_update():
            await go_on.wait()
            log.append("updated")
        return 1

    update_task = asyncio.create_task(gate.complete(update()))
    await settle()
    second = asyncio.create_task(running(gate, log, "b", end))
    await settle()
    closing = asyncio.create_task(gate.close())
    for task in (first, second):
        with pytest.raises(InfrastructureError, match="closed"):
            await task
    assert not closing.done()
    go_on.set()
    await closing
    await gate.close()
    assert await update_task == 1
    assert log == ["begin a", "updated"]
    with pytest.raises(InfrastructureError, match="closed"):
        await running(gate, log, "c", end)


async def test_a_cancelled_caller_leaves_its_update_running():
    gate, go_on, log = RequestGate(), asyncio.Event(), []

    async def update():
        await go_on.wait()
        log.append("updated")
        return 1

    caller = asyncio.create_task(gate.complete(update()))
    await settle()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    await settle()
    assert log == ["updated"]


async def test_a_timeout_of_the_request_itself_passes_through():
    gate = RequestGate()
    with pytest.raises(TimeoutError):
        async with gate.request():
            raise TimeoutError
    assert await gate.drained()


async def test_a_cancelled_request_no_longer_counts():
    gate, log, end = RequestGate(), [], asyncio.Event()
    task = asyncio.create_task(running(gate, log, "a", end))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gate.drained(0)


@pytest.mark.parametrize(("ends", "is_settled", "after"), [((2, 4, 6, 7), True, 7), ((2, 4), False, 9)])
def test_it_settles_for_as_long_as_requests_end(ends, is_settled, after):
    """Four requests, of which some end at these times; a window of 3 s without an end is too long."""

    async def main():
        gate, loop = RequestGate(), asyncio.get_running_loop()

        async def request(end):
            async with gate.request():
                await asyncio.sleep(end)

        tasks = [asyncio.create_task(request(end)) for end in (*ends, *[1000] * (4 - len(ends)))]
        await settle()
        assert await gate.settled(3) is is_settled
        assert loop.time() == pytest.approx(after)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_skipping(main())
