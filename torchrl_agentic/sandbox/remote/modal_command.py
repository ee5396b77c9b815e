"""A command in a Modal sandbox: started, followed, and ended for certain.

What Modal executes cannot be sent a signal, nor be stopped other than by a timeout in whole seconds: a
command is ended by a second one, which kills the process group of the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.remote import scripts
from torchrl_agentic.sandbox.remote.modal_container import modal_errors

if TYPE_CHECKING:
    import modal
    from modal.container_process import ContainerProcess
    from modal.io_streams import StreamReader

START_S = 60.0
"""How long Modal may take to start a command."""
END_S = 5.0
"""How long a command may take to be gone once we want it ended; then its sandbox has to go."""
_REST_S = 1.0
"""How long we wait for the rest of the output of a command that has ended."""
_BACKSTOP_S = 10
"""How long after its wall limit Modal ends a command by itself, should we have died."""
_CHUNK = 1 << 20
_MAX_HEADER = 64


class Command:
    """A command under its supervisor, see `scripts.supervised`; it starts at once.

    stdout, stderr: are given what it prints, piece by piece; while stdout waits, we read no more.
    """

    def __init__(
        self,
        remote: modal.Sandbox,
        words: Sequence[str],
        *,
        stdout: Callable[[bytes], Awaitable[None]],
        stderr: Callable[[bytes], None],
        wall_s: float | None = None,
    ) -> None:
        self._remote = remote
        self._stdout, self._stderr = stdout, stderr
        self._numbers: list[int] | None = None
        self._numbers_known = asyncio.Event()
        # Apart from the task that waits for it: cancelled there, a request under way would start a command
        # that nobody knows of.
        self._starting = asyncio.ensure_future(self._start(words, wall_s))

    async def _start(self, words: Sequence[str], wall_s: float | None) -> ContainerProcess[bytes]:
        from modal.exception import ConflictError, InvalidError

        timeout = None if wall_s is None else math.ceil(wall_s) + _BACKSTOP_S
        with modal_errors("start a command"):
            try:
                process = await self._remote.exec.aio(*words, workdir="/", timeout=timeout, text=False)
            except ConflictError:
                raise
            except InvalidError as error:
                raise ValueError(f"no command for Modal: {error}; put what is long into a file") from None
        self.ended = asyncio.ensure_future(process.wait.aio())
        self.reading = asyncio.ensure_future(self._read(process.stdout))
        self._reading_errors = asyncio.ensure_future(self._read_errors(process.stderr))
        return process

    async def started(self) -> None:
        """Wait until it runs.

        Raises:
            SandboxError: Modal did not start it.
            ValueError: it is too long.
        """
        done, _ = await asyncio.wait([self._starting], timeout=START_S)
        if not done:
            raise SandboxError(f"Modal did not start a command within {START_S:g} s")
        self._starting.result()

    async def follow(self, stdin: bytes | None = None) -> int | None:
        """Give it its stdin, and wait for its exit code; None where Modal stopped it at its time.

        Raises:
            SandboxError: the sandbox is lost, or the connection to it.
        """
        await self.started()
        feeding = asyncio.ensure_future(self._feed(stdin))
        tasks: set[asyncio.Future[Any]] = {self.ended, self.reading, self._reading_errors, feeding}
        try:
            with modal_errors("tell how a command goes on"):
                while not self.ended.done():
                    done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                # The streams end when the last process that holds them is gone; one in a session of its own
                # may keep them.
                readers = (self.reading, self._reading_errors)
                for task in (await asyncio.wait(readers, timeout=_REST_S))[0]:
                    task.result()
                code = self.ended.result()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        if self._numbers is None:
            raise SandboxError(f"the shell in the sandbox did not run the command: it gave exit code {code}")
        return None if code == -1 else code

    async def _feed(self, stdin: bytes | None) -> None:
        if stdin is not None:
            # A command need not read all that it is given.
            with contextlib.suppress(EOFError):
                await self.write(stdin, end=True)

    async def write(self, data: bytes, *, end: bool = False) -> None:
        """Write to its stdin.

        Raises:
            EOFError: it reads no more.
            SandboxError: the connection is lost.
        """
        from modal.exception import InvalidError, NotFoundError

        stdin = self._starting.result().stdin
        with modal_errors("write to a command"):
            try:
                for start in range(0, max(1, len(data)), _CHUNK):
                    stdin.write(data[start : start + _CHUNK])
                    if end and start + _CHUNK >= len(data):
                        stdin.write_eof()
                    await stdin.drain.aio()
            except (InvalidError, NotFoundError):
                raise EOFError("the process reads no more") from None

    async def end(self) -> bool:
        """End it and its process group, where it runs; False if that is not certain within `END_S`."""
        await asyncio.wait([self._starting], timeout=END_S)
        if not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
            return False
        if self._starting.exception() is not None:
            return not _unanswered(self._starting.exception())
        if not self.ended.done():
            with contextlib.suppress(TimeoutError, SandboxError):
                async with asyncio.timeout(END_S):
                    await self._kill()
        gone = self.ended.done()
        if gone:
            await asyncio.wait([self.reading, self._reading_errors], timeout=_REST_S)
        self.stop()
        await asyncio.gather(self.ended, self.reading, self._reading_errors, return_exceptions=True)
        return gone

    async def _kill(self) -> None:
        from modal.stream_type import StreamType

        await self._numbers_known.wait()
        if self._numbers is None:
            return
        words = scripts.kill(self._numbers)
        with modal_errors("end a command"):
            await self._remote.exec.aio(
                *words,
                workdir="/",
                timeout=_BACKSTOP_S,
                stdout=StreamType.DEVNULL,
                stderr=StreamType.DEVNULL,
            )
        await asyncio.wait([self.ended])

    def stop(self) -> None:
        """Read no more and wait no longer; that ends nothing in the sandbox."""
        if self._starting.done() and not self._starting.cancelled() and self._starting.exception() is None:
            for task in (self.ended, self.reading, self._reading_errors):
                task.cancel()

    async def _read(self, stream: StreamReader[bytes]) -> None:
        header = b""
        try:
            async with contextlib.aclosing(aiter(stream)) as chunks:
                async for chunk in chunks:
                    data = chunk
                    if self._numbers is None:
                        line, newline, data = (header := header + chunk).partition(b"\n")
                        if newline or len(header) > _MAX_HEADER:
                            self._numbers = _numbers(line)
                            self._numbers_known.set()
                    if data:
                        await self._stdout(data)
        finally:
            self._numbers_known.set()

    async def _read_errors(self, stream: StreamReader[bytes]) -> None:
        async with contextlib.aclosing(aiter(stream)) as chunks:
            async for chunk in chunks:
                self._stderr(chunk)


def _numbers(line: bytes) -> list[int]:
    words = line.split()
    if len(words) != scripts.NUMBERS or not all(word.isdigit() for word in words):
        raise SandboxError(f"the shell in the sandbox printed {line!r}, not the numbers of processes")
    return [int(word) for word in words]


def _unanswered(error: BaseException | None) -> bool:
    """Whether a request may have been done, although it failed for us."""
    from grpclib.exceptions import StreamTerminatedError
    from modal.exception import ConnectionError, InternalError, ServiceError

    lost = (OSError, StreamTerminatedError, ConnectionError, InternalError, ServiceError)
    return error is not None and isinstance(error.__cause__, lost)
