"""The processes that trajectories are forked from: killed, worn, lost, and none left behind."""

import asyncio
import gc
import os
import signal
import socket
import time

import pytest
from helpers.limit import limit
from helpers.processes import children, command, family

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.repl import ForkServerRepl
from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits, SandboxError, zygote_pool
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.sandbox.zygote_pool import ZygotePool

pytestmark = pytest.mark.skipif(cannot_work() is not None, reason=f"no fork server here: {cannot_work()}")
_numbers = iter(range(1000))


def of_its_own() -> ForkServerSandbox:
    """Return a sandbox of a kind that no other test uses, so that it has zygotes of its own."""
    return ForkServerSandbox(ResourceLimits(disk_total_bytes=(16 << 20) + 4096 * next(_numbers)))


def newest_pool() -> ZygotePool:
    """Return the pool of the kind that was opened last."""
    return [*zygote_pool._pools.values()][-1]


async def up(sandbox: ForkServerSandbox) -> None:
    async with asyncio.timeout(limit(20)):
        assert (await sandbox.run(["echo", "up"])).stdout == "up\n"


async def test_killed_zygote_gives_infra() -> None:
    first = of_its_own()
    repls = [ForkServerRepl(first.fresh()) for _ in range(20)]
    await asyncio.gather(*(repl.open() for repl in repls))
    tasks = [asyncio.create_task(repl.execute("import time; time.sleep(1000)")) for repl in repls]
    await asyncio.sleep(0.2)
    for zygote in newest_pool()._zygotes:
        zygote._process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(limit(10)):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, InfrastructureError) for error in found)
    await asyncio.gather(*(repl.close() for repl in repls))


async def test_a_killed_zygote_is_replaced_at_once() -> None:
    async with of_its_own() as first:
        pool = newest_pool()
        while len(pool._spares) < 4:
            await asyncio.sleep(0.01)
        for zygote in [*pool._zygotes]:
            zygote._process.send_signal(signal.SIGKILL)
            zygote._process.wait()
        async with first.fresh() as second:
            await up(second)


def _has_started(connection: socket.socket) -> bool:
    """Return whether the supervisor behind a connection has answered or ended: no more processes start."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionResetError:  # of a pool whose zygote another test has killed
        pass
    return True


async def _settled(pool: ZygotePool) -> int:
    """Return the number of trajectories in use by the books of an idle pool, whose spares have started."""
    for _ in range(1000):
        await asyncio.sleep(0.02)
        if len(pool._spares) >= 4 and all(_has_started(spare.connection) for spare in list(pool._spares)):
            break
    await asyncio.sleep(0.05)
    return sum(zygote.live for zygote in pool._zygotes) - len(pool._spares)


async def test_two_hundred_sandboxes_open_at_once_and_all_are_closed() -> None:
    async with of_its_own() as first:
        sandboxes = [first.fresh() for _ in range(200)]
        await asyncio.gather(*(sandbox.open() for sandbox in sandboxes))
        await asyncio.gather(*(sandbox.write_file("f", b"x") for sandbox in sandboxes))
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        assert await _settled(newest_pool()) == 1


async def test_a_hundred_cycles_leave_no_file_and_no_process() -> None:
    async with of_its_own() as first:
        await asyncio.gather(*map(_settled, zygote_pool._pools.values()))  # those of other tests, too
        gc.collect()
        files, processes = len(os.listdir("/proc/self/fd")), in_sandboxes()
        for _ in range(100):
            async with ForkServerRepl(first.fresh()) as repl:
                await repl.execute("import subprocess; subprocess.Popen(['sleep', '100']); 0")
                await repl.sandbox.run(["true"])
        for _ in range(10):
            async with ForkServerRepl(first.fresh()) as repl, (await repl.fork(1))[0] as clone:
                await clone.execute("1")
        assert await _settled(newest_pool()) == 1
        until = time.monotonic() + limit(20)
        while in_sandboxes() > processes and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert in_sandboxes() <= processes
        assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of sockets that were left
async def test_cancelled_openings_leave_nothing() -> None:
    async with of_its_own() as first:
        for number in range(20):
            sandboxes = [first.fresh() for _ in range(12)]  # more than stand ready
            tasks = [asyncio.create_task(sandbox.open()) for sandbox in sandboxes]
            await asyncio.sleep(number % 10 * 0.001)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        async with first.fresh():
            pass
        gc.collect()
        assert await _settled(newest_pool()) == 1


async def test_closed_pools_are_recreated() -> None:
    first = of_its_own()
    await first.open()
    pool = newest_pool()
    (process,) = [zygote._process for zygote in pool._zygotes]
    pool.close()
    assert process.poll() is not None
    async with asyncio.timeout(limit(5)):
        with pytest.raises(SandboxError):  # noqa: PT012
            while True:  # its processes end a moment after bubblewrap
                await first.write_file("f", b"x")
    await first.close()
    async with first.fresh() as second:
        await up(second)


def in_sandboxes() -> int:
    """Return the number of processes in the sandboxes of this process, fork servers included.

    Only descendants of its children "bwrap" count, since other tests leave processes of Ray, for example.
    """
    return sum(len(family(child)) for child in children(os.getpid()) if command(child) == "bwrap")


async def test_spares_that_have_ended_are_given_back():
    async with of_its_own() as first:
        pool = newest_pool()
        await _settled(pool)
        for spare in list(pool._spares):
            spare.connection.shutdown(socket.SHUT_RDWR)
        async with first.fresh():
            assert await _settled(pool) == 2
        assert await _settled(pool) == 1


async def test_a_worn_zygote_is_replaced(monkeypatch):
    monkeypatch.setattr(zygote_pool, "RECYCLED_AFTER", 1)
    async with of_its_own():
        pool = newest_pool()
        first, second = await pool.acquire(), await pool.acquire()
        assert first.zygote is not second.zygote
        pool.release(first, second)
