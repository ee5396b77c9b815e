"""`RemoteProcess`: a command at a service, from its start to its certain end."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.process import Capture, describe_exit, signed_exit_code
from torchrl_agentic.sandbox.remote import scripts
from torchrl_agentic.sandbox.remote.sdk_requests import RefusedError, time_limit

Take: TypeAlias = Callable[[bytes], Awaitable[None]]
START_S = 60.0
"""Maximum seconds that a service may take to start a command."""
END_S = 5.0
"""Maximum seconds that a killed command may take to end; after that its machine is ended."""
MAX_UNREAD = 1 << 20
"""Maximum bytes of output that wait for `RemoteProcess.receive`; beyond that the process has to wait."""
MAX_WRITE = 1 << 18
"""Maximum bytes of input per request."""
_MAX_HEADER = 64


class Execution(ABC):
    """A command that a service runs, through the SDK of that service."""

    @abstractmethod
    async def wait(self) -> int:
        """Deliver the output to its end. Return the exit code, 128 + n for signal n."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to stdin.

        Args:
            data: At most `MAX_WRITE` bytes.

        Raises:
            EOFError: If the command has closed its stdin.
        """

    async def detach(self) -> None:  # noqa: B027  not every SDK keeps a connection for a command
        """Close the connection without ending the command."""


class RemoteProcess:
    """A command under the supervisor of `scripts`; a `Process`. Use it on the event loop that created it.

    It starts at once, in a task of its own: a request that is cancelled on the way could start a command that
    is never ended.

    Args:
        execute: Starts the command and delivers its stdout and its stderr.
        kill: Ends the command, by the PIDs that its supervisor printed.
        give_up: Ends the machine, because it is not certain that the command has ended, for a reason.
        errors: Keeps the stderr.
    """

    def __init__(
        self,
        execute: Callable[[Take, Take], Awaitable[Execution]],
        kill: Callable[[list[int]], Awaitable[object]],
        give_up: Callable[[str], Awaitable[None]],
        errors: Capture,
    ) -> None:
        self._execute, self._kill_command, self._give_up = execute, kill, give_up
        self._errors = errors
        self._loop = asyncio.get_running_loop()
        self._header = b""
        self._pids: list[int] | None = None
        self._unread = bytearray()
        self._started, self._supervised = asyncio.Event(), asyncio.Event()  # both also set at the end
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Future[None]] = set()
        self._may_run, self._is_stopped = True, False
        self._failed: SandboxError | None = None
        self._execution: Execution | None = None
        self._following = asyncio.ensure_future(self._follow())
        self._following.add_done_callback(self._over)

    async def _follow(self) -> int:
        try:
            self._execution = await self._execute(self._take, self._take_errors)
        except (RefusedError, ValueError):
            self._may_run = False
            raise
        self._started.set()
        try:
            code = await self._execution.wait()
        finally:
            await self._execution.detach()
        self._may_run = False
        return code

    def _over(self, following: asyncio.Future[int]) -> None:
        for event in (self._started, self._supervised, self._news):
            event.set()
        if not following.cancelled():
            following.exception()  # retrieved, so that asyncio does not log it

    async def _take(self, data: bytes) -> None:
        if not self._supervised.is_set():
            data = self._without_header(data)
        while len(self._unread) >= MAX_UNREAD and not self._is_stopped:
            self._room.clear()
            await self._room.wait()
        if not self._is_stopped and self._failed is None:
            self._unread += data
            self._news.set()

    def _without_header(self, data: bytes) -> bytes:
        """Read the PIDs, once their line is complete, and return the output that follows it."""
        line, newline, rest = (self._header + data).partition(b"\n")
        if not newline and len(line) <= _MAX_HEADER:
            self._header = line
            return b""
        words = line.split()
        if len(words) == scripts.NUMBERS and all(word.isdigit() for word in words):
            self._pids = [int(word) for word in words]
        else:  # Docker prints why it could not start a command
            reason = (line + rest)[:1000].decode("utf-8", "replace").strip()
            self._failed = SandboxError(f"the sandbox could not start a command: {reason}")
        self._supervised.set()
        return rest

    async def _take_errors(self, data: bytes) -> None:
        self._errors.add(data)

    async def started(self, *, is_supervised: bool) -> None:
        """Wait until the service has started the command.

        Args:
            is_supervised: Wait until its supervisor runs as well.

        Raises:
            SandboxError: If it does not start within `START_S`.
        """
        async with time_limit(START_S):
            await (self._supervised if is_supervised else self._started).wait()
        if self._execution is None or (is_supervised and self._pids is None):
            self.result()

    async def communicate(self, stdin: bytes, stdout: Callable[[bytes], object]) -> int:
        """Send the input, which need not be read, and deliver the output to its end.

        Args:
            stdin: The input.
            stdout: Receives the output.

        Returns:
            The exit code, -n for signal n.
        """
        feeding = asyncio.ensure_future(self._feed(stdin))
        try:
            while data := await self.receive():
                stdout(data)
        finally:
            feeding.cancel()
        return self.result()

    async def _feed(self, data: bytes) -> None:
        if data:
            with contextlib.suppress(EOFError, SandboxError):  # `result` raises the SandboxError
                await self.send(data)

    async def send(self, data: bytes) -> None:
        """Write to the stdin of the process. All of `data` is sent, also if the caller is cancelled.

        Args:
            data: Bytes to write.

        Raises:
            EOFError: If the process has closed its stdin.
        """
        if not self.is_running:
            raise EOFError(f"the process has closed its stdin: {self._ending()}")
        writing = asyncio.ensure_future(self._write(data))
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([writing, self._following], return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            writing.cancel()
            raise EOFError("the process has closed its stdin")
        writing.result()

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            assert self._execution is not None
            try:
                for start in range(0, len(data), MAX_WRITE):
                    await self._execution.write(data[start : start + MAX_WRITE])
            except SandboxError as error:  # part of its input is lost
                self._failed = self._failed or error
                self._following.cancel()
                raise

    async def receive(self) -> bytes:
        """Return output of the process; b"" at the end.

        Raises:
            SandboxError: If the sandbox, or the connection to it, is lost.
        """
        while not self._unread and self.is_running:
            self._news.clear()
            await self._news.wait()
        data = bytes(self._unread)
        self._unread.clear()
        self._room.set()
        if not data and not self._is_stopped:
            self.result()
        return data

    async def kill(self) -> None:
        """End the process and its process group. If that is not certain within `END_S`, end its machine."""
        self._is_stopped = True
        self._room.set()
        await run_to_completion(self._kill())

    async def _kill(self) -> None:
        if not self._may_run:
            return
        reason = ""
        try:
            async with asyncio.timeout(END_S):
                await self._supervised.wait()
                if self._pids is not None:
                    await self._kill_command(self._pids)
                await asyncio.wait([self._following])
                self._may_run = self._may_run and self._pids is None
        except TimeoutError:
            reason = f"it was still running after {END_S:g} s"
        except SandboxError as error:
            reason = str(error)
        self._following.cancel()
        await asyncio.wait([self._following])
        if self._may_run:
            self._may_run = False
            await self._give_up(reason or self._ending())

    async def wait(self) -> str:
        """Wait until the process has ended. Return how it ended."""
        await asyncio.wait([self._following])
        if self._following.cancelled() or (self._is_stopped and self._following.exception() is not None):
            return "ended with its sandbox"
        return describe_exit(self.result())

    def errors(self) -> str:
        """Return the head and the tail of what the process has written to stderr so far."""
        return self._errors.text()

    @property
    def is_running(self) -> bool:
        """Return whether the process is not known to have ended."""
        return not self._following.done()

    def abandon(self) -> None:
        """Stop reading, because its machine is gone. May be called on any event loop."""
        self._is_stopped, self._may_run = True, False
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._following.cancel)

    def result(self) -> int:
        """Return the exit code of a process that has ended, -n for signal n.

        Raises:
            SandboxError: If the process was lost, or its supervisor did not run.
        """
        if self._failed is not None:
            raise self._failed
        if self._following.cancelled():
            raise SandboxError("the process ended with its sandbox")
        code = self._following.result()
        if self._pids is None:
            raise SandboxError(f"the shell in the sandbox did not run the command: it ended with {code}")
        return signed_exit_code(code)

    def _ending(self) -> str:
        try:
            return describe_exit(self.result())
        except SandboxError as error:
            return str(error)
