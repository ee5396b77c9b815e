"""A fake Docker daemon on a Unix socket: the real wire format, with plain local processes for containers.

It answers, attaches, multiplexes and fails as Docker 20.10 does, with the same messages. Nothing is isolated
or limited: such parts of a request are only recorded, for tests to check.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from helpers.connections import stop_listening

from fakes.docker_container import PIECE, FakeContainer, FakeExec

API = "1.41"


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the daemon.

    Attributes:
        path: Path without the version, with the name or id as requested.
    """

    method: str
    path: str
    query: Mapping[str, str]
    body: Mapping[str, Any]

    def matches(self, pattern: str) -> bool:
        """Return whether its method and path match a regular expression, such as "POST /exec/.*/start"."""
        return re.fullmatch(pattern, f"{self.method} {self.path}") is not None


@dataclass(slots=True)
class _Fault:
    pattern: str
    status: int | None
    message: str
    times: int


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self) -> Request:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, target, _ = head.split(" ", 2)
        length = re.search(r"(?i)\r\ncontent-length: *(\d+)", head)
        data = await self.reader.readexactly(int(length[1]) if length else 0)
        url = urlsplit(target)
        return Request(method, url.path, dict(parse_qsl(url.query)), json.loads(data or b"{}"))

    def answer(self, status: int, body: Any = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        kind = "Content-Type: application/json\r\n" if data else ""
        self._head(status, HTTPStatus(status).phrase, f"{kind}Content-Length: {len(data)}\r\n", data)

    def upgrade(self) -> None:
        kind = "Content-Type: application/vnd.docker.raw-stream\r\n"
        self._head(101, "UPGRADED", f"{kind}Connection: Upgrade\r\nUpgrade: tcp\r\n", b"")

    def _head(self, status: int, phrase: str, headers: str, data: bytes) -> None:
        self.writer.write(
            f"HTTP/1.1 {status} {phrase}\r\nApi-Version: {API}\r\n{headers}\r\n".encode() + data
        )


class FakeDocker:
    """The daemon. An async context manager.

    Attributes:
        images: Names of its images.
        path: PATH of the images.
        late_s: Seconds from the end of its output until a command is reported as ended.
        ending_s: Seconds from the end of the commands of a container that ends until it is reported as ended.
        requests: Requests so far.
        containers: Containers by id, without those that were removed.
    """

    def __init__(self, *, images: Sequence[str] = ("python:3.12-slim",)) -> None:
        self.images = set(images)
        self.path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        self.late_s = self.ending_s = 0.0
        self.requests: list[Request] = []
        self.containers: dict[str, FakeContainer] = {}
        self._execs: dict[str, FakeExec] = {}
        self._faults: list[_Fault] = []
        self._pauses: dict[str, asyncio.Event] = {}
        self._connections: set[_Connection] = set()
        self._streams: set[_Connection] = set()
        self._tasks: set[asyncio.Future[None]] = set()
        self._server: asyncio.Server | None = None
        self._folder = ""

    @property
    def url(self) -> str:
        """The URL of the daemon, once it listens."""
        return f"unix://{self._folder}/docker.sock"

    async def __aenter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="fake-docker-")
        self._server = await asyncio.start_unix_server(self._connected, f"{self._folder}/docker.sock")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await stop_listening(self._server)
        self.stop()
        for container in list(self.containers.values()):
            await container.remove()
        await asyncio.gather(*self._tasks)
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """Close all connections and accept no more. Containers continue."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.writer.transport.abort()
        for passed in self._pauses.values():
            passed.set()

    def cut(self) -> None:
        """Close the connections to the streams of commands, which continue."""
        for connection in self._streams:
            connection.writer.transport.abort()

    def fail(self, pattern: str, status: int | None, message: str = "out of luck", *, times: int = 1) -> None:
        """Answer the next matching requests with an error; see `Request.matches`.

        Args:
            pattern: Regular expression of the requests.
            status: Status of the answer; None to close the connection after doing what was requested.
            message: Message of the answer.
            times: Number of requests.
        """
        self._faults.append(_Fault(pattern, status, message, times))

    def pause(self, pattern: str) -> asyncio.Event:
        """Delay matching requests until the returned event is set; see `Request.matches`."""
        return self._pauses.setdefault(pattern, asyncio.Event())

    def asked(self, pattern: str) -> list[Request]:
        """Return the requests that match."""
        return [request for request in self.requests if request.matches(pattern)]

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(self._serve(_Connection(reader, writer)))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: _Connection) -> None:
        self._connections.add(connection)
        try:
            while await self._one(connection):
                await connection.writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has disconnected
        finally:
            self._connections.discard(connection)
            self._streams.discard(connection)
            connection.writer.close()

    async def _one(self, connection: _Connection) -> bool:
        """Answer one request. Return whether others may follow on this connection."""
        asked = await connection.request()
        versioned = re.fullmatch(r"/v(\d+)\.(\d+)(/.*)", asked.path)
        request = Request(asked.method, versioned[3] if versioned else asked.path, asked.query, asked.body)
        self.requests.append(request)
        try:
            if versioned and [int(versioned[1]), int(versioned[2])] > [int(part) for part in API.split(".")]:
                raise _RefusedError(400, f"client version is too new. Maximum supported API version is {API}")
            for pattern, passed in self._pauses.items():
                if request.matches(pattern):
                    await passed.wait()
            fault = self._fault(request)
            if fault is not None:
                return await self._go_wrong(fault, request)
            if (stream := self._stream(request, connection)) is not None:
                connection.upgrade()
                await stream
                return False
            connection.answer(*await self._answer(request))
        except _RefusedError as error:
            connection.answer(error.status, {"message": str(error)})
        return True

    async def _go_wrong(self, fault: _Fault, request: Request) -> bool:
        if fault.status is not None:
            raise _RefusedError(fault.status, fault.message)
        with contextlib.suppress(_RefusedError):
            await self._answer(request)
        return False

    def _fault(self, request: Request) -> _Fault | None:
        for fault in self._faults:
            if request.matches(fault.pattern):
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
                return fault
        return None

    def _stream(self, request: Request, connection: _Connection) -> Coroutine[Any, Any, None] | None:
        """Return the work that takes over the connection, or None if the request does not ask for that."""
        match request.method, request.path.split("/")[1:]:
            case "POST", ["containers", name, "attach"]:
                return self._attach(self._container(name), connection)
            case "POST", ["exec", name, "start"]:
                execution = self._exec(name)
                if execution.code is not None or execution.is_running:
                    raise _RefusedError(409, f"Error: Exec command {name} has already run")
                self._streams.add(connection)
                return execution.run(connection.reader, connection.writer)
            case _:
                return None

    async def _answer(self, request: Request) -> tuple[int, Any]:
        match request.method, request.path.split("/")[1:]:
            case "GET" | "HEAD", ["_ping"]:
                return 200, None
            case "GET", ["version"]:
                return 200, {"Version": "20.10.24", "ApiVersion": API, "MinAPIVersion": "1.12", "Os": "linux"}
            case "POST", ["containers", "create"]:
                return self._create(request.query.get("name", ""), request.body)
            case "GET", ["containers", name, "json"]:
                found = self._container(name)
                state = {"Running": found.is_running, "Status": "running" if found.is_running else "exited"}
                return 200, {
                    "Id": found.id,
                    "Name": f"/{found.name}",
                    "State": state,
                    "Config": {"Tty": False},
                }
            case "POST", ["containers", name, "start"]:
                return await self._start(self._container(name))
            case "POST", ["containers", name, "kill"]:
                await self._running(name).kill()
                return 204, None
            case "DELETE", ["containers", name]:
                return await self._delete(self._container(name), force="force" in request.query)
            case "POST", ["containers", name, "exec"]:
                execution = FakeExec(secrets.token_hex(32), self._running(name), request.body, self.late_s)
                self._execs[execution.id] = execution
                return 201, {"Id": execution.id}
            case "GET", ["exec", name, "json"]:
                return 200, self._exec(name).state()
            case _:
                raise _RefusedError(404, "page not found")

    def _container(self, name: str) -> FakeContainer:
        for container in self.containers.values():
            if name in (container.id, container.name):
                return container
        raise _RefusedError(404, f"No such container: {name}")

    def _running(self, name: str) -> FakeContainer:
        container = self._container(name)
        if not container.is_running:
            raise _RefusedError(409, f"Container {container.id} is not running")
        return container

    def _exec(self, name: str) -> FakeExec:
        execution = self._execs.get(name)
        if execution is None or execution.container.id not in self.containers:
            raise _RefusedError(404, f"No such exec instance: {name}")
        return execution

    def _create(self, name: str, config: Mapping[str, Any]) -> tuple[int, Any]:
        if config["Image"] not in self.images:
            raise _RefusedError(404, f"No such image: {config['Image']}")
        if not config.get("Entrypoint") and not config.get("Cmd"):
            raise _RefusedError(400, "No command specified")
        if any(name == other.name for other in self.containers.values()):
            raise _RefusedError(409, f'Conflict. The container name "/{name}" is already in use')
        number = secrets.token_hex(32)
        folder = f"{self._folder}/{number[:12]}"
        self.containers[number] = FakeContainer(number, name, config, folder, self.path, self.ending_s)
        return 201, {"Id": number, "Warnings": []}

    async def _start(self, container: FakeContainer) -> tuple[int, Any]:
        if container.is_running:
            return 304, None
        try:
            await container.boot()
        except OSError as error:
            raise _RefusedError(
                400, f"failed to create shim task: OCI runtime create failed: {error}"
            ) from error
        self._keep(self._watch(container))
        return 204, None

    async def _watch(self, container: FakeContainer) -> None:
        """End a container when its first process has ended."""
        assert container.init is not None
        await container.init.wait()
        await container.kill()
        if container.config.get("HostConfig", {}).get("AutoRemove"):
            await self._delete(container, force=True)

    async def _delete(self, container: FakeContainer, *, force: bool) -> tuple[int, Any]:
        if container.is_running and not force:
            raise _RefusedError(409, f"You cannot remove a running container {container.id}")
        self.containers.pop(container.id, None)
        await container.remove()
        return 204, None

    async def _attach(self, container: FakeContainer, connection: _Connection) -> None:
        with contextlib.suppress(ConnectionError):
            while await connection.reader.read(PIECE):
                pass
        container.abandon()
