"""Limits of clients of an HTTP server: number of connections, and time for each step."""

from __future__ import annotations

import asyncio
import functools
import socket
from dataclasses import dataclass, fields
from typing import Any, cast

from torchrl_agentic.errors import MissingExtra

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
except ImportError:
    raise MissingExtra("a server", "uvicorn", "serve") from None

GRACE_S = 5
"""Maximum seconds that running requests may take when the server shuts down."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: 34\r\n\r\n"
    b'{"detail": "too many connections"}'
)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Limits of clients of a server.

    Args:
        max_connections: Number of open connections; further ones get status 503 and are closed.
        header_s: Seconds for the headers of a request, from the start of the connection or from their first
            byte. Between two requests, uvicorn's `timeout_keep_alive` applies.
        body_s: Seconds for the body of a request; a little more than the `body_timeout_s` of the application,
            which still answers.
        answer_s: Seconds for which a client may read nothing of its response.

    Raises:
        ValueError: If a number is not above 0.
    """

    max_connections: int = 512
    header_s: float = 10.0
    body_s: float = 65.0
    answer_s: float = 60.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise ValueError(f"{each.name} must be above 0; got {getattr(self, each.name)}")


DEFAULT_BOUNDS = ConnectionBounds()


def make_server(app: Any, bounds: ConnectionBounds = DEFAULT_BOUNDS) -> uvicorn.Server:
    """Return a server that is not started yet.

    Args:
        app: An ASGI application.
        bounds: Limits of its clients.
    """
    http: Any = functools.partial(_BoundedProtocol, bounds=bounds)
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="auto",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)


class _BoundedProtocol(H11Protocol):
    """A connection that is closed if its client is too slow; uvicorn limits the time between requests."""

    def __init__(self, *args: Any, bounds: ConnectionBounds, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bounds = bounds
        self._awaited: tuple[Any, Any] | None = None
        self._request_deadline: asyncio.TimerHandle | None = None
        self._answer_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # The deadline of a response runs while any of it is unsent, also if the connection is to be closed.
        transport.set_write_buffer_limits(high=0)
        # asyncio does this only for sockets that name their protocol; without it a response takes 40 ms more.
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self._bounds.max_connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_deadline, self._answer_deadline):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_deadline = self.loop.call_later(self._bounds.answer_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answer_deadline is not None:
            self._answer_deadline.cancel()

    def _await_request(self) -> None:
        """Set the deadline for the next data of the client, unless it is the same as before."""
        state = self.conn.their_state
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        seconds = None
        if state is h11.SEND_BODY:
            seconds = self._bounds.body_s
        elif state is h11.IDLE and (cycle is None or self.conn.trailing_data[0]):
            seconds = self._bounds.header_s
        awaited = None if seconds is None else (state, cycle)
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._request_deadline is not None:
            self._request_deadline.cancel()
        if seconds is not None:
            self._request_deadline = self.loop.call_later(seconds, self.transport.abort)
