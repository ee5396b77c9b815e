"""Processes that name the same limiter share its limits, even if some of them die."""

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.limiter_process import count_calls, most_at_once
from helpers.processes import started

from torchrl_agentic import InfrastructureError
from torchrl_agentic.limits import ClusterRateLimiter, LimitsDiffer
from torchrl_agentic.limits.lease_server import Lease, LeaseRequest, LeaseServer

PROCESS = Path(__file__).parents[1] / "helpers" / "limiter_process.py"
TTL = 0.5
"""For tests that end a lease in this process, however late."""
BUSY_TTL = limit(1)
"""For tests that wait for the end of a lease: a process that gets no core for half of it loses its own."""
LONG_TTL = limit(20)
"""For tests in which no lease ends."""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(tmp_path))


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def _start(
    name: str, most: int, log: Path, seconds: float | str, *, ttl: float = LONG_TTL, least: int = 0
) -> AbstractContextManager[subprocess.Popen[str]]:
    settings = map(str, (name, most, log, seconds, "machine", ttl, least))
    return started([sys.executable, str(PROCESS), *settings], stdout=subprocess.PIPE, text=True)


def test_processes_share_a_limit_and_none_starves(name: str, tmp_path: Path):
    logs = [tmp_path / str(number) for number in range(3)]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_start(name, 4, log, 1.5, least=21)) for log in logs]
        assert [process.wait(limit(60)) for process in processes] == [0, 0, 0]
    assert most_at_once(logs) <= 4
    assert min(map(count_calls, logs)) > 20


def test_limit_holds_after_the_server_process_is_killed(name: str, tmp_path: Path):
    logs = [tmp_path / str(number) for number in range(3)]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_start(name, 2, logs[0], "hold", ttl=2 * BUSY_TTL))
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        others = [
            stack.enter_context(_start(name, 2, log, 4, ttl=2 * BUSY_TTL, least=50)) for log in logs[1:]
        ]
        time.sleep(1)
        first.kill()
        assert [process.wait(limit(60)) for process in others] == [0, 0]
    assert most_at_once(logs[1:]) <= 2
    assert min(map(count_calls, logs[1:])) > 0


async def test_slots_of_a_killed_process_are_returned(name: str, tmp_path: Path):
    limiter = ClusterRateLimiter(name, max_concurrent=3, ttl=BUSY_TTL, over="machine")
    with _start(name, 3, tmp_path / "log", "hold", ttl=BUSY_TTL) as holder:
        assert holder.stdout is not None
        await asyncio.to_thread(holder.stdout.readline)
        waiting = asyncio.create_task(limiter.wait())
        done, _ = await asyncio.wait([waiting], timeout=1.5 * BUSY_TTL)
        assert not done
        holder.kill()
        await asyncio.wait_for(waiting, limit(10))
        limiter.release()


async def test_limits_of_other_names_are_others(name: str):
    one = ClusterRateLimiter(name, max_concurrent=1, ttl=LONG_TTL, over="machine")
    other = ClusterRateLimiter(name + "2", max_concurrent=1, ttl=LONG_TTL, over="machine")
    async with one.slot(), other.slot():
        assert one.stats().in_flight == other.stats().in_flight == 1


async def test_a_pickled_limiter_shares_the_limits(name: str):
    one = ClusterRateLimiter(name, max_concurrent=1, ttl=BUSY_TTL, over="machine")
    other = pickle.loads(pickle.dumps(one))
    async with one.slot():
        waiting = asyncio.create_task(other.wait())
        done, _ = await asyncio.wait([waiting], timeout=0.5)
        assert not done
    await asyncio.wait_for(waiting, limit(10))
    other.release()


async def test_different_limits_for_a_used_name_are_rejected(name: str):
    one = ClusterRateLimiter(name, max_concurrent=2, ttl=LONG_TTL, over="machine")
    async with one.slot():
        with pytest.raises(LimitsDiffer, match="max_concurrent=2"):
            ClusterRateLimiter(name, max_concurrent=3, ttl=LONG_TTL, over="machine")


async def test_calls_need_no_report_each(name: str):
    limiter = ClusterRateLimiter(name, max_concurrent=2, ttl=LONG_TTL, over="machine")
    for _ in range(2000):
        async with limiter.slot():
            pass
    assert limiter.requests < 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process")
async def test_a_forked_child_has_a_lease_of_its_own(name: str):
    limiter = ClusterRateLimiter(name, max_concurrent=2, ttl=BUSY_TTL, over="machine")
    async with limiter.slot():
        program = f"""
import asyncio, os
from torchrl_agentic.limits import ClusterRateLimiter
limiter = ClusterRateLimiter({name!r}, max_concurrent=2, ttl={BUSY_TTL}, over="machine")
async def call():
    async with limiter.slot():
        print("ran", limiter.stats().in_flight, flush=True)
asyncio.run(call())
if not os.fork():
    asyncio.run(call())
    os._exit(0)
os.wait()
"""
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
        out, _ = await asyncio.wait_for(child.communicate(), limit(30))
    assert out == b"ran 1\nran 1\n"


class _Cut:
    """A `Transport` to a server here, whose line can be cut."""

    def __init__(self) -> None:
        self.server = LeaseServer(float("-inf"))
        self.is_cut = False

    def sync(self, request: LeaseRequest, timeout: float) -> Lease:
        if self.is_cut:
            raise ConnectionError("cut")
        return self.server.sync(request, time.monotonic())

    def close(self) -> None:
        pass


async def test_without_contact_calls_end_before_others_get_their_share(name: str):
    line = _Cut()
    limiter = ClusterRateLimiter(name, max_concurrent=2, ttl=TTL, over=line)
    began = asyncio.Event()

    async def call() -> None:
        async with limiter.slot():
            began.set()
            await asyncio.sleep(600)

    task = asyncio.create_task(call())
    await began.wait()
    line.is_cut = True
    with pytest.raises(InfrastructureError, match="lost"):
        await asyncio.wait_for(task, limit(10))
    waiting = asyncio.create_task(limiter.wait())
    done, _ = await asyncio.wait([waiting], timeout=TTL)
    assert not done  # nothing starts without contact
    line.is_cut = False
    await asyncio.wait_for(waiting, limit(10))
    limiter.release()


async def test_a_rate_is_kept_together(name: str):
    """The burst of 3 at once, then one each 50 ms over all clients."""
    one, other = (
        ClusterRateLimiter(name, rate_per_second=20, burst=3, ttl=LONG_TTL, over="machine") for _ in range(2)
    )
    starts: list[float] = []

    async def call(limiter: ClusterRateLimiter) -> None:
        async with limiter.slot():
            starts.append(time.monotonic())

    await asyncio.gather(*(call(limiter) for limiter in (one, other) for _ in range(8)))
    for first, start in enumerate(starts):
        for count, later in enumerate(starts[first:], 1):
            assert count <= 20 * (later - start + 0.3) + 3


async def test_overload_is_reported_to_all_clients(name: str):
    one, other = (ClusterRateLimiter(name, max_concurrent=8, ttl=LONG_TTL, over="machine") for _ in range(2))
    async with one.slot():
        one.record_overload(retry_after=0.2)
        while one.stats().overloads == 0:
            await asyncio.sleep(0.01)
    async with other.slot():
        assert other.stats().concurrent == 4


async def test_processes_share_a_limit_in_a_folder_whose_path_is_too_long_for_a_socket(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(folder))
    with _start(name, 1, tmp_path / "log", "hold") as holder:
        assert holder.stdout is not None
        await asyncio.to_thread(holder.stdout.readline)
        with pytest.raises(LimitsDiffer, match="max_concurrent=1"):
            ClusterRateLimiter(name, max_concurrent=2, ttl=LONG_TTL, over="machine")


def test_folder_too_long_for_a_socket_is_rejected_without_proc(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(folder))
    is_folder = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/proc/self/fd" and is_folder(path))
    with pytest.raises(OSError, match="set TORCHRL_AGENTIC_LIMITS to a shorter folder"):
        ClusterRateLimiter(name, max_concurrent=1, over="machine")


def test_a_folder_that_others_can_enter_is_refused(name: str, tmp_path: Path):
    (tmp_path / f"torchrl_agentic-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="this user alone"):
        ClusterRateLimiter(name, max_concurrent=1, over="machine")


@pytest.mark.parametrize("bad", [{"ttl": 0}, {"max_concurrent": 0}, {"over": "carrier pigeon"}])
def test_invalid_options_are_rejected(name: str, bad: dict):
    with pytest.raises(ValueError, match=next(iter(bad)) if "over" not in bad else "pigeon"):
        ClusterRateLimiter(name, **bad)


def test_a_limiter_needs_a_name():
    with pytest.raises(ValueError, match="name"):
        ClusterRateLimiter("", max_concurrent=1)


async def test_a_transport_that_breaks_is_tried_again(name: str, caplog: pytest.LogCaptureFixture):
    class Broken(_Cut):
        failures = 0

        def sync(self, request: LeaseRequest, timeout: float) -> Lease:
            if request.wanted and self.failures < 2:
                self.failures += 1
                raise KeyError("a bug")
            return super().sync(request, timeout)

    limiter = ClusterRateLimiter(name, max_concurrent=2, ttl=TTL, over=Broken())
    await asyncio.wait_for(limiter.wait(), limit(10))
    limiter.release()
    assert "could not report" in caplog.text


async def test_unreadable_report_ends_only_its_connection(name: str, monkeypatch: pytest.MonkeyPatch):
    """An unreadable report ends only its connection."""
    limiter = ClusterRateLimiter(name, max_concurrent=2, ttl=LONG_TTL, over="machine")
    async with limiter.slot():
        (path,) = Path(os.environ["TORCHRL_AGENTIC_LIMITS"], f"torchrl_agentic-{os.getuid()}").glob("*[!k]")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(limit(5))
            monkeypatch.chdir(path.parent)  # its path may be too long for a socket
            stranger.connect(path.name)
            stranger.sendall(b'{"hello": 1}\n')
            assert stranger.recv(100) == b""
        for _ in range(3):
            async with limiter.slot():
                await asyncio.sleep(0.1)


async def test_stalled_client_gives_up_slots_that_were_reassigned(name: str):
    """The thread that reports sleeps for longer than the lease lasts, and then gets an answer."""

    class Still(_Cut):
        naps = 0

        def sync(self, request: LeaseRequest, timeout: float) -> Lease:
            if request.in_use and not self.naps:
                self.naps += 1
                time.sleep(2 * TTL)
            return super().sync(request, timeout)

    limiter = ClusterRateLimiter(name, max_concurrent=2, ttl=TTL, over=Still())

    async def call() -> None:
        async with limiter.slot():
            await asyncio.sleep(600)

    with pytest.raises(InfrastructureError, match="lost"):
        await asyncio.wait_for(call(), limit(10))


async def test_call_that_returned_its_slot_is_not_cancelled(name: str):
    line = _Cut()
    limiter = ClusterRateLimiter(name, max_concurrent=2, ttl=TTL, over=line)
    async with limiter.slot():
        line.is_cut = True
        time.sleep(2 * TTL)  # the loop is busy while contact is lost
    await asyncio.sleep(0.05)


async def test_pickled_limiter_keeps_its_transport(name: str):
    limiter = ClusterRateLimiter(name, max_concurrent=1, ttl=TTL)
    assert limiter.__reduce__()[0].keywords["over"] == "machine"


async def test_incomplete_answer_is_ignored(name: str, monkeypatch: pytest.MonkeyPatch):
    """Its server ended while it wrote; the next one answers."""
    limiter = ClusterRateLimiter(name, max_concurrent=1, ttl=TTL, over="machine")
    (path,) = Path(os.environ["TORCHRL_AGENTIC_LIMITS"], f"torchrl_agentic-{os.getuid()}").glob("*[!k]")
    there = path.with_name("there")
    path.rename(there)
    with socket.socket(socket.AF_UNIX) as half:
        monkeypatch.chdir(path.parent)  # its path may be too long for a socket
        half.bind(path.name)
        half.listen()
        limiter._transport.close()
        waiting = asyncio.create_task(limiter.wait())

        def answer() -> None:
            connection, _ = half.accept()
            connection.recv(10_000)
            connection.sendall(b'{"held": 1')
            connection.close()

        await asyncio.to_thread(answer)
        there.rename(path)
        await asyncio.wait_for(waiting, limit(10))
    limiter.release()
