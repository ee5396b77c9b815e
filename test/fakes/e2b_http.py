"""The HTTP server of the fake of E2B."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import socket
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from helpers.limit import limit

from fakes.e2b_machine import Machine, Refusal, Running

if TYPE_CHECKING:
    from fakes.e2b import E2BServer


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that was received.

    Attributes:
        body: Its JSON; None if it has none.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(slots=True)
class Fault:
    """A fault for requests to a path.

    Attributes:
        status: Status of the answer; 0 to close the connection, None for a delay only.
        times: Number of requests.
        done: Do what was requested, and lose only the answer.
        hold: Wait for this event before anything else.
    """

    path: str
    status: int | None = 0
    message: str = "injected"
    times: int = 1
    done: bool = False
    hold: threading.Event | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


class Http(http.server.ThreadingHTTPServer):
    """The listening server.

    Attributes:
        fake: Answers the requests.
    """

    daemon_threads = True
    block_on_close = False
    fake: E2BServer

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: set[socket.socket] = set()

    def cut(self) -> None:
        """Close connections that clients keep open, so that no thread outlives the server."""
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(http.server.BaseHTTPRequestHandler):
    """Reads requests and writes answers in HTTP, Connect and E2B's JSON."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Record the connection."""
        super().setup()
        self.fake = cast(Http, self.server).fake
        cast(Http, self.server).connections.add(self.connection)

    def finish(self) -> None:
        """Forget the connection."""
        cast(Http, self.server).connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        """Answer requests until either side closes the connection."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer a GET request."""
        self._answer()

    def do_DELETE(self) -> None:
        """Answer a DELETE request."""
        self._answer()

    def do_POST(self) -> None:
        """Answer a POST request."""
        self._answer()

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        raw = b"".join(self._body())
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = None if headers.get("content-type") == "application/octet-stream" else _json(raw)
        seen = Seen(self.command, url.path, headers, body)
        self.fake.requests.append(seen)
        fault = self.fake.fault_for(url.path)
        if fault is not None and fault.hold is not None:
            fault.hold.wait(limit(10))
        if fault is not None and fault.status is None:
            fault = None
        if fault is not None and not fault.done:
            if not fault.status:
                self._cut()
                return
            self._reply(fault.status, {"code": fault.status, "message": fault.message}, fault.headers)
            return
        try:
            if "e2b-sandbox-id" in headers:
                status, answer = self._envd(seen, lost=fault is not None)
            else:
                status, answer = self.fake.control(seen, query)
        except Refusal as refusal:
            status, answer = refusal.status, refusal.body()
        if fault is not None:
            self._cut()
        elif status:
            self._reply(status, answer)

    def _envd(self, seen: Seen, *, lost: bool) -> tuple[int, Any]:
        machine = self.fake.machines.get(seen.headers["e2b-sandbox-id"])
        if machine is None:
            raise Refusal(502, "The sandbox was not found")
        if seen.headers.get("x-access-token") != machine.token:
            raise Refusal(401, "unauthorized access, please provide a valid access token")
        user = base64.b64decode(seen.headers.get("authorization", "").removeprefix("Basic ")).decode()
        match seen.method, seen.path:
            case "GET", "/health":
                return 204, None
            case "POST", "/process.Process/Start":
                self._follow(machine, seen.body, user.rstrip(":"), lost=lost)
                return 0, None
            case "POST", path:
                return 200, machine.call(path, seen.body)
            case _:
                raise Refusal(404, f"no such endpoint: {seen.method} {seen.path}")

    def _follow(self, machine: Machine, request: Any, user: str, *, lost: bool) -> None:
        """Start a process, and stream its events. It continues if the client disconnects."""
        if lost:
            running = machine.start(request, user)
            self._cut()
            self._stream(machine, running)
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            running = machine.start(request, user)
        except Refusal as refusal:
            self._envelope({"error": refusal.body()}, flags=2)
        else:
            with self.fake.streaming(self.connection, machine):
                self._stream(machine, running)
        self._chunk(b"")

    def _stream(self, machine: Machine, running: Running) -> None:
        for event in machine.follow(running, self.connection):
            try:
                self._envelope({"event": event})
            except OSError:
                running.followed = False
        if not running.followed:
            raise ConnectionAbortedError
        self._envelope({}, flags=2)

    def _envelope(self, message: Any, flags: int = 0) -> None:
        data = json.dumps(message).encode()
        self._chunk(bytes([flags]) + len(data).to_bytes(4, "big") + data)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            yield self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _reply(self, status: int, answer: Any, headers: Mapping[str, str] | None = None) -> None:
        data = answer if isinstance(answer, bytes) else b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        kind = "application/octet-stream" if isinstance(answer, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def _json(raw: bytes) -> Any:
    """Read a body: JSON, or one message of it in a Connect envelope."""
    if not raw:
        return None
    if raw[:1] == b"\0":
        raw = raw[5 : 5 + int.from_bytes(raw[1:5], "big")]
    return json.loads(raw)
