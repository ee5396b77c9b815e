"""`RemoteSandbox`: the common part of sandboxes at services.

An adapter creates and ends a machine, and starts a command in it, through the public SDK of its service.
Everything else is here and in `RemoteProcess`: commands run under the shell supervisor of `scripts`, which
first prints the PIDs of its processes. A second command with these PIDs ends them. If that fails, the machine
is ended.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import logging
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Self, TypeVar

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.sandbox.base import Sandbox, SandboxResult, check_argv, granted_place
from torchrl_agentic.sandbox.cancellation import run_in_thread, run_to_completion
from torchrl_agentic.sandbox.process import MAX_ERRORS, Capture
from torchrl_agentic.sandbox.remote import scripts
from torchrl_agentic.sandbox.remote.remote_process import START_S, Execution, RemoteProcess, Take
from torchrl_agentic.sandbox.remote.sdk_requests import RefusedError, time_limit
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.workspace import MAX_READ

M = TypeVar("M")
CLEANUP_S = 20.0
"""Maximum seconds to create or end a machine that is no longer needed."""
FILE_S = 120.0
"""Maximum seconds to read or write one file."""
_FILE_LIMITS = ResourceLimits(
    cpu_seconds=None, memory_bytes=None, max_processes=None, disk_bytes=None, wall_seconds=FILE_S
)
_NOT_ENDED = "ending the machine of a sandbox failed: %s"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteCommand:
    """A command for a machine.

    Attributes:
        words: The command and its arguments.
        stdout: Receives output; while it waits, no more is read.
        stderr: Receives error output.
        has_stdin: True if `Execution.write` will be called.
        wall_s: Seconds after which the service may end the command; None for no limit.
    """

    words: Sequence[str]
    stdout: Take
    stderr: Take
    has_stdin: bool
    wall_s: float | None


class RemoteSandbox(Sandbox, Generic[M]):
    """A sandbox on a machine of a service; `M` is the type that `_create` returns.

    An adapter implements `_create`, `_end`, `_execute`, `limits_enforced` and, if the service may create a
    machine without an answer, `_end_lost`. Its attributes are its settings, which `fresh` copies. It makes
    requests within `sdk_errors`; `_create` and `_execute` name the errors that mean a refusal, after which
    nothing has to be ended.
    """

    package: ClassVar[str]
    """The package of the SDK. The extra that installs it has the name of the sandbox."""
    programs: tuple[str, ...] = scripts.PROGRAMS
    """Programs that a machine must have, besides /bin/sh."""
    prefix: ClassVar[tuple[str, ...]] = ()
    """Words before each command of the model."""
    counts_processes: ClassVar[bool] = False
    """True if the limit of processes is set for each command, which needs a user for the commands alone."""
    shows_folders: ClassVar[bool] = False
    """True if folders of this host can be seen in a machine."""

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        super().__init__(limits)
        if importlib.util.find_spec(self.package) is None:
            raise MissingExtra(type(self).__name__, self.package, self.name)
        if not self.shows_folders and (self.limits.fs_read_roots or self.limits.fs_write_roots):
            raise ValueError(
                f"the sandbox {self.name!r} cannot show folders of this host; copy files with write_file"
            )
        self._reset()

    def _reset(self) -> None:
        """Set the state of an unopened sandbox."""
        self.raises_limits = False  # True if code inside can raise the limits of its processes
        self._machine: M | None = None
        self._left: M | None = None
        self._lost = ""
        self._undoing: asyncio.Future[None] | None = None
        self._changing = asyncio.Lock()
        self._processes: set[RemoteProcess] = set()

    @abstractmethod
    async def _create(self, mark: str) -> M:
        """Create a machine with a unique mark. Raise SandboxError if that failed.

        If the caller of `open` is cancelled, this has `CLEANUP_S` to complete before it is cancelled too.
        """

    @abstractmethod
    async def _end(self, machine: M) -> None:
        """End a machine and everything that runs there. Do nothing if it is gone."""

    async def _end_lost(self, mark: str) -> None:
        """End the machine of a `_create` that failed or was cancelled, if the service has created one."""

    @abstractmethod
    async def _execute(self, machine: M, command: RemoteCommand) -> Execution:
        """Start a command. Raise ValueError if it is too long, SandboxError if the service failed."""

    def fresh(self) -> Self:
        """Return a new, unopened sandbox with the same settings."""
        other = copy.copy(self)
        other._reset()
        return other

    @property
    def is_open(self) -> bool:
        """Return whether the sandbox can be used."""
        return self._machine is not None

    async def open(self) -> None:
        """Create a machine with /work in it."""
        async with self._changing:
            if self._machine is not None:
                return
            await self._discard()
            await run_in_thread(importlib.import_module, self.package)  # takes half a second the first time
            mark = uuid.uuid4().hex
            creating = asyncio.ensure_future(self._create(mark))
            try:
                machine = await asyncio.shield(creating)
                await self._prepare(machine)
            except BaseException:
                self._undoing = asyncio.ensure_future(self._undo(creating, mark))
                await run_to_completion(self._undoing)
                raise
            self._machine, self._lost = machine, ""

    async def _prepare(self, machine: M) -> None:
        """Create /work and check that the machine has the programs that `scripts` needs."""
        async with time_limit(START_S):
            code, printed = await self._run_unsupervised(machine, scripts.prepare(self.programs))
        if code:
            reason = printed.strip() or f"exit code {code}"
            raise SandboxError(f"the image cannot be used for a sandbox: {reason}")
        self.raises_limits = printed.strip() != "0"

    async def _undo(self, creating: asyncio.Future[M], mark: str) -> None:
        """End what a failed `open` has created, also if the service never answered."""
        await asyncio.wait([creating], timeout=CLEANUP_S)
        creating.cancel()
        await asyncio.wait([creating])
        error = SandboxError("no answer") if creating.cancelled() else creating.exception()
        try:
            if error is None:
                self._left = creating.result()
                await self._end_left()
            elif isinstance(error, SandboxError) and not isinstance(error, RefusedError):
                async with time_limit(CLEANUP_S):
                    await self._end_lost(mark)
        except SandboxError as another:
            _logger.warning(_NOT_ENDED, another)

    async def close(self) -> None:
        """End the machine, and what a failed `open` or `close` left.

        Raises:
            SandboxError: If the service cannot be reached. Call `close` again.
        """
        async with self._changing:
            await run_to_completion(self._discard())

    async def _discard(self) -> None:
        if self._undoing is not None:
            await asyncio.wait([self._undoing])
            self._undoing = None
        if self._machine is not None:
            self._left, self._machine = self._machine, None
        for process in self._processes:
            process.abandon()
        self._processes.clear()
        await self._end_left()

    async def _end_left(self) -> None:
        if self._left is not None:
            async with time_limit(CLEANUP_S):
                await self._end(self._left)
            self._left = None

    async def _give_up(self, machine: M, reason: str) -> None:
        """End a machine because a command could not be ended."""
        if self._machine is machine:
            self._lost = f"the sandbox was ended, because a command in it could not be ended: {reason}"
            _logger.warning("%s", self._lost)
            try:
                await self._discard()
            except SandboxError as error:
                _logger.warning(_NOT_ENDED, error)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command and wait until it ends."""
        effective = self._narrowed(limits)
        out, err = Capture(effective.output_bytes), Capture(effective.output_bytes)
        began = time.monotonic()
        code = await self._finish(check_argv(argv), effective, stdin or b"", out.add, err, cwd)
        return SandboxResult(
            stdout=out.text(),
            stderr=err.text(),
            exit_code=-9 if code is None else code,
            wall_seconds=time.monotonic() - began,
            timed_out=code is None,
            truncated=bool(out.omitted or err.omitted),
        )

    async def spawn(self, argv: Sequence[str]) -> RemoteProcess:
        """Start a long-lived process. Neither its duration nor its processor time is limited."""
        limits = replace(self.limits, cpu_seconds=None, wall_seconds=None)
        process = await self._start(check_argv(argv), limits, True, Capture(MAX_ERRORS))
        self._processes = {other for other in self._processes if other.is_running} | {process}
        return process

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside and create its folders.

        Raises:
            OSError: If it cannot be written, for example for lack of space.
        """
        granted_place(path, ())
        await self._file(scripts.write(path), path, data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside, at most 64 MiB of it."""
        granted_place(path, ())
        limit = MAX_READ if max_bytes is None else min(max_bytes, MAX_READ)
        return await self._file(scripts.read(path, limit), path)

    async def _file(self, argv: Sequence[str], path: str, data: bytes = b"") -> bytes:
        """Run a script on a file and return its output, at most 64 MiB of it.

        The file APIs of services are not used: they follow links, wait at a FIFO, or do not see mounts.
        """

        def keep(data: bytes) -> None:
            content.extend(data[: MAX_READ - len(content)])  # code inside may have replaced `head`

        content, reason = bytearray(), Capture(MAX_ERRORS)
        code = await self._finish(argv, _FILE_LIMITS, data, keep, reason)
        if code is None:
            raise SandboxError(f"reading or writing {path} took more than {FILE_S:g} s")
        if code:
            refused = scripts.refusal(code, path, reason.text())
            raise refused or SandboxError(f"the sandbox cannot access its files: {reason.text()}")
        return bytes(content)

    async def _finish(
        self,
        argv: Sequence[str],
        limits: ResourceLimits,
        stdin: bytes,
        stdout: Callable[[bytes], object],
        errors: Capture,
        cwd: str | None = None,
    ) -> int | None:
        """Run a command to its end. Return its exit code, or None if it was stopped at its timeout."""
        process = await self._start(argv, limits, len(stdin), errors, cwd)
        try:
            async with asyncio.timeout(limits.wall_seconds):
                return await process.communicate(stdin, stdout)
        except TimeoutError:
            return None
        finally:
            await run_to_completion(process.kill())

    async def _start(
        self,
        argv: Sequence[str],
        limits: ResourceLimits,
        stdin: bool | int,
        errors: Capture,
        cwd: str | None = None,
    ) -> RemoteProcess:
        """Start a command under its supervisor, within limits; for `stdin` see `scripts.supervised`."""
        machine = self._machine
        if machine is None:
            reason = "the sandbox is not open: use 'async with', or call open() first"
            raise SandboxError(self._lost or reason)
        if not self.counts_processes:
            limits = replace(limits, max_processes=None)
        words = scripts.supervised((*self.prefix, *argv), limits, cwd=cwd, stdin=stdin)
        process = RemoteProcess(
            lambda out, err: self._execute(
                machine, RemoteCommand(words, out, err, bool(stdin), limits.wall_seconds)
            ),
            lambda pids: self._run_unsupervised(machine, scripts.kill(pids)),
            lambda reason: self._give_up(machine, reason),
            errors,
        )
        try:
            # If there is a wall limit, it also bounds the start of the supervisor.
            await process.started(is_supervised=limits.wall_seconds is None)
        except BaseException:
            await run_to_completion(process.kill())
            raise
        return process

    async def _run_unsupervised(self, machine: M, words: Sequence[str]) -> tuple[int, str]:
        """Run a trusted command without supervision. Return its exit code and what it printed."""
        printed = Capture(MAX_ERRORS)

        async def take(data: bytes) -> None:
            printed.add(data)

        execution = await self._execute(machine, RemoteCommand(words, take, take, False, START_S))
        try:
            return await execution.wait(), printed.text()
        finally:
            await execution.detach()

    def _narrowed(self, limits: ResourceLimits | None) -> ResourceLimits:
        """Return the limits of one call. Raise ValueError if a call changes a limit of the whole machine."""
        for name in ("network", "fs_read_roots", "fs_write_roots"):
            if limits is not None and getattr(limits, name) != getattr(self.limits, name):
                raise ValueError(
                    f"a machine has one {name} for all commands, {getattr(self.limits, name)!r}; a call has "
                    f"{getattr(limits, name)!r}: pass dataclasses.replace(sandbox.limits, ...)"
                )
        return self.limits.narrow(limits)
