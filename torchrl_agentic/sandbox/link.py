"""`Link`: the host's side of the connection to a supervisor. It matches answers to requests."""

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
"""Maximum bytes of an answer, output excluded; mostly the images of a cell."""
MAX_HEADER = 1 << 20
"""Maximum bytes of the header of an answer: as JSON, it may have half as many values."""
MAX_REQUEST = 72 << 20
"""Maximum bytes of a request."""

Header = dict[str, Any]
Answer: TypeAlias = "asyncio.Future[tuple[Header, list[bytes]]]"


class LinkLost(SandboxError):
    """The supervisor is gone, has sent an invalid message, or was given up.

    Code inside can cause this, unless `cause` is set.

    Args:
        cause: See `cause`.
        why: Why no more messages come, if the stream has no error; "" if it merely ended.

    Attributes:
        cause: Error of the stream itself, such as that of a remote service; None if it has none.
    """

    def __init__(self, cause: SandboxError | None = None, why: str = "") -> None:
        reason = str(cause or why)
        super().__init__(f"the sandbox was lost: {reason}" if reason else "the sandbox was lost")
        self.cause = cause


class ByteStream(Protocol):
    """A byte stream that a link uses."""

    def try_send(self, data: bytes, fds: Sequence[int]) -> int:
        """Send as much as possible without waiting, and return the number of bytes sent.

        Args:
            data: Bytes to send.
            fds: Descriptors of open files to send with the first byte.

        Raises:
            SandboxError: If nothing could be sent now, but may be later.
            EOFError: If the other side is gone.
            OSError: If the other side is gone.
        """
        ...

    async def send(self, data: bytes) -> None:
        """Send all bytes.

        Args:
            data: Bytes to send.

        Raises:
            EOFError: If the other side is gone.
            OSError: If the other side is gone.
        """
        ...

    async def receive(self) -> bytes:
        """Wait for bytes and return them; b"" at the end."""
        ...


class SocketStream:
    """A stream over a Unix socket, which can carry open files.

    Args:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)

    def try_send(self, data: bytes, fds: Sequence[int]) -> int:
        """Send as much as possible without waiting; see `ByteStream.try_send`.

        Args:
            data: Bytes to send.
            fds: Descriptors of open files to send with the first byte.
        """
        try:
            return socket.send_fds(self._socket, [data], list(fds)) if fds else self._socket.send(data)
        except BlockingIOError:
            if fds:
                raise SandboxError("the sandbox is busy: its queue of requests is full") from None
            return 0
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                raise SandboxError("too many open files are in flight over sockets") from None
            raise

    async def send(self, data: bytes) -> None:
        """Send all bytes."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def finish(self) -> None:
        """Close the sending direction. Receiving still works."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    async def receive(self) -> bytes:
        """Wait for bytes and return them."""
        return await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)


class Link:
    """A connection to a supervisor that can carry many requests at the same time.

    Args:
        stream: The stream to the supervisor.
        output_bytes: Maximum bytes that the supervisor keeps of each output stream.
    """

    def __init__(self, stream: ByteStream, *, output_bytes: int) -> None:
        self._stream = stream
        self._max_answer = MAX_ANSWER + 4 * output_bytes
        self._waiting: dict[int, Answer] = {}
        self._count = self._answered = 0
        self._sending = asyncio.Lock()
        self._ended = False
        self.why = ""
        """Why the connection was given up, if the stream has neither an error nor an end; see `LinkLost`."""
        self.cause: SandboxError | None = None
        """Error of the stream that caused the loss, or None; see `LinkLost`."""
        self._reader = asyncio.create_task(self._read())

    @property
    def is_lost(self) -> bool:
        """True if no more requests can be made."""
        return self._ended

    async def ask(
        self, op: str, *fields: bytes, fds: Sequence[int] = (), **header: Any
    ) -> tuple[Header, list[bytes]]:
        """Send a request and wait for its answer.

        Args:
            op: Name of the operation.
            fields: Binary fields of the request.
            fds: Descriptors of open files to send.
            header: Arguments of the operation, as JSON.

        Returns:
            The header and the binary fields of the answer.

        Raises:
            LinkLost: If the supervisor is gone, or ends meanwhile.
            SandboxError: If the supervisor could not do it.
            ValueError: If the request is too long.
        """
        return await (await self.begin(op, *fields, fds=fds, **header))[1]

    async def begin(
        self, op: str, *fields: bytes, fds: Sequence[int] = (), **header: Any
    ) -> tuple[int, Answer]:
        """Send a request. Return its number and a future of its answer.

        Args:
            op: Name of the operation.
            fields: Binary fields of the request.
            fds: Descriptors of open files to send.
            header: Arguments of the operation, as JSON.

        Raises:
            LinkLost: If the supervisor is gone.
            SandboxError: If nothing could be sent now, but may be later.
            ValueError: If the request is too long.
        """
        if self._ended:
            raise LinkLost(self.cause, self.why)
        self._count += 1
        number = self._count
        body = json.dumps({**header, "op": op, "id": number, "files": len(fds)}).encode("ascii")
        data = pack(body, *fields)
        if len(data) > MAX_REQUEST:
            raise ValueError(f"a request has {len(data) >> 20} MiB; the maximum is {MAX_REQUEST >> 20}")
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
            # Continues if the caller is cancelled: the next request must not become the rest of this one.
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
        """Stop reading and fail all requests that wait."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._lose()

    async def ended(self) -> None:
        """Wait until the supervisor has closed the connection."""
        await asyncio.wait((self._reader,))

    async def _read(self) -> None:
        answers = Splitter(self._max_answer)
        try:
            while data := await self._stream.receive():
                for message in answers.feed(data):
                    self._take(message)
        except SandboxError as error:
            self.cause = error
        except BadMessage as error:
            self.why = f"it sent an invalid message ({error})"
        except (OSError, EOFError):
            pass
        finally:
            self._lose()

    def _take(self, message: list[bytes]) -> None:
        """Resolve the future of the request that a message answers.

        Raises:
            BadMessage: If it does not answer a request.
        """
        body, *fields = message
        if len(body) > MAX_HEADER:
            raise BadMessage(f"a header of {len(body)} bytes")
        try:
            header: Any = read_json(body)
            waiting = self._waiting.pop(header["id"], None)
        except (ValueError, TypeError, KeyError):
            raise BadMessage("not an answer") from None
        self._answered += 1
        if self._answered > self._count + 1:  # the zygote's pool has made one request before us
            raise BadMessage("more answers than requests")
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
                answer.set_exception(LinkLost(self.cause, self.why))
                answer.exception()  # retrieved, so that asyncio does not log it as never retrieved
