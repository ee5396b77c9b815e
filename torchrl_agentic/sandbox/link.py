"""The host's side of the connection with a supervisor: requests go in, each gets its answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.inside.wire import BadMessage, Splitter, pack
from torchrl_agentic.text import read_json

MAX_ANSWER = 9 << 20
"""The longest answer that is taken, in bytes, besides output: a cell's images above all."""
MAX_REQUEST = 72 << 20
"""The longest request that is sent, in bytes."""

Header = dict[str, Any]
Answer: TypeAlias = "asyncio.Future[tuple[Header, list[bytes]]]"


class LinkLost(SandboxError):
    """The other side of a link is gone, says what makes no sense, or was given up.

    Code inside can bring that about, unless `cause` says otherwise.

    Attributes:
        cause: Error of the stream itself, say of a remote service; None if the stream merely ended.
    """

    def __init__(self, cause: SandboxError | None = None) -> None:
        super().__init__("the sandbox was lost" if cause is None else f"the sandbox was lost: {cause}")
        self.cause = cause


class Stream(Protocol):
    """What a link sends and receives over."""

    def try_send(self, data: bytes, fds: Sequence[int]) -> int:
        """Send what can be sent at once, and open files along with its first byte; give how much that was.

        Raises:
            SandboxError: nothing was sent, but something may be later.
            EOFError, OSError: the other side is gone.
        """
        ...

    async def send(self, data: bytes) -> None:
        """Send all of it.

        Raises:
            EOFError, OSError: the other side is gone.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for some bytes; empty at the end."""
        ...


class SocketStream:
    """A stream over a socket, along which open files can be sent."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)

    def try_send(self, data: bytes, fds: Sequence[int]) -> int:
        """Send what can be sent at once."""
        try:
            return socket.send_fds(self._socket, [data], list(fds)) if fds else self._socket.send(data)
        except BlockingIOError:
            if fds:
                raise SandboxError("the sandbox has more to do than it can be told") from None
            return 0
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                raise SandboxError("too many open files are on their way") from None
            raise

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def finish(self) -> None:
        """Let the other side see the end, and go on reading."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    async def receive(self) -> bytes:
        """Wait for some bytes."""
        return await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)


class Link:
    """Requests to a supervisor, any number at the same time.

    output_bytes: how much it keeps of each stream.
    """

    def __init__(self, stream: Stream, *, output_bytes: int) -> None:
        self._stream = stream
        self._max_answer = MAX_ANSWER + 4 * output_bytes
        self._waiting: dict[int, Answer] = {}
        self._count = 0
        self._sending = asyncio.Lock()
        self._ended = False
        self.cause: SandboxError | None = None
        """Error of the stream that it was lost by, if that was the cause; see `LinkLost`."""
        self._reader = asyncio.create_task(self._read())

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._ended

    async def ask(
        self, op: str, *fields: bytes, fds: Sequence[int] = (), **header: Any
    ) -> tuple[Header, list[bytes]]:
        """Send a request and wait for its answer.

        Raises:
            LinkLost: The other side is gone, or ends meanwhile.
            SandboxError: The other side could not do it.
            ValueError: the request is too long.
        """
        return await (await self.begin(op, *fields, fds=fds, **header))[1]

    async def begin(
        self, op: str, *fields: bytes, fds: Sequence[int] = (), **header: Any
    ) -> tuple[int, Answer]:
        """Send a request; give its number, and the answer to come.

        Raises:
            LinkLost: The other side is gone.
            SandboxError: Nothing was sent, but something may be later.
        """
        if self._ended:
            raise LinkLost(self.cause)
        self._count += 1
        number = self._count
        body = json.dumps({**header, "op": op, "id": number, "files": len(fds)}).encode("ascii")
        data = pack(body, *fields)
        if len(data) > MAX_REQUEST:
            raise ValueError(f"a request of {len(data) >> 20} MiB; at most {MAX_REQUEST >> 20} MiB are taken")
        answer: Answer = asyncio.get_running_loop().create_future()
        await self._sending.acquire()
        try:
            sent = self._stream.try_send(data, fds)
            self._waiting[number] = answer
        except (OSError, EOFError):
            self._sending.release()
            self._lose()
            raise LinkLost from None
        except BaseException:
            self._sending.release()
            raise
        if sent == len(data):
            self._sending.release()
        else:
            # Not given up when the caller is: what is sent next would be taken for the rest of this.
            await asyncio.shield(asyncio.ensure_future(self._finish(data[sent:])))
        return number, answer

    async def _finish(self, rest: bytes) -> None:
        try:
            await self._stream.send(rest)
        except (OSError, EOFError):
            self._lose()
        finally:
            self._sending.release()

    async def close(self) -> None:
        """Read no more."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._lose()

    async def ended(self) -> None:
        """Wait until the other side has hung up."""
        await asyncio.wait((self._reader,))

    async def _read(self) -> None:
        answers = Splitter(self._max_answer)
        try:
            while data := await self._stream.receive():
                for message in answers.feed(data):
                    self._take(message)
        except SandboxError as error:
            self.cause = error
        except (OSError, EOFError, BadMessage):
            pass
        finally:
            self._lose()

    def _take(self, message: list[bytes]) -> None:
        """Hand an answer to whoever asked.

        Raises:
            BadMessage: It is no answer.
        """
        try:
            body, *fields = message
            header: Any = read_json(body)
            waiting = self._waiting.pop(header["id"], None)
        except (ValueError, TypeError, KeyError):
            raise BadMessage("no answer") from None
        if waiting is None or waiting.done():
            return
        if "failed" in header:
            waiting.set_exception(SandboxError(f"the sandbox could not {header['failed']}"))
        else:
            waiting.set_result((header, fields))

    def _lose(self) -> None:
        self._ended = True
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(LinkLost(self.cause))
                answer.exception()  # looked at, so that asyncio does not complain if nobody else does
