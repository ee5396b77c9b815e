"""Namespaces of their own for each trajectory, forked in milliseconds from a process with everything loaded.

All of a trajectory's cells, commands and files live in them; an outer bubblewrap holds 128 such sets.

Stops:
- reading or writing host files, other than /usr, the packages of the running Python, and granted roots
- seeing or signalling processes of the host or of another trajectory; reading their files or memory
- keeping processes alive after the command or the sandbox has ended
- the network, unless it was granted: TCP, UDP, abstract and netlink sockets, sockets by path
- gaining rights: capabilities, setuid programs, new namespaces, mounts, ptrace, keyrings, bpf, io_uring
- typing into the trainer's terminal; reading the trainer's environment, arguments or open files
- one process using more memory or file size than its limits; a command, or a process or thread that a cell
  leaves, more processor time: what a cell leaves is looked at at least four times in the time of its limit
- all processes of a trajectory together, with files they write and the kernel's own memory for them, using
  more memory than their limit, where a control group can be made; files that tools write, or a clone begins
  with, count against the limit of files alone
- more processes, or more bytes and files in /work, /tmp and /dev/shm together, than the limits
- output without end costing the trainer memory or time
- forged or broken messages doing more than spoiling the answer to the cell that sent them
Does not stop:
- where no control group can be made, memory that no process maps: what is mapped is looked at five times a
  second
- locks on files below /usr, which others who lock them notice
- a cell and its threads using the processor up to its deadline; many short processes behind one another
- trajectories noticing each other by the load they cause, or by the number of open files that they send along
  sockets, which the kernel bounds by user; all of a zygote ending with it
- learning under which paths of the host lies what it is shown, such as the packages: /proc/self/mountinfo
- bugs in the kernel: for code of strangers, put a virtual machine around it
- code learning about the machine: processor, kernel version, load
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import bubblewrap, cgroups, seccomp
from torchrl_agentic.sandbox.base import Process, Sandbox, SandboxResult, checked
from torchrl_agentic.sandbox.bootstrap import supervisor_settings
from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.inside import namespaces, rights
from torchrl_agentic.sandbox.inside.files import WORK, inside, located
from torchrl_agentic.sandbox.inside.mounts import FOLDERS
from torchrl_agentic.sandbox.link import Link, LinkLost, SocketStream
from torchrl_agentic.sandbox.process import Streams, connected, how
from torchrl_agentic.sandbox.python_runtime import env_inside, find_python, python_inside
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.roots import OWN_FOLDERS, below, check_roots
from torchrl_agentic.sandbox.workspace import MAX_READ
from torchrl_agentic.sandbox.zygote_pool import START_S, Kind, Pool, Trajectory, pool_of

logger = logging.getLogger(__name__)

CLOSE_S = 1.0
ZYGOTE_S = 0.5
"""How much later than its trajectories the end of a zygote may show."""
CLONES_AT_ONCE = 8
"""More are made in several goes: all of them count against the limit of processes meanwhile."""
PRELOADED = ("numpy",)
"""What is loaded before trajectories are forked, where it is installed, unless something else is named."""
OPEN_FILES = 256
"""How many files a process may have open; with those that it may have sent, less than its user may have."""
OURS = 1
"""How many processes are not the code's: the supervisor, or that which starts a command."""
ALL_GONE = "all that ran in it and all its files are gone"
_NO_START = 126
_ERRORS = {kind.__name__: kind for kind in (FileNotFoundError, IsADirectoryError, PermissionError)}
_NESTED = ("--dir", WORK, "--chdir", "/", "--remount-ro", "/", "--")


class ForkServerSandbox(Sandbox):
    """A trajectory's namespaces, with an interpreter that is live at once, commands, and files in memory.

    Args:
        limits: network is "none", "loopback" (an interface of its own), or "full" (the host's, its loopback
            too).
        preload: modules that are imported once for all; the model's imports of them cost nothing. None:
            numpy, where it is installed.
        seed: of `random` and of numpy's global generator; the same code then gives the same output. Who asks
            the kernel for randomness gets it: `secrets`, `numpy.random.default_rng()`.

    Raises:
        ValueError: If code inside could not use a folder that the limits grant; see `check_roots`.
    """

    name: ClassVar[str] = "forkserver"
    cannot: ClassVar[frozenset[str]] = frozenset({"file_locks", "host_paths"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "loopback", "full"})
    fork: ClassVar[bool] = True

    def __init__(
        self, limits: ResourceLimits | None = None, *, preload: Sequence[str] | None = None, seed: int = 0
    ) -> None:
        super().__init__(limits)
        check_roots(self.limits, OWN_FOLDERS)
        self.preload = None if preload is None else tuple(preload)
        self.seed = seed
        self._pool: Pool | None = None
        self._trajectory: Trajectory | None = None
        self._stream: SocketStream | None = None
        self._link: Link | None = None
        self._renewing = asyncio.Lock()
        self._reopens = False
        """Whether the lost one has been cleared away, and no fresh one has come yet."""
        self.has_run_code = False
        """Whether anything of the model's has run in it, which may then be the cause of a loss."""
        self.interpreter_taken = False
        self.has_live_clone = False
        """Whether the interpreter here is the copy of another sandbox's; known when it is `settled`."""
        self.cloning: asyncio.Task[None] | None = None
        """What is copying this one, or making it a copy: whatever is asked of it waits for that."""
        self.lost = ""
        """Why it could not become a copy."""

    @property
    def limits_enforced(self) -> dict[str, bool]:
        """Say of each limit, by name, whether it holds here; that of processor time for commands only."""
        names = ("cpu_seconds", "memory_bytes", "memory_total", "max_processes", "disk_bytes", "disk_total")
        held = dict.fromkeys((*names, "network", "seccomp"), True)
        return {**held, "memory_total": cgroups.why_not() is None}

    def fresh(self) -> ForkServerSandbox:
        """Make another one with the same settings, not open yet."""
        return ForkServerSandbox(self.limits, preload=self.preload, seed=self.seed)

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._link is not None or self._reopens or self.cloning is not None

    @property
    def connection(self) -> Link | None:
        """The connection with the supervisor as it is, whole or lost; None while there is none."""
        return self._link

    async def link(self) -> Link:
        """Return the connection with the supervisor inside; wait for it while a copy is made.

        Where that was lost, a fresh trajectory takes the place of the lost one, without its files.

        Raises:
            SandboxError: The sandbox is not open, could not become a copy, or was lost through no fault of
                code inside: then the next call gets the fresh one.
        """
        await self.settled()
        if self._reopens or (self._link is not None and self._link.is_lost):
            await self._renew()
        if self._link is None:
            raise SandboxError(self.lost or "the sandbox is not open: use 'async with', or call open() first")
        return self._link

    async def _renew(self) -> None:
        """Go on with a fresh trajectory, unless somebody else has seen to that.

        Raises:
            SandboxError: The lost one ended with its zygote, which nothing inside can reach, or before
                anything of the model's had run in it; or there can be no fresh one.
        """
        async with self._renewing:
            is_innocent = False
            if self._link is not None and self._link.is_lost:
                assert self._trajectory is not None
                is_innocent = not self.has_run_code or await self._trajectory.zygote.has_ended(ZYGOTE_S)
                await to_the_end(self._close())
                self.losses += 1
                self.has_run_code, self._reopens = False, True
            if self._reopens:
                await self._open()
                if not self._reopens:  # it was closed meanwhile
                    await self.close()
                self._reopens = False
            if is_innocent:
                raise SandboxError(
                    "the sandbox was lost from outside, with all that it held; a fresh one is there"
                )

    async def settled(self) -> None:
        """Wait until nothing is being copied, unless it is for the copying that this is asked."""
        while self.cloning not in (None, asyncio.current_task()):
            await asyncio.wait((self.cloning,))  # then there may be the next one

    async def open(self) -> None:
        """Fork a trajectory, or take one that stands ready."""
        if not self.is_open:
            await self._open()

    async def _open(self) -> None:
        reason = self.lost or cannot_work()
        if reason:
            raise SandboxError(reason)
        self._pool = pool_of(_kind(self.limits, self.preload))
        link = self._connect(await self._pool.acquire())
        try:
            async with asyncio.timeout(START_S):
                await link.ask("start", seed=self.seed)
        except TimeoutError:
            await to_the_end(self._close())
            raise SandboxError("an interpreter does not start") from None
        except BaseException:
            await to_the_end(self._close())
            raise
        self._pool.refill()

    async def close(self) -> None:
        """End all processes; with them go all files."""
        self._reopens = False
        await to_the_end(self._close())

    async def _close(self) -> None:
        await self.settled()
        link, self._link = self._link, None
        if link is None:
            return
        assert self._stream is not None
        assert self._pool is not None
        assert self._trajectory is not None
        try:
            self._stream.finish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await link.ended()
        finally:
            await link.close()
            self._stream.close()
            self._pool.release(self._trajectory)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end, as process 1's child in a PID namespace of its own."""
        effective, link = self.limits.narrow(limits), await self.link()
        had_run, self.has_run_code = self.has_run_code, True
        began = time.monotonic()
        try:
            with _memory_file(stdin) as fds:
                header = self._command(argv, effective, cwd)
                number, answer = await link.begin("command", fds=fds, **header)
            try:
                found, fields = await asyncio.shield(answer)
            except asyncio.CancelledError:
                await asyncio.shield(_stop(link, number, answer))
                raise
        except LinkLost:
            await self.link()
            return SandboxResult("", f"[the sandbox ended: {ALL_GONE}]", -9, time.monotonic() - began)
        except SandboxError as error:
            if not had_run:
                raise
            return SandboxResult("", f"[{error}]", _NO_START, time.monotonic() - began)
        stdout, stderr = (field.decode("utf-8", "replace") for field in fields)
        code, stopped = found["code"], found["stopped"]
        if not found["started"] and not stopped:
            if not had_run:
                raise SandboxError(f"a command could not be started: {stderr.strip() or 'no reason given'}")
            stderr += "\n[the command was ended before it began]"
        if stopped == "memory":
            total = self.limits.memory_total_bytes or 0
            stderr += f"\n[stopped: all processes together used more than {total >> 20} MiB]"
        return SandboxResult(
            stdout,
            stderr,
            exit_code=-9 if code is None else code,
            wall_seconds=found["seconds"],
            timed_out=stopped == "timeout",
            truncated=found["omitted"] > 0,
        )

    async def spawn(self, argv: Sequence[str]) -> Process:
        """Start a long-lived process; its processor time has no limit, since it serves many calls."""
        limits = replace(self.limits, cpu_seconds=None, wall_seconds=None)
        async with connected() as (standard, connection):
            header, link = self._command(argv, limits, None), await self.link()
            self.has_run_code = True
            number, answer = await link.begin("command", fds=standard, **header)
        return _Spawned(link, number, answer, connection)

    async def was_ended_outside(self, ended: str) -> bool:
        """Return whether it ended with the whole sandbox, through no fault of code inside."""
        try:
            await self.link()
        except SandboxError:
            return True
        return False

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside."""
        located(path, map(os.path.abspath, self.limits.fs_write_roots))
        with _memory_file(data) as fds:
            await self._ask_about_file("write", fds=fds, path=path)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside, 64 MiB at most."""
        located(path, map(os.path.abspath, (*self.limits.fs_read_roots, *self.limits.fs_write_roots)))
        wanted = min(max_bytes if max_bytes is not None else MAX_READ, MAX_READ)
        with _memory_file(b"") as (fd,):
            await self._ask_about_file("read", fds=[fd], path=path, max_bytes=wanted)
            return os.pread(fd, wanted, 0)

    async def _ask_about_file(self, op: str, **request: Any) -> None:
        """Ask for a file to be read or written; of the fresh trajectory if this one ends meanwhile."""
        try:
            answer = await (await self.link()).ask(op, **request)
        except LinkLost:
            answer = await (await self.link()).ask(op, **request)
        _raise(answer)

    def take_interpreter(self) -> None:
        """Take the interpreter for oneself.

        Raises:
            SandboxError: somebody else has it.
        """
        if self.interpreter_taken:
            raise SandboxError(
                "the interpreter of this sandbox is in use; for a second one take SubprocessRepl(sandbox)"
            )
        self.interpreter_taken = True

    async def clones(self, n: int) -> Sequence[Sandbox]:
        """Make open copies, with the memory of the interpreter and all files below /work and /tmp.

        Commands and background processes end, here too. Where the interpreter has something that would be
        shared, or runs a cell, the copies have the files alone: see `has_live_clone`.
        """
        clones: list[Sandbox] = []
        try:
            while len(clones) < n:
                clones += await self._some_clones(min(n - len(clones), CLONES_AT_ONCE))
        except BaseException:
            for clone in clones:
                await clone.close()
            raise
        return clones

    async def _some_clones(self, n: int) -> Sequence[Sandbox]:
        link = await self.link()
        assert self._pool is not None
        assert self._trajectory is not None
        with contextlib.ExitStack() as handed:
            try:
                made, fds = self._pool.prepare(self._trajectory.zygote, n + 1, handed)
            except OSError as error:
                raise SandboxError(f"a copy cannot be set up: {error}") from error
            try:
                found, _ = await link.ask("clone", fds=fds)
            except BaseException as error:
                self._pool.release(*made)
                if isinstance(error, asyncio.CancelledError):
                    await link.close()  # nobody says any more whether the interpreter is still there
                    self.has_run_code = False  # and that is no fault of code inside
                raise
        if "error" in found:
            self._pool.release(*made)
            logger.info("a sandbox is cloned without its interpreter: %s", found["error"])
            return await super().clones(n)
        try:
            await to_the_end(self._move(link, made[0]))
        except BaseException:
            self._pool.release(*made[1:])
            raise
        return [self._around(trajectory) for trajectory in made[1:]]

    async def _move(self, link: Link, trajectory: Trajectory) -> None:
        """Go on as another trajectory: we are a clone ourselves by now."""
        stream, before = self._stream, self._trajectory
        assert self._pool is not None
        assert stream is not None
        assert before is not None
        self._connect(trajectory)
        await link.close()
        stream.close()
        self._pool.release(before)

    def _around(self, trajectory: Trajectory) -> ForkServerSandbox:
        clone = self.fresh()
        clone._pool = self._pool
        clone._connect(trajectory)
        clone.has_live_clone, clone.has_run_code = True, self.has_run_code
        return clone

    def become(self, made: ForkServerSandbox) -> None:
        """Take over what another one with the same settings has opened; to be used instead of it."""
        self._pool, self._trajectory = made._pool, made._trajectory
        self._stream, self._link = made._stream, made._link
        self.interpreter_taken, self.has_live_clone = made.interpreter_taken, made.has_live_clone
        self.has_run_code = made.has_run_code

    @property
    def python_argv(self) -> tuple[str, ...]:
        """The command that starts Python inside."""
        return (python_inside(),)

    def _connect(self, trajectory: Trajectory) -> Link:
        self._trajectory = trajectory
        self._stream = SocketStream(trajectory.connection)
        self._link = Link(self._stream, output_bytes=self.limits.output_bytes)
        return self._link

    def _command(self, argv: Sequence[str], limits: ResourceLimits, cwd: str | None) -> dict[str, Any]:
        return {
            "argv": checked(argv),
            "folder": "/".join((WORK, *inside(cwd or WORK))),
            "env": dict(env_inside(limits)),
            "limits": _limits(limits),
            "wall_s": limits.wall_seconds,
            "output_bytes": limits.output_bytes,
        }


class _Spawned(Streams):
    """A long-lived process of a trajectory's."""

    def __init__(self, link: Link, number: int, answer: asyncio.Future[Any], connection: Any) -> None:
        super().__init__(*connection)
        self._link, self._number, self._answer = link, number, answer

    async def kill(self) -> None:
        """End it and everything it started."""
        with contextlib.suppress(SandboxError):
            if not self._answer.done():
                await self._link.begin("stop_command", which=self._number)
            await asyncio.shield(asyncio.wait((self._answer,)))
        self.hang_up()

    async def wait(self) -> str:
        """Wait until it has ended, and say how."""
        try:
            found, _ = await asyncio.shield(self._answer)
        except SandboxError:
            return "lost with its sandbox"
        return how(-9 if found["code"] is None else found["code"])


async def _stop(link: Link, number: int, answer: asyncio.Future[Any]) -> None:
    with contextlib.suppress(SandboxError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await link.begin("stop_command", which=number)
            await asyncio.wait((answer,))


def _raise(answer: tuple[dict[str, Any], list[bytes]]) -> None:
    found, _ = answer
    if "error" in found:
        raise _ERRORS.get(found["error"], OSError)(found["text"])


@contextlib.contextmanager
def _memory_file(data: bytes | None) -> Any:
    """Put data into a file without a name, at its start; give its descriptor, or none for no data."""
    if data is None:
        yield ()
        return
    fd = os.memfd_create("data")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield (fd,)
    finally:
        os.close(fd)


def _limits(limits: ResourceLimits) -> dict[str, int | None]:
    return {
        "cpu_seconds": None if limits.cpu_seconds is None else math.ceil(limits.cpu_seconds),
        "memory_bytes": limits.memory_bytes,
        "max_processes": None if limits.max_processes is None else limits.max_processes + OURS,
        "file_bytes": limits.disk_bytes,
        "open_files": OPEN_FILES,
    }


def _kind(limits: ResourceLimits, preload: Sequence[str] | None) -> Kind:
    # With a loopback it has a network namespace of its own; else it shares names of sockets with its zygote.
    scope = seccomp.SCOPED if limits.network == "loopback" else rights.landlock_version()
    program = seccomp.program(families=bubblewrap.families(limits), enters=True, landlock=scope)
    assert program is not None  # without a filter for this processor, the canary fails
    python = find_python()
    shown = () if python is None or python[1] is None else (python[1],)
    roots = below((*shown, *limits.fs_read_roots, *limits.fs_write_roots), FOLDERS)
    return Kind(
        command=(
            bubblewrap.bwrap(),
            *bubblewrap.NAMESPACES,
            *bubblewrap.ROOT,
            *bubblewrap.granted(limits),
            *_NESTED,
        ),
        python=python_inside(),
        env=env_inside(limits),
        settings={
            **supervisor_settings(limits),
            "limits": {**_limits(limits), "cpu_seconds": None},
            "scoped": True,
            "namespaces": namespaces.NESTED | (namespaces.NEW_NET if limits.network == "loopback" else 0),
            "quota": limits.disk_total_bytes or 0,
            "roots": roots,
            "read_roots": [*map(os.path.abspath, limits.fs_read_roots)],
            "write_roots": [*map(os.path.abspath, limits.fs_write_roots)],
            "preload": list(PRELOADED if preload is None else preload),
            "strict": preload is not None,
        },
        program=program,
        memory_bytes=limits.memory_total_bytes if cgroups.why_not() is None else None,
    )


@functools.cache
def cannot_work() -> str | None:
    """Say why no trajectory can be forked here; None if one can. Tries it, once per process."""
    reason = bubblewrap.why_not()
    if reason is not None:
        return reason
    if seccomp.program() is None:
        return f"the fork server knows no system call filter for {platform.machine()}"
    if rights.landlock_version() < 2:
        return "the fork server needs a kernel with Landlock, version 2 or later (Linux 5.19)"
    try:
        return pool_of(_kind(ResourceLimits(), None)).try_out()
    except SandboxError as error:
        return str(error)
