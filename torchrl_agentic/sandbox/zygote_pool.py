"""`ZygotePool`: the processes that trajectories are forked from, up to 128 from each."""

from __future__ import annotations

import asyncio
import atexit
import collections
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.bootstrap import BOOT, start_message
from torchrl_agentic.sandbox.cancellation import run_in_thread
from torchrl_agentic.sandbox.cgroups import MemoryGroup, MemoryGroups
from torchrl_agentic.sandbox.inside.wire import pack
from torchrl_agentic.sandbox.inside.zygote import READY
from torchrl_agentic.sandbox.process import as_nobody

TRAJECTORIES = 128
"""Maximum number of live trajectories of a zygote; they are lost with it."""
RECYCLED_AFTER = 8192
"""Number of trajectories after which a zygote is replaced."""
SPARES = 4
"""Number of trajectories that are forked in advance."""
START_S = 60.0
ROOM_S = 60.0
"""Maximum seconds that `acquire` waits for free memory."""
RESERVE = 512 << 20
"""Bytes of memory that stay free: below this, no trajectory is started."""

_spawner = ThreadPoolExecutor(1, thread_name_prefix="torchrl_agentic-zygotes")
"""Starts all zygotes. The thread must not end, because the kernel would end its zygotes with it."""


@dataclass(frozen=True, slots=True)
class ZygoteSpec:
    """Settings that the trajectories of a zygote have in common.

    Attributes:
        command: Command of the outer sandbox, up to the program that it runs.
        python: Path of the interpreter inside.
        env: Environment of the zygote.
        settings: See `inside.supervisor`.
        program: Seccomp filter of code; see `inside.supervisor`.
        memory_bytes: Maximum memory of each trajectory, by a control group; None for no control groups.
    """

    command: tuple[str, ...]
    python: str
    env: Mapping[str, str]
    settings: Mapping[str, Any]
    program: bytes
    memory_bytes: int | None = None

    @property
    def key(self) -> str:
        """Return a text that is equal for equal specs."""
        parts = (
            self.command,
            self.python,
            dict(self.env),
            dict(self.settings),
            self.program.hex(),
            self.memory_bytes,
        )
        return json.dumps(parts, sort_keys=True)


@dataclass(frozen=True, slots=True)
class ForkedTrajectory:
    """The host's part of a trajectory.

    Attributes:
        zygote: The zygote that it was forked from.
        connection: Socket to its supervisor.
        group: Control group that limits its memory, or None.
    """

    zygote: Zygote
    connection: socket.socket
    group: MemoryGroup | None


class Zygote:
    """A process that forks trajectories. Create it on the thread of `_spawner`; it starts at construction.

    Args:
        spec: What its trajectories have in common.

    Raises:
        SandboxError: If it cannot start.
    """

    def __init__(self, spec: ZygoteSpec) -> None:
        self.live = 0
        self.made = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, start = socket.socketpair()
        self._errors, errors_end = os.pipe()
        os.set_blocking(self._errors, False)
        os.set_blocking(errors_end, False)  # it is read only after a failure, so writers must not block
        prefix, identity = as_nobody()
        command = (*prefix, *spec.command, spec.python, "-s", "-B", "-c", BOOT)
        popen: Any = subprocess.Popen  # its overloads do not accept `user=` from a dict
        try:
            self._process: subprocess.Popen[bytes] = popen(
                command, env=dict(spec.env), stdin=stdin, stdout=subprocess.DEVNULL, stderr=errors_end,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                **identity,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"bubblewrap cannot be started: {error}") from error
        finally:
            stdin.close()
            os.close(errors_end)
            fd = theirs.fileno()
            theirs.close()
        try:
            start.sendall(start_message("zygote", "main", spec.settings, spec.program, fd))
            self._control.settimeout(START_S)
            if self._control.recv(len(READY)) != READY:
                raise OSError
        except OSError:
            raise SandboxError(f"the fork server did not start: {self.close()}") from None
        finally:
            start.close()
        self._control.setblocking(False)

    @property
    def has_room(self) -> bool:
        """Return whether it should fork another trajectory now."""
        return self.live < TRAJECTORIES and not self.is_worn

    @property
    def is_worn(self) -> bool:
        """Return whether it should fork no more trajectories."""
        return self.made >= RECYCLED_AFTER

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    async def has_ended(self, within_s: float) -> bool:
        """Return whether the process has ended, or ends within `within_s`.

        Args:
            within_s: Maximum seconds to wait.
        """
        try:
            await run_in_thread(self._process.wait, within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def spawn(self, trajectory: ForkedTrajectory, fds: Sequence[int]) -> None:
        """Fork a trajectory and request its supervisor to start.

        Args:
            trajectory: The trajectory.
            fds: Descriptors for its supervisor, from `ZygotePool.prepare`.

        Raises:
            OSError: If the zygote has died, or its queue of requests is full.
        """
        socket.send_fds(self._control, [b"."], list(fds))
        trajectory.connection.sendall(pack(b'{"op": "start", "id": 0}'))
        self.made += 1

    def close(self) -> str:
        """End the process and all its trajectories. Return what it wrote to stderr, or its exit code."""
        self._control.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._errors, 1 << 16)
        os.close(self._errors)
        return said.decode("utf-8", "replace").strip()[-2000:] or f"exit code {self._process.returncode}"


class ZygotePool:
    """The zygotes of one spec, and spare trajectories. For any thread and event loop.

    Args:
        spec: What the trajectories have in common.
    """

    def __init__(self, spec: ZygoteSpec) -> None:
        self._spec = spec
        self._zygotes: list[Zygote] = []
        self._spares: collections.deque[ForkedTrajectory] = collections.deque()
        self._groups = None if spec.memory_bytes is None else MemoryGroups(spec.memory_bytes)
        self._lock = threading.Lock()

    async def acquire(self) -> ForkedTrajectory:
        """Return a new trajectory.

        Raises:
            SandboxError: If a zygote cannot start, or memory was short for `ROOM_S`.
        """
        until = time.monotonic() + ROOM_S
        while (available := available_memory()) < RESERVE:
            if time.monotonic() > until:
                raise SandboxError(
                    f"no memory for another interpreter: {available >> 20} MiB are available, and "
                    f"{RESERVE >> 20} MiB must stay free"
                )
            await asyncio.sleep(0.05)
        while (spare := self._next_spare()) is not None:
            if spare.zygote.is_alive and _is_connected(spare.connection):
                return spare
            self.release(spare)
        spawned = _spawner.submit(self._spawn)
        try:
            return await asyncio.wrap_future(spawned)
        except asyncio.CancelledError:
            spawned.add_done_callback(self._take_back)
            raise

    def _next_spare(self) -> ForkedTrajectory | None:
        with self._lock:
            return self._spares.popleft() if self._spares else None

    def probe(self) -> str | None:
        """Fork a trajectory and wait for its first answer. Return why that fails, or None."""
        try:
            spare = _spawner.submit(self._spawn).result()
            spare.connection.settimeout(START_S)
            if not spare.connection.recv(1, socket.MSG_PEEK):
                self.release(spare)
                return f"a trajectory cannot be set up: {spare.zygote.close()}"
            with self._lock:
                self._spares.append(spare)
        except (SandboxError, OSError) as error:
            return str(error)
        return None

    def prepare(
        self, zygote: Zygote, n: int, handed: contextlib.ExitStack
    ) -> tuple[list[ForkedTrajectory], list[int]]:
        """Create what `n` trajectories of a zygote need on the host: connections and control groups.

        Args:
            zygote: The zygote.
            n: Number of trajectories.
            handed: Closes the files for the new processes.

        Returns:
            The trajectories, and the descriptors for the processes that fork them: for each trajectory its
                end of the
            connection and, with a control group, the two files of `MemoryGroup.opened`.

        Raises:
            OSError: If there are too many open files, or a control group cannot be created.
        """
        made: list[ForkedTrajectory] = []
        fds: list[int] = []
        with contextlib.ExitStack() as on_error:
            on_error.callback(lambda: self.release(*made))
            for _ in range(n):
                ours, theirs = socket.socketpair()
                handed.enter_context(theirs)
                with contextlib.ExitStack() as alone:
                    alone.enter_context(ours)
                    group = None if self._groups is None else self._groups.take()
                    alone.pop_all()
                made.append(ForkedTrajectory(zygote, ours, group))
                with self._lock:
                    zygote.live += 1
                fds.append(theirs.fileno())
                if group is not None:
                    fds += handed.enter_context(group.opened())
            on_error.pop_all()
        return made, fds

    def release(self, *trajectories: ForkedTrajectory) -> None:
        """Release what trajectories that have ended used on the host.

        Args:
            trajectories: The trajectories.
        """
        for trajectory in trajectories:
            trajectory.connection.close()
            if trajectory.group is not None and self._groups is not None:
                self._groups.give_back(trajectory.group)
            with self._lock:
                trajectory.zygote.live -= 1
            if trajectory.zygote.is_worn:
                self._submit(self._retire, trajectory.zygote)

    def refill(self) -> None:
        """Fork spare trajectories in the background, after those that callers wait for."""
        if len(self._spares) < SPARES:
            self._submit(self._refill)

    def close(self) -> None:
        """End all zygotes and their trajectories."""
        with self._lock:
            zygotes, self._zygotes = self._zygotes, []
            spares = [*self._spares]
            self._spares.clear()
        self.release(*spares)
        for zygote in zygotes:
            zygote.close()
        if self._groups is not None:
            self._groups.close()

    def _take_back(self, spawned: Future[ForkedTrajectory]) -> None:
        """Keep a trajectory as a spare if its caller was cancelled."""
        if not spawned.cancelled() and spawned.exception() is None:
            self._spares.append(spawned.result())

    def _submit(self, work: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            _spawner.submit(work, *args)

    def _spawn(self) -> ForkedTrajectory:
        """Fork a trajectory from a zygote with room, or from a new zygote."""
        while True:
            with self._lock:
                dead = [zygote for zygote in self._zygotes if not zygote.is_alive]
                zygote = next((z for z in self._zygotes if z.has_room and z not in dead), None)
            for one in dead:
                self._discard(one)
            if zygote is None:
                zygote = Zygote(self._spec)
                with self._lock:
                    self._zygotes.append(zygote)
            with contextlib.ExitStack() as handed:
                try:
                    (trajectory,), fds = self.prepare(zygote, 1, handed)
                except OSError as error:
                    raise SandboxError(f"a trajectory cannot be set up: {error}") from error
                try:
                    zygote.spawn(trajectory, fds)
                    return trajectory
                except BlockingIOError:
                    self.release(trajectory)
                    time.sleep(0.005)
                except OSError:
                    self.release(trajectory)
                    self._discard(zygote)

    def _refill(self) -> None:
        while len(self._spares) < SPARES:
            self._spares.append(self._spawn())

    def _retire(self, zygote: Zygote) -> None:
        if zygote.live == 0 and zygote in self._zygotes:
            self._discard(zygote)

    def _discard(self, zygote: Zygote) -> None:
        with self._lock:
            self._zygotes.remove(zygote)
            lost = [spare for spare in self._spares if spare.zygote is zygote]
            for spare in lost:
                self._spares.remove(spare)
        self.release(*lost)
        zygote.close()


def _is_connected(connection: socket.socket) -> bool:
    """Return whether the other side of a socket still has it open."""
    poll = select.poll()
    poll.register(connection, 0)
    return not poll.poll(0)


def _begin_anew() -> None:
    """Drop, in a forked child, what belongs to the parent process."""
    global _spawner, _pools_lock
    _spawner = ThreadPoolExecutor(1, thread_name_prefix="torchrl_agentic-zygotes")
    _pools_lock = threading.Lock()
    _pools.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_begin_anew)
_pools: dict[str, ZygotePool] = {}
_pools_lock = threading.Lock()


def shared_pool(spec: ZygoteSpec) -> ZygotePool:
    """Return the pool of this process for a spec; a forked process has its own."""
    with _pools_lock:
        return _pools.setdefault(spec.key, ZygotePool(spec))


@atexit.register
def close_pools() -> None:
    """End all zygotes of this process."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


def available_memory() -> int:
    """Return the bytes of memory that are available, according to the machine and to the container."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
                break
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            found.append(_number(limit) - _number(used))
    return min(found, default=1 << 62)


def _number(name: str) -> int:
    with open("/sys/fs/cgroup/" + name, "rb") as file:
        return int(file.read())
