"""`RemoteSandbox`: the common part of sandboxes at services.

A backend creates and ends a machine, and starts a command in it, through the public SDK of its service.
Everything else is here and in `RemoteProcess`: commands run under the shell supervisor of `scripts`, which
first prints the PIDs of its processes. A second command with these PIDs ends them. If that fails, the machine
is ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import Sandbox, SandboxResult, check_argv
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.process import MAX_ERRORS, Capture
from torchrl_agentic.sandbox.remote import scripts
from torchrl_agentic.sandbox.remote.remote_process import START_S, Execution, RemoteProcess, Take
from torchrl_agentic.sandbox.remote.sdk_requests import time_limit
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.workspace import MAX_READ

M = TypeVar("M")
CLEANUP_S = 20.0
"""Maximum seconds to create or end a machine that is no longer needed."""
FILE_S = 120.0
"""Maximum seconds to read or write one file."""
_NO_LIMITS = ResourceLimits(cpu_seconds=None, memory_bytes=None, max_processes=None, disk_bytes=None)
_logger = logging.getLogger(__name__)


class RemoteSandbox(Sandbox, Generic[M]):
    """A sandbox on a machine of a service; `M` is the type that `_create` returns."""

    counts_processes = False
    """True if the limit of processes is set for each command, which needs a user for the commands alone."""
    programs: tuple[str, ...] = scripts.PROGRAMS
    """Programs that a machine must have, besides /bin/sh."""

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        super().__init__(limits)
        self.raises_limits = False
        self._machine: M | None = None
        self._left: M | None = None
        self._lost = ""
        self._undoing: asyncio.Future[None] | None = None
        self._changing = asyncio.Lock()
        self._processes: set[RemoteProcess] = set()

    @abstractmethod
    async def _create(self) -> M:
        """Create a machine; never cancelled.

        Raises:
            SandboxError: If it could not be created.
        """

    @abstractmethod
    async def _end(self, machine: M) -> None:
        """End a machine and everything that runs there. Do nothing if it is gone."""

    async def _end_lost(self) -> None:
        """End the machine of a failed `_create`, if the service has created one."""

    @abstractmethod
    async def execute(
        self,
        machine: M,
        words: Sequence[str],
        stdout: Take,
        stderr: Take,
        *,
        stdin: bool,
        wall_s: float | None,
    ) -> Execution:
        """Start a command.

        Args:
            machine: Where it runs.
            words: The command and its arguments.
            stdout: Receives output; while it waits, no more is read.
            stderr: Receives error output.
            stdin: True if `Execution.write` will be called.
            wall_s: Seconds after which the service may end the command; None for no limit.

        Raises:
            SandboxError: If the command was not started, unless `may_run` returns True for the cause.
            ValueError: If the command is too long.
        """

    def may_run(self, error: BaseException | None) -> bool:
        """Return whether the service may have done what was requested although the SDK raised this error.

        Args:
            error: The error of the SDK.
        """
        return False

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
            creating = asyncio.ensure_future(self._create())
            try:
                machine = await asyncio.shield(creating)
                await self._prepare(machine)
            except BaseException:
                self._undoing = asyncio.ensure_future(self._undo(creating))
                await run_to_completion(self._undoing)
                raise
            self._machine, self._lost = machine, ""

    async def _prepare(self, machine: M) -> None:
        """Create /work and check that the machine has the programs that `scripts` needs."""
        out, err = Capture(MAX_ERRORS), Capture(MAX_ERRORS)
        async with time_limit(START_S):
            code = await self._plain(machine, scripts.prepare(self.programs), out, err)
        if code:
            reason = (err.text() + out.text()).strip() or f"exit code {code}"
            raise SandboxError(f"the image cannot be used for a sandbox: {reason}")
        self.raises_limits = out.text().strip() != "0"

    async def _plain(self, machine: M, words: Sequence[str], out: Capture, err: Capture) -> int:
        """Run a trusted command without supervision, and return its exit code."""

        async def stdout(data: bytes) -> None:
            out.add(data)

        async def stderr(data: bytes) -> None:
            err.add(data)

        execution = await self.execute(machine, words, stdout, stderr, stdin=False, wall_s=START_S)
        try:
            return await execution.wait()
        finally:
            await execution.detach()

    async def _undo(self, creating: asyncio.Future[M]) -> None:
        """End what a failed `open` has created, also if the service never answered."""
        await asyncio.wait([creating], timeout=CLEANUP_S)
        if not creating.done():
            creating.cancel()
            await asyncio.wait([creating])
        error = asyncio.CancelledError() if creating.cancelled() else creating.exception()
        if error is None:
            self._left = creating.result()
            await self._quietly(self._discard())
        elif creating.cancelled() or self.may_run(error.__cause__):
            await self._quietly(self._end_lost())

    async def close(self) -> None:
        """End the machine, and what a failed `open` or `close` left.

        Raises:
            SandboxError: If the service cannot be reached. Call `close` again.
        """
        async with self._changing:
            await run_to_completion(self._discard())

    async def _discard(self) -> None:
        if self._undoing is not None and self._undoing is not asyncio.current_task():
            undoing, self._undoing = self._undoing, None
            await asyncio.wait([undoing])
        machine, self._machine = self._machine, None
        processes, self._processes = self._processes, set()
        for process in processes:
            process.abandon()
        self._left = self._left if machine is None else machine
        if self._left is not None:
            async with time_limit(CLEANUP_S):
                await self._end(self._left)
            self._left = None

    async def kill_group(self, machine: M, numbers: Sequence[int]) -> None:
        """End a command.

        Args:
            machine: Where it runs.
            numbers: PIDs that its supervisor printed.
        """
        await self._plain(machine, scripts.kill(numbers), Capture(0), Capture(0))

    async def give_up(self, machine: M, reason: str) -> None:
        """End a machine because a command could not be ended.

        Args:
            machine: The machine.
            reason: Why, for error messages.
        """
        if self._machine is machine:
            self._lost = f"the sandbox was ended, because a command in it could not be ended: {reason}"
            _logger.warning("%s", self._lost)
            await self._quietly(self._discard())

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        """Log a failure, because another error is being raised; a later `close` tries again."""
        try:
            await work
        except SandboxError as error:
            _logger.warning("ending the machine of a sandbox failed: %s", error)

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
        wall_s = effective.wall_seconds
        words = self._supervised(check_argv(argv), effective, cwd, len(stdin or b""))
        out, err = Capture(effective.output_bytes), Capture(effective.output_bytes)
        began = time.monotonic()
        code = await self._finish(words, stdin, out.add, err, wall_s)
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
        words = self._supervised(check_argv(argv), replace(self.limits, cpu_seconds=None), None, True)
        process = RemoteProcess(self, self.opened(), Capture(MAX_ERRORS))
        try:
            await process.start(words, stdin=True, wall_s=None)
            await process.started()
        except BaseException:
            await run_to_completion(process.kill())
            raise
        self._processes = {other for other in self._processes if other.is_running} | {process}
        return process

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside and create its folders.

        Raises:
            OSError: If it cannot be written, for example for lack of space.
        """
        await self._file(scripts.write(path), path, data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside, at most 64 MiB of it."""
        limit = MAX_READ if max_bytes is None else min(max_bytes, MAX_READ)
        return await self._file(scripts.read(path, limit), path)

    async def _file(self, argv: Sequence[str], path: str, data: bytes | None = None) -> bytes:
        """Run a script on a file and return its output, at most 64 MiB of it.

        The file APIs of services are not used: they follow links, wait at a FIFO, or do not see mounts.
        """

        def keep(data: bytes) -> None:
            content.extend(data[: MAX_READ - len(content)])  # code inside may have replaced `head`

        words = self._supervised(argv, _NO_LIMITS, None, len(data or b""))
        content, reason = bytearray(), Capture(MAX_ERRORS)
        code = await self._finish(words, data, keep, reason, FILE_S)
        if code is None:
            raise SandboxError(f"reading or writing {path} took more than {FILE_S:g} s")
        if code:
            refused = scripts.refusal(code, path, reason.text())
            raise refused or SandboxError(f"the sandbox cannot access its files: {reason.text()}")
        return bytes(content)

    async def _finish(
        self,
        words: Sequence[str],
        stdin: bytes | None,
        out: Callable[[bytes], object],
        err: Capture,
        wall_s: float | None,
    ) -> int | None:
        """Run a command. Return its exit code, or None if it was stopped at its timeout."""
        process = RemoteProcess(self, self.opened(), err, out)
        try:
            await process.start(words, stdin=bool(stdin), wall_s=wall_s)
            async with asyncio.timeout(wall_s):
                return await process.finish(stdin or b"")
        except TimeoutError:
            return None
        finally:
            await run_to_completion(process.kill())

    def _supervised(
        self, argv: Sequence[str], limits: ResourceLimits, cwd: str | None, stdin: bool | int
    ) -> list[str]:
        if not self.counts_processes:
            limits = replace(limits, max_processes=None)
        return scripts.supervised(argv, limits, cwd=cwd, stdin=stdin)

    def _narrowed(self, limits: ResourceLimits | None) -> ResourceLimits:
        """Return the limits of one call. Raise ValueError if a call changes a limit of the whole machine."""
        for name in ("network", "fs_read_roots", "fs_write_roots"):
            if limits is not None and getattr(limits, name) != getattr(self.limits, name):
                raise ValueError(
                    f"a machine has one {name} for all commands, {getattr(self.limits, name)!r}; a call has "
                    f"{getattr(limits, name)!r}: pass dataclasses.replace(sandbox.limits, ...)"
                )
        return self.limits.narrow(limits)

    def opened(self) -> M:
        """Return the machine.

        Raises:
            SandboxError: If the sandbox is not open.
        """
        if self._machine is None:
            raise SandboxError(
                self._lost or "the sandbox is not open: use 'async with', or call open() first"
            )
        return self._machine
