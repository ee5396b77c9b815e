"""`RemoteProcess`: a command at a service, from its start to its certain end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.process import Capture, describe_exit, signed_exit_code
from torchrl_agentic.sandbox.remote import scripts
from torchrl_agentic.sandbox.remote.sdk_requests import time_limit

Take: TypeAlias = Callable[[bytes], Awaitable[None]]
START_S = 60.0
"""Maximum seconds that a service may take to start a command."""
END_S = 5.0
"""Maximum seconds that a killed command may take to end; after that its machine is ended."""
MAX_UNREAD = 1 << 20
"""Maximum bytes of output that wait for `RemoteProcess.receive`; beyond that the process has to wait."""
_MAX_HEADER = 64


class Execution(Protocol):
    """A command that a service runs, through the SDK of that service."""

    async def wait(self) -> int:
        """Deliver the output to its end. Return the exit code, 128 + n for signal n."""
        ...

    async def write(self, data: bytes) -> None:
        """Write to stdin.

        Args:
            data: Bytes to write.

        Raises:
            EOFError: If the command has closed its stdin.
        """
        ...

    async def detach(self) -> None:
        """Close the connection without ending the command."""
        ...


class ProcessHost(Protocol):
    """The part of `RemoteSandbox` that a process uses."""

    async def execute(
        self,
        machine: Any,
        words: Sequence[str],
        stdout: Take,
        stderr: Take,
        *,
        stdin: bool,
        wall_s: float | None,
    ) -> Execution:
        """Start a command; see `RemoteSandbox.execute`.

        Args:
            machine: Where it runs.
            words: The command and its arguments.
            stdout: Receives output.
            stderr: Receives error output.
            stdin: True if `Execution.write` will be called.
            wall_s: Seconds after which the service may end the command; None for no limit.
        """
        ...

    def may_run(self, error: BaseException | None) -> bool:
        """Return whether the service may have done what was requested although the SDK raised this error."""
        ...

    async def kill_group(self, machine: Any, numbers: Sequence[int]) -> None:
        """End a command.

        Args:
            machine: Where it runs.
            numbers: PIDs that its supervisor printed.
        """
        ...

    async def give_up(self, machine: Any, reason: str) -> None:
        """End a machine because a command could not be ended.

        Args:
            machine: The machine.
            reason: Why, for error messages.
        """
        ...


class RemoteProcess:
    """A command under its supervisor; a `Process`. Use it on the event loop that it was started on.

    Args:
        sandbox: The sandbox that starts and ends it.
        machine: The machine where it runs.
        errors: Keeps its stderr.
        keep: Receives its stdout; None to keep it for `receive`.
    """

    def __init__(
        self,
        sandbox: ProcessHost,
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
        """Start the command and wait until the service has done so.

        Args:
            words: The command and its arguments.
            stdin: True if it gets input.
            wall_s: Seconds after which the service may end it; None for no limit.
        """
        # In its own task: a request that is cancelled on the way could start a command that is never ended.
        self._may_run = True
        self._following = asyncio.ensure_future(self._follow(words, stdin, wall_s))
        self._following.add_done_callback(self._over)
        async with time_limit(START_S):
            await self._begun.wait()
        if self._execution is None:
            self._result()

    async def started(self) -> None:
        """Wait until the supervisor of the command runs.

        Raises:
            SandboxError: If it does not start.
        """
        await self._known.wait()
        if self._numbers is None:
            code = self._result()
            raise SandboxError(
                f"the shell in the sandbox did not run the command: it ended with exit code {code}"
            )

    async def _follow(self, words: Sequence[str], stdin: bool, wall_s: float | None) -> int:
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
            following.exception()  # retrieved, so that asyncio does not log it

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
        """Send the input and wait for the end.

        Args:
            stdin: The input.

        Returns:
            The exit code, -n for signal n.
        """
        feeding = asyncio.ensure_future(self._feed(stdin))
        try:
            await self.started()
            await asyncio.wait([self._following])
        finally:
            feeding.cancel()
        return self._result()

    async def _feed(self, data: bytes) -> None:
        with contextlib.suppress(
            EOFError, SandboxError
        ):  # it need not read everything; `_result` raises if it failed
            if data:
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
                await self._execution.write(data)
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
        if not data and not self._stopped:
            self._result()
        return data

    async def kill(self) -> None:
        """End the process and its process group. If that is not certain within `END_S`, end its machine."""
        self._stopped = True
        self._room.set()
        await run_to_completion(self._kill())

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
            reason = f"it was still running after {END_S:g} s"
        except SandboxError as error:
            reason = str(error)
        self._following.cancel()
        await asyncio.wait([self._following])
        if self._may_run:
            self._may_run = False
            await self._sandbox.give_up(self._machine, reason or self._ending())

    async def wait(self) -> str:
        """Wait until the process has ended. Return how it ended."""
        await asyncio.wait([self._following])
        if self._following.cancelled() or (self._stopped and self._following.exception() is not None):
            return "ended with its sandbox"
        return describe_exit(self._result())

    def errors(self) -> str:
        """Return the head and the tail of what the process has written to stderr so far."""
        return self._errors.text()

    @property
    def is_running(self) -> bool:
        """Return whether the process is not known to have ended."""
        return not self._following.done()

    def abandon(self) -> None:
        """Stop reading, because its machine is gone. May be called on any event loop."""
        self._stopped, self._may_run = True, False
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._following.cancel)

    def _ending(self) -> str:
        try:
            return describe_exit(self._result())
        except SandboxError as error:
            return str(error)

    def _result(self) -> int:
        if self._failed is not None:
            raise self._failed
        if self._following.cancelled():
            raise SandboxError("the process ended with its sandbox")
        return signed_exit_code(self._following.result())


def _numbers(line: bytes) -> list[int] | None:
    words = line.split()
    valid = len(words) == scripts.NUMBERS and all(word.isdigit() for word in words)
    return [int(word) for word in words] if valid else None
