"""`ForkServerSandbox`: namespaces for each trajectory, forked in milliseconds.

The process that forks them has libraries loaded. All cells, commands and files of a trajectory are in its
namespaces. An outer bubblewrap contains up to 128 trajectories.

Stops:
- reading or writing host files, other than /usr, the packages of the running Python, and granted folders
- seeing or signalling processes of the host or of another trajectory; reading their files or memory
- keeping processes alive after the command or the sandbox has ended
- using a network that was not granted: TCP, UDP, abstract and netlink sockets, sockets by path
- gaining rights: capabilities, setuid programs, new namespaces, mounts, ptrace, keyrings, bpf, io_uring
- typing into the trainer's terminal; reading the trainer's environment, arguments or open files
- one process using more memory or file size than its limits; a command, or a process or thread that a cell
  leaves running, using more processor time: leftovers are checked at least four times within their limit
- all processes of a trajectory together, with files they write and kernel memory used for them, exceeding the
  memory limit, where a control group can be created; files that tools write, or that a clone starts with,
  count against the limit of files only
- more processes, or more bytes and files in /work, /tmp and /dev/shm together, than the limits
- unlimited output using memory or time of the trainer
- forged or malformed messages doing more than spoiling the answer to the cell that sent them
Does not stop:
- where no control group can be created: memory that no process maps; mapped memory is checked five times a
  second
- locks on files below /usr, which other programs that lock them notice
- a cell and its threads using the processor up to its deadline; many short processes one after another
- trajectories noticing each other by their load, or by the number of open files in flight over sockets, which
  the kernel limits per user; all trajectories of a zygote ending with it
- learning the paths on the host of folders that it is shown, such as packages: /proc/self/mountinfo
- bugs in the kernel: for code of strangers, put a virtual machine around it
- learning about the machine: processor, kernel version, load
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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import bubblewrap, cgroups, seccomp
from torchrl_agentic.sandbox.base import Process, Sandbox, SandboxResult, check_argv, enforced, granted_place
from torchrl_agentic.sandbox.bootstrap import supervisor_settings
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.inside import namespaces, rights
from torchrl_agentic.sandbox.inside.files import WORK, inside
from torchrl_agentic.sandbox.inside.mounts import FOLDERS
from torchrl_agentic.sandbox.link import Link, LinkLost, SocketStream
from torchrl_agentic.sandbox.process import StdioStreams, describe_exit, memory_file, stdio_pipes
from torchrl_agentic.sandbox.python_runtime import env_inside, python_inside, python_roots
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.roots import OWN_FOLDERS, below, check_roots
from torchrl_agentic.sandbox.workspace import MAX_READ
from torchrl_agentic.sandbox.zygote_pool import START_S, ForkedTrajectory, ZygotePool, ZygoteSpec, shared_pool

logger = logging.getLogger(__name__)

CLOSE_S = 1.0
ZYGOTE_S = 0.5
"""Maximum seconds from the end of the trajectories of a zygote until its own end is visible."""
CLONES_AT_ONCE = 8
"""Maximum number of clones per request; while they are made, all count against the limit of processes."""
PRELOADED = ("numpy",)
"""Modules that are imported before trajectories are forked, if they are installed and none are named."""
OPEN_FILES = 256
"""Maximum number of open files of a process. With files in flight over sockets, less than its user may have.
"""
OURS = 1
"""Number of processes that are not the code's own: the supervisor, or the process that starts a command."""
ALL_GONE = "its processes and files are lost"
_NO_START = 126
_ERRORS = {kind.__name__: kind for kind in (FileNotFoundError, IsADirectoryError, PermissionError)}
_NESTED = ("--dir", WORK, "--chdir", "/", "--remount-ro", "/", "--")


class ForkServerSandbox(Sandbox):
    """Namespaces of a trajectory, with a running interpreter, commands, and files in memory.

    Args:
        limits: Limits of the sandbox. The network is "none", "loopback" (an interface of its own), or "full"
            (that of the host, its loopback included).
        preload: Modules that are imported once, before trajectories are forked; importing them inside takes
            no time. None for numpy, if it is installed.
        seed: Seed of `random` and of numpy's global generator, so that the same code has the same output.
            `secrets` and `numpy.random.default_rng()` use randomness of the kernel and are not seeded.

    Raises:
        ValueError: If code inside could not use a folder that the limits grant; see `check_roots`.
    """

    name: ClassVar[str] = "forkserver"
    not_stopped: ClassVar[frozenset[str]] = frozenset({"file_locks", "host_paths"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "loopback", "full"})
    fork: ClassVar[bool] = True

    def __init__(
        self, limits: ResourceLimits | None = None, *, preload: Sequence[str] | None = None, seed: int = 0
    ) -> None:
        super().__init__(limits)
        check_roots(self.limits, OWN_FOLDERS)
        self.preload = None if preload is None else tuple(preload)
        self.seed = seed
        self._pool: ZygotePool | None = None
        self._trajectory: ForkedTrajectory | None = None
        self._stream: SocketStream | None = None
        self._link: Link | None = None
        self._renewing = asyncio.Lock()
        self._reopens = False
        """True if the lost trajectory has been closed and its replacement has not started yet."""
        self.has_run_code = False
        """True if code of the model has run here, which may then be the cause of a loss."""
        self.interpreter_taken = False
        self.has_live_clone = False
        """True if the interpreter here is a copy of that of another sandbox; valid after `wait_for_cloning`.
        """
        self.cloning: asyncio.Task[None] | None = None
        """Task that is copying this sandbox, or making it a copy; other requests wait for it."""
        self.lost: Exception | None = None
        """Why this sandbox could not become a copy; None if it could."""

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced here; that of processor time holds for commands only."""
        names = ("cpu_seconds", "memory_bytes", "max_processes", "disk_bytes", "disk_total", "network")
        return enforced(*names, "seccomp", memory_total=cgroups.why_not() is None)

    def fresh(self) -> ForkServerSandbox:
        """Return a new, unopened sandbox with the same settings."""
        return ForkServerSandbox(self.limits, preload=self.preload, seed=self.seed)

    @property
    def is_open(self) -> bool:
        """Return whether the sandbox can be used."""
        return self._link is not None or self._reopens or self.cloning is not None

    @property
    def connection(self) -> Link | None:
        """The connection to the supervisor, which may be lost; None if there is none."""
        return self._link

    async def link(self) -> Link:
        """Return the connection to the supervisor inside; wait for it while a copy is being made.

        If the connection was lost, a fresh trajectory without files replaces the lost one.

        Raises:
            SandboxError: If the sandbox is not open, could not become a copy, or was lost through no fault of
                code inside. In the last case the next call gets the fresh trajectory.
        """
        await self.wait_for_cloning()
        if self._reopens or (self._link is not None and self._link.is_lost):
            await self._renew()
        if self._link is None:
            raise self.lost or SandboxError("the sandbox is not open: use 'async with', or call open() first")
        return self._link

    async def _renew(self) -> None:
        """Replace a lost trajectory by a fresh one, unless a concurrent call has done so.

        Raises:
            SandboxError: If the trajectory was lost together with its zygote, which nothing inside can reach,
                or before code of the model had run in it; or if no fresh one can be created.
        """
        async with self._renewing:
            is_innocent = False
            if self._link is not None and self._link.is_lost:
                assert self._trajectory is not None
                is_innocent = not self.has_run_code or await self._trajectory.zygote.has_ended(ZYGOTE_S)
                await run_to_completion(self._close())
                self.losses += 1
                self.has_run_code, self._reopens = False, True
            if self._reopens:
                await self._open()
                if not self._reopens:  # it was closed meanwhile
                    await self.close()
                self._reopens = False
            if is_innocent:
                raise SandboxError(
                    "the sandbox was ended from outside and its processes and files are lost; it is open "
                    "again, without them"
                )

    async def wait_for_cloning(self) -> None:
        """Wait until no copy is being made. Return at once in the task that makes the copy."""
        while self.cloning not in (None, asyncio.current_task()):
            await asyncio.wait((self.cloning,))  # another may have started

    async def open(self) -> None:
        """Fork a trajectory, or take a spare one."""
        if not self.is_open:
            await self._open()

    async def _open(self) -> None:
        if self.lost is not None:
            raise self.lost
        if reason := cannot_work():
            raise SandboxError(reason)
        self._pool = shared_pool(_zygote_spec(self.limits, self.preload))
        link = self._connect(await self._pool.acquire())
        try:
            async with asyncio.timeout(START_S):
                await link.ask("start", seed=self.seed)
        except TimeoutError:
            await run_to_completion(self._close())
            raise SandboxError(f"the interpreter did not start within {START_S:g} s") from None
        except BaseException:
            await run_to_completion(self._close())
            raise
        self._pool.refill()

    async def close(self) -> None:
        """End all processes. The files end with them."""
        self._reopens = False
        await run_to_completion(self._close())

    async def _close(self) -> None:
        await self.wait_for_cloning()
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
        """Run one command in a PID namespace of its own and wait until it ends."""
        effective, link = self.limits.narrow(limits), await self.link()
        had_run, self.has_run_code = self.has_run_code, True
        began = time.monotonic()
        try:
            with memory_file(stdin) as fds:
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
            stderr += "\n[the command was ended before it started]"
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
        """Start a long-lived process. Its processor time is unlimited, because it serves many calls."""
        limits = replace(self.limits, cpu_seconds=None, wall_seconds=None)
        async with stdio_pipes() as (standard, connection):
            header, link = self._command(argv, limits, None), await self.link()
            self.has_run_code = True
            number, answer = await link.begin("command", fds=standard, **header)
        return _Spawned(link, number, answer, connection)

    async def was_ended_outside(self, ended: str) -> bool:
        """Return whether the process ended with the whole sandbox, through no fault of code inside."""
        try:
            await self.link()
        except SandboxError:
            return True
        return False

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside."""
        granted_place(path, [*map(os.path.abspath, self.limits.fs_write_roots)])
        with memory_file(data) as fds:
            await self._ask_about_file("write", fds=fds, path=path)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside, at most 64 MiB of it."""
        roots = (*self.limits.fs_read_roots, *self.limits.fs_write_roots)
        granted_place(path, [*map(os.path.abspath, roots)])
        wanted = min(max_bytes if max_bytes is not None else MAX_READ, MAX_READ)
        with memory_file(b"") as (fd,):
            await self._ask_about_file("read", fds=[fd], path=path, max_bytes=wanted)
            return os.pread(fd, wanted, 0)

    async def _ask_about_file(self, op: str, **request: Any) -> None:
        """Request reading or writing a file; repeat it in the fresh trajectory if this one ends meanwhile."""
        try:
            answer = await (await self.link()).ask(op, **request)
        except LinkLost:
            answer = await (await self.link()).ask(op, **request)
        _raise(answer)

    def take_interpreter(self) -> None:
        """Reserve the interpreter of this sandbox for the caller.

        Raises:
            SandboxError: If it is reserved already.
        """
        if self.interpreter_taken:
            raise SandboxError(
                "the interpreter of this sandbox is in use; create a second one with SubprocessRepl(sandbox)"
            )
        self.interpreter_taken = True

    async def clones(self, n: int) -> Sequence[Sandbox]:
        """Create open copies, with the memory of the interpreter and all files below /work and /tmp.

        Commands and background processes end, also in this sandbox. If the interpreter runs a cell, or has
        something that copies would share, the copies have the files only; see `has_live_clone`.

        Args:
            n: Number of copies.
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
                    await link.close()  # the answer would say whether the interpreter still exists
                    self.has_run_code = False  # its loss is not the fault of code inside
                raise
        if "error" in found:
            self._pool.release(*made)
            logger.info("cloning a sandbox without its interpreter: %s", found["error"])
            return await super().clones(n)
        try:
            await run_to_completion(self._move(link, made[0]))
        except BaseException:
            self._pool.release(*made[1:])
            raise
        return [self._wrap_clone(trajectory) for trajectory in made[1:]]

    async def _move(self, link: Link, trajectory: ForkedTrajectory) -> None:
        """Continue as another trajectory: after cloning, this sandbox is a clone too."""
        stream, before = self._stream, self._trajectory
        assert self._pool is not None
        assert stream is not None
        assert before is not None
        self._connect(trajectory)
        await link.close()
        stream.close()
        self._pool.release(before)

    def _wrap_clone(self, trajectory: ForkedTrajectory) -> ForkServerSandbox:
        clone = self.fresh()
        clone._pool = self._pool
        clone._connect(trajectory)
        clone.has_live_clone, clone.has_run_code = True, self.has_run_code
        return clone

    def adopt(self, made: ForkServerSandbox) -> None:
        """Take over the open trajectory of another sandbox with the same settings.

        Args:
            made: The other sandbox; it is not used afterwards.
        """
        self._pool, self._trajectory = made._pool, made._trajectory
        self._stream, self._link = made._stream, made._link
        self.interpreter_taken, self.has_live_clone = made.interpreter_taken, made.has_live_clone
        self.has_run_code = made.has_run_code

    @property
    def python_argv(self) -> tuple[str, ...]:
        """Return the command that starts Python inside."""
        return (python_inside(),)

    def _connect(self, trajectory: ForkedTrajectory) -> Link:
        self._trajectory = trajectory
        self._stream = SocketStream(trajectory.connection)
        self._link = Link(self._stream, output_bytes=self.limits.output_bytes)
        return self._link

    def _command(self, argv: Sequence[str], limits: ResourceLimits, cwd: str | None) -> dict[str, Any]:
        return {
            "argv": check_argv(argv),
            "folder": "/".join((WORK, *inside(cwd or WORK))),
            "env": dict(env_inside(limits)),
            "limits": _limits(limits),
            "wall_s": limits.wall_seconds,
            "output_bytes": limits.output_bytes,
        }


class _Spawned(StdioStreams):
    """A long-lived process in a trajectory."""

    def __init__(self, link: Link, number: int, answer: asyncio.Future[Any], connection: Any) -> None:
        super().__init__(*connection)
        self._link, self._number, self._answer = link, number, answer

    async def kill(self) -> None:
        """Kill the process and everything that it started."""
        with contextlib.suppress(SandboxError):
            if not self._answer.done():
                await self._link.begin("stop_command", which=self._number)
            await asyncio.shield(asyncio.wait((self._answer,)))
        self.disconnect()

    async def wait(self) -> str:
        """Wait until the process has ended. Return how it ended."""
        try:
            found, _ = await asyncio.shield(self._answer)
        except SandboxError:
            return "lost with its sandbox"
        return describe_exit(-9 if found["code"] is None else found["code"])


async def _stop(link: Link, number: int, answer: asyncio.Future[Any]) -> None:
    with contextlib.suppress(SandboxError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await link.begin("stop_command", which=number)
            await asyncio.wait((answer,))


def _raise(answer: tuple[dict[str, Any], list[bytes]]) -> None:
    found, _ = answer
    if "error" in found:
        raise _ERRORS.get(found["error"], OSError)(found["text"])


def _limits(limits: ResourceLimits) -> dict[str, int | None]:
    return {
        "cpu_seconds": None if limits.cpu_seconds is None else math.ceil(limits.cpu_seconds),
        "memory_bytes": limits.memory_bytes,
        "max_processes": None if limits.max_processes is None else limits.max_processes + OURS,
        "file_bytes": limits.disk_bytes,
        "open_files": OPEN_FILES,
    }


def _zygote_spec(limits: ResourceLimits, preload: Sequence[str] | None) -> ZygoteSpec:
    # With a loopback it has its own network namespace; otherwise it shares socket names with its zygote.
    scope = seccomp.SCOPED if limits.network == "loopback" else rights.landlock_version()
    program = seccomp.program(families=bubblewrap.families(limits), enters=True, landlock=scope)
    assert program is not None  # `cannot_work` has checked the processor
    roots = below((*python_roots(), *limits.fs_read_roots, *limits.fs_write_roots), FOLDERS)
    return ZygoteSpec(
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
    """Return why no trajectory can be forked here, or None if one can. Test it once per process."""
    reason = bubblewrap.why_not()
    if reason is not None:
        return reason
    if seccomp.program() is None:
        return f"the fork server has no system call filter for {platform.machine()}"
    if rights.landlock_version() < 2:
        return "the fork server needs a kernel with Landlock version 2 or later (Linux 5.19)"
    try:
        return shared_pool(_zygote_spec(ResourceLimits(), None)).probe()
    except SandboxError as error:
        return str(error)
