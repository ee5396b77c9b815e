"""The processes that trajectories are forked from, one per 128 of them, shared by all sandboxes of a kind."""

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
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.bootstrap import BOOT, start_message
from torchrl_agentic.sandbox.cancellation import off_loop
from torchrl_agentic.sandbox.cgroups import MemoryGroup, MemoryGroups
from torchrl_agentic.sandbox.inside.wire import pack
from torchrl_agentic.sandbox.inside.zygote import READY
from torchrl_agentic.sandbox.process import as_nobody

TRAJECTORIES = 128
"""How many trajectories live in one zygote at most: they are lost with it."""
RECYCLED_AFTER = 8192
"""After how many trajectories a zygote is replaced by a new one."""
SPARES = 4
"""How many trajectories stand ready, for whoever comes next."""
START_S = 60.0
ROOM_S = 60.0
"""How long opening waits for memory, or for another trajectory to end."""
RESERVE = 512 << 20
"""How many bytes of memory are left to others: below this, no trajectory is admitted."""

_spawner = ThreadPoolExecutor(1, thread_name_prefix="torchrl_agentic-zygotes")
"""Starts all zygotes: the kernel ends them with the thread that started them, so it must not end before."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the trajectories of a zygote have in common.

    command: of the outer sandbox, up to the program in it. settings, program: see `inside.supervisor`.
    memory_bytes: how much each may take, by a control group; None for none.
    """

    command: tuple[str, ...]
    python: str
    env: Mapping[str, str]
    settings: Mapping[str, Any]
    program: bytes
    memory_bytes: int | None = None

    @property
    def key(self) -> str:
        """Tell it from other kinds."""
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
class Trajectory:
    """What there is of a trajectory outside. connection: with its supervisor. group: bounds its memory."""

    zygote: Zygote
    connection: socket.socket
    group: MemoryGroup | None


class Zygote:
    """A process that forks trajectories. Starts at construction, on the thread of `_spawner`.

    Raises:
        SandboxError: it cannot start.
    """

    def __init__(self, kind: Kind) -> None:
        self.live = 0
        self.made = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, start = socket.socketpair()
        self._errors, errors_end = os.pipe()
        os.set_blocking(self._errors, False)
        os.set_blocking(
            errors_end, False
        )  # nobody reads unless something fails, and nobody shall wait for us
        prefix, identity = as_nobody()
        command = (*prefix, *kind.command, kind.python, "-s", "-B", "-c", BOOT)
        popen: Any = subprocess.Popen  # its overloads know nothing of `user=` in a dict
        try:
            self._process: subprocess.Popen[bytes] = popen(
                command, env=dict(kind.env), stdin=stdin, stdout=subprocess.DEVNULL, stderr=errors_end,
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
            start.sendall(start_message("zygote", "main", kind.settings, kind.program, fd))
            self._control.settimeout(START_S)
            if self._control.recv(len(READY)) != READY:
                raise OSError
        except OSError:
            raise SandboxError(f"the fork server does not start: {self.close()}") from None
        finally:
            start.close()
        self._control.setblocking(False)

    @property
    def has_room(self) -> bool:
        """Whether it should make another trajectory."""
        return self.live < TRAJECTORIES and not self.is_worn

    @property
    def is_worn(self) -> bool:
        """Whether it should make no more trajectories."""
        return self.made >= RECYCLED_AFTER

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    async def has_ended(self, within_s: float) -> bool:
        """Return whether it ends within so many seconds, or has."""
        try:
            await off_loop(self._process.wait, within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def spawn(self, trajectory: Trajectory, fds: Sequence[int]) -> None:
        """Fork a trajectory, whose supervisor is told to start; fds: see `Pool.prepare`.

        Raises:
            OSError: the zygote has died, or has more to do than it can be told.
        """
        socket.send_fds(self._control, [b"."], list(fds))
        trajectory.connection.sendall(pack(b'{"op": "start", "id": 0}'))
        self.made += 1

    def close(self) -> str:
        """End it and all its trajectories; give what it had to say about an error."""
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


class Pool:
    """The zygotes of one kind, and trajectories that stand ready. For any thread and event loop."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._zygotes: list[Zygote] = []
        self._spares: collections.deque[Trajectory] = collections.deque()
        self._groups = None if kind.memory_bytes is None else MemoryGroups(kind.memory_bytes)
        self._lock = threading.Lock()

    async def acquire(self) -> Trajectory:
        """Give a new trajectory.

        Raises:
            SandboxError: a zygote cannot start, or there was no memory for a trajectory for too long.
        """
        until = time.monotonic() + ROOM_S
        while (available := available_memory()) < RESERVE:
            if time.monotonic() > until:
                raise SandboxError(
                    f"no memory for another interpreter: {available >> 20} MiB are available, of which "
                    f"{RESERVE >> 20} are left to others"
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

    def _next_spare(self) -> Trajectory | None:
        with self._lock:
            return self._spares.popleft() if self._spares else None

    def try_out(self) -> str | None:
        """Fork a trajectory and hear from it; say why that fails, if it does."""
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
    ) -> tuple[list[Trajectory], list[int]]:
        """Make what `n` trajectories of a zygote need outside: connections, and control groups.

        Returns:
            The trajectories, and the files to hand to those who fork them: for each its end of the connection
            and, with a group, the two files of `MemoryGroup.opened`. `handed` closes them.

        Raises:
            OSError: If there are too many open files, or no group can be made.
        """
        made: list[Trajectory] = []
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
                made.append(Trajectory(zygote, ours, group))
                with self._lock:
                    zygote.live += 1
                fds.append(theirs.fileno())
                if group is not None:
                    fds += handed.enter_context(group.opened())
            on_error.pop_all()
        return made, fds

    def release(self, *trajectories: Trajectory) -> None:
        """Take note that trajectories have ended."""
        for trajectory in trajectories:
            trajectory.connection.close()
            if trajectory.group is not None and self._groups is not None:
                self._groups.give_back(trajectory.group)
            with self._lock:
                trajectory.zygote.live -= 1
            if trajectory.zygote.is_worn:
                self._submit(self._retire, trajectory.zygote)

    def refill(self) -> None:
        """Let trajectories stand ready again, when whoever was waiting has been served."""
        if len(self._spares) < SPARES:
            self._submit(self._refill)

    def close(self) -> None:
        """End all zygotes, and the trajectories in them."""
        with self._lock:
            zygotes, self._zygotes = self._zygotes, []
            spares = [*self._spares]
            self._spares.clear()
        self.release(*spares)
        for zygote in zygotes:
            zygote.close()
        if self._groups is not None:
            self._groups.close()

    def _take_back(self, spawned: Future[Trajectory]) -> None:
        """Keep a trajectory for others that nobody waits for any more."""
        if not spawned.cancelled() and spawned.exception() is None:
            self._spares.append(spawned.result())

    def _submit(self, work: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the program is ending
            _spawner.submit(work, *args)

    def _spawn(self) -> Trajectory:
        """Fork a trajectory from a zygote with room, a new one if need be."""
        while True:
            with self._lock:
                dead = [zygote for zygote in self._zygotes if not zygote.is_alive]
                zygote = next((z for z in self._zygotes if z.has_room and z not in dead), None)
            for one in dead:
                self._discard(one)
            if zygote is None:
                zygote = Zygote(self._kind)
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
    """Return whether the other side of a socket has not hung up."""
    poll = select.poll()
    poll.register(connection, 0)
    return not poll.poll(0)


def _begin_anew() -> None:
    """Leave behind what belongs to the process that we were forked from."""
    global _spawner, _pools_lock
    _spawner = ThreadPoolExecutor(1, thread_name_prefix="torchrl_agentic-zygotes")
    _pools_lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_begin_anew)
_pools: dict[str, Pool] = {}
_pools_lock = threading.Lock()


def pool_of(kind: Kind) -> Pool:
    """Give this process's pool of a kind; a forked process has its own."""
    with _pools_lock:
        return _pools.setdefault(kind.key, Pool(kind))


@atexit.register
def close_pools() -> None:
    """End all zygotes of this process."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


def available_memory() -> int:
    """Say how many bytes of memory could still be taken, by the machine's and the container's account."""
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
