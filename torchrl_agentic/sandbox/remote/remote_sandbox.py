"""What the sandboxes at a service share: `RemoteSandbox`, and `RemoteProcess`, a command that runs in one.

A backend creates and ends a machine, and starts a command in it, through the public SDK of its service. All
else is here: commands run under the shell supervisor of `scripts`, which prints the numbers of its processes
first; a second command with these numbers ends them. If that fails, the whole machine is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import Sandbox, SandboxResult, checked
from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.process import MAX_ERRORS, Capture, exit_or_signal, how
from torchrl_agentic.sandbox.remote import scripts
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.workspace import MAX_READ

M = TypeVar("M")
T = TypeVar("T")
Take: TypeAlias = Callable[[bytes], Awaitable[None]]
END_S = 5.0
"""Longest wait for a command to end once it is killed; then its machine is ended."""
CLEANUP_S = 20.0
"""Longest wait for a machine to be created or ended when it is no longer wanted."""
PREPARE_S = 60.0
"""Longest wait for a command to start, and for one of ours that prepares or ends something."""
FILE_S = 120.0
"""Longest time for reading or writing one file."""
MAX_UNREAD = 1 << 20
"""Bytes of output that wait for `RemoteProcess.receive`; then the process waits."""
_MAX_HEADER = 64
_NO_LIMITS = ResourceLimits(cpu_seconds=None, memory_bytes=None, max_processes=None, disk_bytes=None)
_logger = logging.getLogger(__name__)


class Execution(Protocol):
    """A command that a service runs, through the SDK of that service."""

    async def wait(self) -> int:
        """Deliver the output to its end and return the exit code, 128 + n for signal n."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to stdin. Raise EOFError if the command reads no more."""
        ...

    async def detach(self) -> None:
        """Release the connection; the command is not ended."""
        ...


@contextlib.contextmanager
def from_service(what: str) -> Generator[None]:
    """Raise SandboxError for anything that an SDK raises, with the original as its cause.

    An SDK, its HTTP library and its protocol have no common base class, and some raise bare exceptions.
    """
    try:
        yield
    except (SandboxError, EOFError):
        raise
    except Exception as error:
        raise SandboxError(f"{what}: {str(error) or type(error).__name__}") from error


async def ask(what: str, call: Callable[[], Awaitable[T]]) -> T:
    """Make a request that may be repeated, up to three times; see `from_service`."""
    for pause_s in (0.1, 0.5):
        with contextlib.suppress(SandboxError), from_service(what):
            return await call()
        await asyncio.sleep(pause_s)
    with from_service(what):
        return await call()


class RemoteSandbox(Sandbox, Generic[M]):
    """A sandbox on a machine of a service; `M` is the type of what `_create` returns."""

    counts_processes = False
    """Whether the limit of processes is set for each command: it holds only for a user of their own."""

    programs: tuple[str, ...] = scripts.PROGRAMS
    """What a machine must have, besides /bin/sh."""

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
        """Create a machine; not cancelled. Raise SandboxError if there is none."""

    @abstractmethod
    async def _end(self, machine: M) -> None:
        """End a machine and all that runs there; one that is gone is ended."""

    async def _end_lost(self) -> None:
        """End the machine of a `_create` that failed, if the service created one all the same."""

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
            stdout: Takes output; while it waits, no more is read.
            stderr: Takes error output.
            stdin: Whether `Execution.write` will be called.
            wall_s: Seconds after which the command may be ended by the service; None for no limit.

        Raises:
            SandboxError: The command was not started, or `may_run` tells whether that is certain.
            ValueError: The command is too long.
        """

    def may_run(self, error: BaseException | None) -> bool:
        """Return whether the service may have done what was asked although the SDK raised this error."""
        return False

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._machine is not None

    async def open(self) -> None:
        """Create a machine, with /work in it."""
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
                await to_the_end(self._undoing)
                raise
            self._machine, self._lost = machine, ""

    async def _prepare(self, machine: M) -> None:
        """Create /work and check that the machine has the programs that `scripts` needs."""
        out, err = Capture(MAX_ERRORS), Capture(MAX_ERRORS)
        async with _in_time(PREPARE_S):
            code = await self._plain(machine, scripts.prepare(self.programs), out, err)
        if code:
            reason = (err.text() + out.text()).strip() or f"exit code {code}"
            raise SandboxError(f"the image cannot be used for a sandbox: {reason}")
        self.raises_limits = out.text().strip() != "0"

    async def _plain(self, machine: M, words: Sequence[str], out: Capture, err: Capture) -> int:
        """Run a command of ours, without supervision, and return its exit code."""

        async def stdout(data: bytes) -> None:
            out.add(data)

        async def stderr(data: bytes) -> None:
            err.add(data)

        execution = await self.execute(machine, words, stdout, stderr, stdin=False, wall_s=PREPARE_S)
        try:
            return await execution.wait()
        finally:
            await execution.detach()

    async def _undo(self, creating: asyncio.Future[M]) -> None:
        """End what an `open` that failed has created, also if the service never answered."""
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
        """End the machine; also what a failed `open` or `close` left.

        Raises:
            SandboxError: If the service cannot be reached. Call it again.
        """
        async with self._changing:
            await to_the_end(self._discard())

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
            async with _in_time(CLEANUP_S):
                await self._end(self._left)
            self._left = None

    async def kill_group(self, machine: M, numbers: Sequence[int]) -> None:
        """End a command by the numbers of its processes."""
        await self._plain(machine, scripts.kill(numbers), Capture(0), Capture(0))

    async def give_up(self, machine: M, reason: str) -> None:
        """End a machine in which a command could not be ended."""
        if self._machine is machine:
            self._lost = f"the sandbox was ended, because a command in it could not be ended: {reason}"
            _logger.warning("%s", self._lost)
            await self._quietly(self._discard())

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        """Log a failure where another error is on its way; a later `close` tries again."""
        try:
            await work
        except SandboxError as error:
            _logger.warning("cleaning up a sandbox failed: %s", error)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end."""
        effective = self._narrowed(limits)
        wall_s = effective.wall_seconds
        words = self._supervised(checked(argv), effective, cwd, len(stdin or b""))
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
        """Start a long-lived process; neither its time nor its processor time is limited."""
        words = self._supervised(checked(argv), replace(self.limits, cpu_seconds=None), None, True)
        process = RemoteProcess(self, self.opened(), Capture(MAX_ERRORS))
        try:
            await process.start(words, stdin=True, wall_s=None)
            await process.known()
        except BaseException:
            await to_the_end(process.kill())
            raise
        self._processes = {other for other in self._processes if other.is_running} | {process}
        return process

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside, making its folders.

        Raises:
            OSError: If it cannot be written, for want of space for example.
        """
        await self._file(scripts.write(path), path, data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside, 64 MiB at most."""
        limit = MAX_READ if max_bytes is None else min(max_bytes, MAX_READ)
        return await self._file(scripts.read(path, limit), path)

    async def _file(self, argv: Sequence[str], path: str, data: bytes | None = None) -> bytes:
        """Run a script of ours on a file and return what it printed, 64 MiB at most.

        The file APIs of the services follow links, wait at a FIFO or do not see mounts; commands do not.
        """

        def keep(data: bytes) -> None:
            content.extend(data[: MAX_READ - len(content)])  # code inside may have replaced `head`

        words = self._supervised(argv, _NO_LIMITS, None, len(data or b""))
        content, reason = bytearray(), Capture(MAX_ERRORS)
        code = await self._finish(words, data, keep, reason, FILE_S)
        if code is None:
            raise SandboxError(f"{path} was not read or written within {FILE_S:g} s")
        if code:
            refused = scripts.refusal(code, path, reason.text())
            raise refused or SandboxError(f"the sandbox cannot reach its files: {reason.text()}")
        return bytes(content)

    async def _finish(
        self,
        words: Sequence[str],
        stdin: bytes | None,
        out: Callable[[bytes], object],
        err: Capture,
        wall_s: float | None,
    ) -> int | None:
        """Run a command to its end and return its exit code; None if it was stopped at its time."""
        process = RemoteProcess(self, self.opened(), err, out)
        try:
            await process.start(words, stdin=bool(stdin), wall_s=wall_s)
            async with asyncio.timeout(wall_s):
                return await process.finish(stdin or b"")
        except TimeoutError:
            return None
        finally:
            await to_the_end(process.kill())

    def _supervised(
        self, argv: Sequence[str], limits: ResourceLimits, cwd: str | None, stdin: bool | int
    ) -> list[str]:
        if not self.counts_processes:
            limits = replace(limits, max_processes=None)
        return scripts.supervised(argv, limits, cwd=cwd, stdin=stdin)

    def _narrowed(self, limits: ResourceLimits | None) -> ResourceLimits:
        """Narrow the limits for one call. Raise ValueError for those that a machine has for all commands."""
        for name in ("network", "fs_read_roots", "fs_write_roots"):
            if limits is not None and getattr(limits, name) != getattr(self.limits, name):
                raise ValueError(
                    f"a machine has one {name} for all commands, {getattr(self.limits, name)!r}, not "
                    f"{getattr(limits, name)!r} for one: dataclasses.replace(sandbox.limits, ...) keeps it"
                )
        return self.limits.narrow(limits)

    def opened(self) -> M:
        """Return the machine. Raise SandboxError if there is none."""
        if self._machine is None:
            raise SandboxError(
                self._lost or "the sandbox is not open: use 'async with', or call open() first"
            )
        return self._machine


class RemoteProcess:
    """A command under its supervisor; a `Process`. It belongs to the event loop that it was started on.

    Args:
        sandbox: The sandbox that starts and ends it.
        machine: The machine where it runs.
        errors: Keeps what it writes to stderr.
        keep: Takes what it writes to stdout; None: that waits for `receive`.
    """

    def __init__(
        self,
        sandbox: RemoteSandbox[Any],
        machine: Any,
        errors: Capture,
        keep: Callable[[bytes], object] | None = None,
    ) -> None:
        self._sandbox, self._machine = sandbox, machine
        self._errors, self._keep = errors, keep
        self._loop = asyncio.get_running_loop()
        self._header = b""
        self._numbers: list[int] | None = None
        self._unread = bytearray()
        self._begun, self._known = asyncio.Event(), asyncio.Event()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Future[None]] = set()
        self._stopped = self._may_run = False
        self._failed: SandboxError | None = None
        self._execution: Execution | None = None
        self._following: asyncio.Future[int] = self._loop.create_future()

    async def start(self, words: Sequence[str], *, stdin: bool, wall_s: float | None) -> None:
        """Start it, and wait until the service has done so; see `RemoteSandbox.execute`."""
        # In a task of its own: cancelled, a request under way would start a command that nobody ends.
        self._following = asyncio.ensure_future(self._follow(words, stdin, wall_s))
        self._following.add_done_callback(self._over)
        async with _in_time(PREPARE_S):
            await self._begun.wait()
        if self._execution is None:
            self._result()

    async def known(self) -> None:
        """Wait until its supervisor runs. Raise SandboxError if it does not."""
        await self._known.wait()
        if self._numbers is None:
            code = self._result()
            raise SandboxError(f"the shell in the sandbox did not run the command: it gave exit code {code}")

    async def _follow(self, words: Sequence[str], stdin: bool, wall_s: float | None) -> int:
        self._may_run = True
        try:
            self._execution = await self._sandbox.execute(
                self._machine, words, self._take, self._take_errors, stdin=stdin, wall_s=wall_s
            )
        except (SandboxError, ValueError) as error:
            self._may_run = self._sandbox.may_run(error.__cause__)
            raise
        self._begun.set()
        try:
            code = await self._execution.wait()
        finally:
            await self._execution.detach()
        self._may_run = False
        return code

    def _over(self, following: asyncio.Future[int]) -> None:
        self._news.set()
        self._begun.set()
        self._known.set()
        if not following.cancelled():
            following.exception()  # or else asyncio logs one that nobody asked for

    async def _take(self, data: bytes) -> None:
        if self._failed is not None:
            return
        if self._numbers is None:
            line, newline, data = (self._header + data).partition(b"\n")
            if not newline and len(line) <= _MAX_HEADER:
                self._header = line
                return
            self._numbers = _numbers(line)
            if self._numbers is None:  # Docker prints why it could not start a command
                said = (line + data)[:1000].decode("utf-8", "replace").strip()
                self._failed = SandboxError(f"the sandbox could not start a command: {said}")
            self._known.set()
        if self._keep is not None:
            self._keep(data)
            return
        while len(self._unread) >= MAX_UNREAD and not self._stopped:
            self._room.clear()
            await self._room.wait()
        if not self._stopped:
            self._unread += data
            self._news.set()

    async def _take_errors(self, data: bytes) -> None:
        self._errors.add(data)

    async def finish(self, stdin: bytes) -> int:
        """Send its input and return its exit code, negative for a signal."""
        feeding = asyncio.ensure_future(self._feed(stdin))
        try:
            await self.known()
            await asyncio.wait([self._following])
        finally:
            feeding.cancel()
        return self._result()

    async def _feed(self, data: bytes) -> None:
        with contextlib.suppress(EOFError, SandboxError):  # it need not read all; `_result` tells a failure
            if data:
                await self.send(data)

    async def send(self, data: bytes) -> None:
        """Write to its stdin. All of `data` is sent, also if the caller is cancelled.

        Raises:
            EOFError: If it reads no more.
        """
        if not self.is_running:
            raise EOFError(f"the process reads no more: {self._ending()}")
        writing = asyncio.ensure_future(self._write(data))
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([writing, self._following], return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            writing.cancel()
            raise EOFError("the process reads no more")
        writing.result()

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            assert self._execution is not None
            try:
                await self._execution.write(data)
            except SandboxError as error:  # it has missed some of its input
                self._failed = self._failed or error
                self._following.cancel()
                raise

    async def receive(self) -> bytes:
        """Read what it wrote to stdout; empty at the end.

        Raises:
            SandboxError: If the sandbox is lost, or the connection to it.
        """
        while not self._unread and self.is_running:
            self._news.clear()
            await self._news.wait()
        data = bytes(self._unread)
        self._unread.clear()
        self._room.set()
        if not data and not self._stopped:
            self._result()
        return data

    async def kill(self) -> None:
        """End it and its process group; if that is not certain within `END_S`, end its machine."""
        self._stopped = True
        self._room.set()
        await to_the_end(self._kill())

    async def _kill(self) -> None:
        if not self._may_run:
            return
        reason = ""
        try:
            async with asyncio.timeout(END_S):
                await self._known.wait()
                if self._numbers is not None:
                    await self._sandbox.kill_group(self._machine, self._numbers)
                await asyncio.wait([self._following])
                self._may_run = self._may_run and self._numbers is None
        except TimeoutError:
            reason = f"it still ran after {END_S:g} s"
        except SandboxError as error:
            reason = str(error)
        self._following.cancel()
        await asyncio.wait([self._following])
        if self._may_run:
            self._may_run = False
            await self._sandbox.give_up(self._machine, reason or self._ending())

    async def wait(self) -> str:
        """Wait until it has ended, and say how."""
        await asyncio.wait([self._following])
        if self._following.cancelled() or (self._stopped and self._following.exception() is not None):
            return "ended with its sandbox"
        return how(self._result())

    def errors(self) -> str:
        """Return head and tail of what it wrote to stderr so far."""
        return self._errors.text()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as we know."""
        return not self._following.done()

    def abandon(self) -> None:
        """Read no more, whichever event loop this is called on: its machine is gone."""
        self._stopped, self._may_run = True, False
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._following.cancel)

    def _ending(self) -> str:
        try:
            return how(self._result())
        except SandboxError as error:
            return str(error)

    def _result(self) -> int:
        if self._failed is not None:
            raise self._failed
        if self._following.cancelled():
            raise SandboxError("the process ended with its sandbox")
        return exit_or_signal(self._following.result())


@contextlib.asynccontextmanager
async def _in_time(seconds: float) -> AsyncGenerator[None]:
    """Raise SandboxError if a block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SandboxError(f"no answer within {seconds:g} s") from None


def _numbers(line: bytes) -> list[int] | None:
    words = line.split()
    valid = len(words) == scripts.NUMBERS and all(word.isdigit() for word in words)
    return [int(word) for word in words] if valid else None
