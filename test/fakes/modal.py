"""A fake of Modal: the gRPC services that its SDK calls, with local processes in place of containers.

It tests our side. It isolates nothing, and tests nothing that Modal does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import sys
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self

from google.protobuf.message import Message
from grpclib import GRPCError, Status
from grpclib.const import Handler
from grpclib.server import Server
from helpers.connections import stop_listening
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as router
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from fakes.modal_containers import Container, Execution

if TYPE_CHECKING:
    import modal

_TOKEN = ("ak-fake", "as-fake")
_JWT = ".".join(("e30", base64.urlsafe_b64encode(b'{"exp":4102444800}').decode(), "fake"))
_CHUNK = 1 << 16
_SUCCESS = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)

Answer = Callable[[Any], Awaitable[Message]]
Answers = Callable[[Any], AsyncGenerator[Message]]


class FakeModal:
    """Modal on this machine. An async context manager.

    A path below /work in the words of a command becomes one in a temporary folder.

    Attributes:
        requests: Requests so far: method and message.
        containers: Running containers, by sandbox id.
        relay: The connection to commands in the containers, which can be cut.
        path: PATH of their images.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.containers: dict[str, Container] = {}
        self.path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
        self._failures: dict[str, list[tuple[Status, bool]]] = {}
        self._holds: dict[str, Hold] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        port = await self._serve(ModalClientBase, self._control())
        self.url = f"http://127.0.0.1:{port}"
        self.relay = Relay(await self._serve(TaskCommandRouterBase, self._router()))
        await self._stack.enter_async_context(self.relay)
        self._stack.push_async_callback(self.lose)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def client(self, token: tuple[str, str] = _TOKEN) -> modal.Client:
        """Return a client of this fake, an async context manager, that ignores the environment."""
        import modal

        return modal.Client(self.url, api.CLIENT_TYPE_CLIENT, token)

    def asked(self, method: str) -> list[Any]:
        """Return the requests of one method."""
        return [request for name, request in self.requests if name == method]

    def fail(self, method: str, *statuses: Status, done: bool = False) -> None:
        """Make the next calls of a method fail.

        Args:
            method: The method.
            statuses: Status of each call.
            done: Do what was requested all the same.
        """
        self._failures.setdefault(method, []).extend((status, done) for status in statuses)

    def hold(self, method: str) -> Hold:
        """Make the next call of a method wait between its execution and its answer."""
        self._holds[method] = Hold()
        return self._holds[method]

    async def lose(self) -> None:
        """End all containers, as Modal does at their timeout."""
        for name in list(self.containers):
            await self.containers.pop(name).end()

    async def _serve(self, base: Any, answers: Mapping[str, Answer | Answers]) -> int:
        service = SimpleNamespace(__mapping__=lambda: self._handlers(base, answers))
        server = Server([service])  # pyright: ignore[reportArgumentType]  it asks for no more than the mapping
        # With the protocol named, because asyncio otherwise keeps Nagle's algorithm: 40 ms for each answer.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.bind(("127.0.0.1", 0))
        await server.start(sock=listening)
        self._stack.push_async_callback(server.wait_closed)
        self._stack.callback(server.close)
        return listening.getsockname()[1]

    def _handlers(self, base: Any, answers: Mapping[str, Answer | Answers]) -> dict[str, Handler]:
        """Return handlers for the methods of the service; those without answers are unimplemented."""
        names = [name for name in dir(base) if name[0].isupper()]
        mapping: dict[str, Handler] = base.__mapping__(SimpleNamespace(**dict.fromkeys(names)))
        found = {path: path.rpartition("/")[2] for path in mapping}
        return {
            path: mapping[path]._replace(func=self._handler(name, answers[name]))
            for path, name in found.items()
            if name in answers
        }

    def _handler(self, name: str, answer: Answer | Answers) -> Callable[[Any], Awaitable[None]]:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message()
            self.requests.append((name, request))
            if stream.metadata.get("x-modal-token-id", _TOKEN[0]) != _TOKEN[0]:
                raise GRPCError(Status.UNAUTHENTICATED, "no such token")
            failure, done = self._failures[name].pop(0) if self._failures.get(name) else (None, False)
            failed = GRPCError(failure or Status.OK, f"{name} was told to fail")
            if failure is not None and not done:
                raise failed
            given = answer(request)
            if isinstance(given, AsyncGenerator):
                async with contextlib.aclosing(given):
                    async for message in given:
                        await stream.send_message(message)
                return
            message = await given
            if failure is not None:
                raise failed
            if name in self._holds:
                await self._holds.pop(name).wait()
            await stream.send_message(message)

        return handle

    def _control(self) -> dict[str, Answer | Answers]:
        async def token(request: Any) -> Message:
            return api.AuthTokenGetResponse(token=_JWT)

        async def app(request: Any) -> Message:
            return api.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}")

        async def environment(request: Any) -> Message:
            settings = api.EnvironmentSettings(image_builder_version="2025.06")
            return api.EnvironmentGetOrCreateResponse(
                environment_id="en-1", metadata=api.EnvironmentMetadata(name="main", settings=settings)
            )

        async def image(request: Any) -> Message:
            return api.ImageGetOrCreateResponse(image_id="im-1", result=_SUCCESS)

        async def create(request: api.SandboxCreateV2Request) -> Message:
            name = f"sb-fake{uuid.uuid4().hex}"
            self.containers[name] = Container(
                {tag.tag_name: tag.tag_value for tag in request.tags}, self.path
            )
            access = api.CommandRouterAccess(url=self.relay.url, jwt=_JWT)
            return api.SandboxCreateV2Response(
                sandbox_id=name, task_id=_task(name), command_router_access=access
            )

        async def access(request: api.SandboxGetCommandRouterAccessRequest) -> Message:
            return api.SandboxGetCommandRouterAccessResponse(url=self.relay.url, jwt=_JWT)

        async def found(request: api.SandboxListRequest) -> Message:
            wanted = {tag.tag_name: tag.tag_value for tag in request.tags}.items()
            names = [name for name, container in self.containers.items() if wanted <= container.tags.items()]
            first = not request.before_timestamp
            return api.SandboxListResponse(
                sandboxes=[api.SandboxInfo(id=name, created_at=1.0) for name in names if first]
            )

        async def terminate(request: api.SandboxTerminateRequest) -> Message:
            container = self.containers.pop(request.sandbox_id, None)
            if container is not None:
                await container.end()
            return api.SandboxTerminateResponse()

        return {
            "AuthTokenGet": token,
            "AppGetOrCreate": app,
            "EnvironmentGetOrCreate": environment,
            "ImageGetOrCreate": image,
            "SandboxCreateV2": create,
            "SandboxGetCommandRouterAccess": access,
            "SandboxListV2": found,
            "SandboxTerminateV2": terminate,
        }

    def _router(self) -> dict[str, Answer | Answers]:
        def container(task: str) -> Container:
            for name, found in self.containers.items():
                if _task(name) == task:
                    return found
            raise GRPCError(Status.NOT_FOUND, "no such task; it may have ended")

        def process(request: Any) -> Execution:
            try:
                return container(request.task_id).executions[request.exec_id]
            except KeyError:
                raise GRPCError(Status.NOT_FOUND, "no such command") from None

        async def start(request: router.TaskExecStartRequest) -> Message:
            await container(request.task_id).start(request)
            return router.TaskExecStartResponse()

        async def write(request: router.TaskExecStdinWriteRequest) -> Message:
            await process(request).write(request.offset, request.data, request.eof)
            return router.TaskExecStdinWriteResponse()

        async def read(request: router.TaskExecStdioReadRequest) -> AsyncGenerator[Message]:
            stream = process(request).streams[request.file_descriptor]
            async for data in stream.read(request.offset):
                yield router.TaskExecStdioReadResponse(data=data)
            process(request)

        async def wait(request: router.TaskExecWaitRequest) -> Message:
            code = await process(request).wait()
            process(request)
            if code < 0:
                return router.TaskExecWaitResponse(signal=-code)
            return router.TaskExecWaitResponse(code=code)

        return {
            "TaskExecStart": start,
            "TaskExecStdinWrite": write,
            "TaskExecStdioRead": read,
            "TaskExecWait": wait,
        }


def _task(sandbox: str) -> str:
    return f"ta-{sandbox}-V"


class Hold:
    """A call that waits.

    Attributes:
        reached: Set when the call waits.
        go: Set it to continue the call.
    """

    def __init__(self) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def wait(self) -> None:
        """Wait until the call may continue."""
        self.reached.set()
        await self.go.wait()


class Relay:
    """A connection to a port that can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await stop_listening(self._server)
        self.cut(for_good=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self, *, for_good: bool = False) -> None:
        """Close all connections.

        Args:
            for_good: Accept no new ones either.
        """
        if for_good:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        ends = {writer, back}
        self._writers |= ends
        both = {asyncio.ensure_future(_pass(reader, back)), asyncio.ensure_future(_pass(there, writer))}
        self._tasks |= both
        await asyncio.wait(both)
        self._tasks -= both
        self._writers -= ends


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward data, and its end."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
