"""`json_app`: common part of the servers: access, bounded JSON bodies, clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.serve.access import (
    Access,
    MemoryBudget,
    RequestQueue,
    RequestRefused,
    UnsupportedMediaType,
)

try:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError:
    raise MissingExtra("a server", "starlette", "serve") from None

Model = TypeVar("Model", bound=BaseModel)
CLIENT_GONE = 499
PING = "/v1/ping"
_PIECE = 1 << 16
"""Bytes of a response that are sent at once; the rest waits here until the client has read them."""
_MAX_ERRORS = 10
"""Maximum number of errors of a request that are reported."""
_MAX_SAID = 400
"""Maximum number of characters of a text in a refusal."""


@dataclass(frozen=True, slots=True)
class PostRoute(Generic[Model]):
    """A path for POST requests.

    Attributes:
        model: Model that bodies are validated with.
        serve: Returns the response to a request, as JSON.
    """

    model: type[Model]
    serve: Callable[[Model], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of the bodies of requests.

    Attributes:
        max_bytes: Maximum bytes of one body.
        max_total_bytes: Maximum bytes of all current requests together.
        timeout_s: Maximum seconds to receive a body.

    Raises:
        ValueError: If a number is not above 0, or the total is smaller than that of one body.
    """

    max_bytes: int
    max_total_bytes: int
    timeout_s: float

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"body_timeout_s must be above 0; got {self.timeout_s}")
        if not 0 < self.max_bytes <= self.max_total_bytes:
            raise ValueError(
                "max_body_bytes must be above 0, and max_total_body_bytes at least as much; "
                f"got {self.max_bytes} and {self.max_total_bytes}"
            )


def json_app(
    posts: Mapping[str, PostRoute[Any]],
    *,
    access: Access,
    admission: RequestQueue,
    limits: BodyLimits,
    start: Callable[[], Awaitable[object]],
) -> Starlette:
    """Return a server with these paths and `GET /v1/ping`.

    A body is read once its request is accepted and has entered the queue. A response is cancelled if its
    client disconnects. `RequestRefused` errors become responses with their status.

    Args:
        posts: Routes by path.
        access: Who may use it; a ping needs no token.
        admission: The queue of requests.
        limits: Limits of bodies: longer ones get status 413, slower ones 408.
        start: Awaited before the first request.
    """
    work = _Work(admission)
    budget = MemoryBudget(limits.max_total_bytes)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        await start()
        try:
            yield
        finally:
            await work.close()

    routes = [
        Route(path, _Endpoint(post, work, admission, budget, limits), methods=["POST"])
        for path, post in posts.items()
    ]
    return Starlette(
        routes=[*routes, Route(PING, _ping)],
        middleware=[Middleware(_Guard, access=access)],
        lifespan=lifespan,
        exception_handlers={HTTPException: _failed, RequestRefused: _refused, Exception: _crashed},
    )


class _Guard:
    """Passes accepted requests to the application."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: dict[str, list[str]] = {}
            for name, value in scope["headers"]:
                headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
            try:
                self._access.check(headers, needs_token=scope["path"] != PING)
            except RequestRefused as error:
                await (await _refused(Request(scope), error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """One path: reads a body, computes the response in a place of the queue, and sends it from there."""

    post: PostRoute[Any]
    work: _Work
    admission: RequestQueue
    budget: MemoryBudget
    limits: BodyLimits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        length = _length(request.headers, self.limits.max_bytes)
        with self.admission.entered(), self.budget.hold(length) as keep:
            try:
                async with asyncio.timeout(self.limits.timeout_s):
                    body = await _body(request, length)
            except TimeoutError:
                said = f"the body did not arrive within {self.limits.timeout_s:g} s"
                raise HTTPException(408, said, {"Connection": "close"}) from None
            except ClientDisconnect:
                return
            keep(len(body))
            wanted = _read(body, self.post.model)
            async with contextlib.AsyncExitStack() as held:
                answer = await self.work.do(request, self.post.serve, wanted, held)
                await _send(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"), send)


class _Work:
    """Running work for clients, cancelled when its client disconnects."""

    def __init__(self, admission: RequestQueue) -> None:
        self._admission = admission
        self._tasks: set[asyncio.Task[Any]] = set()

    async def do(
        self,
        request: Request,
        serve: Callable[[Any], Coroutine[Any, Any, Any]],
        wanted: Any,
        held: contextlib.AsyncExitStack,
    ) -> Any:
        """Do the work once there is a place, which `held` releases, unless the client disconnects before.

        Raises:
            HTTPException: If the client has disconnected; nobody reads the response.
        """

        async def in_place() -> Any:
            await held.enter_async_context(self._admission.place())
            return await serve(wanted)

        task, gone = asyncio.create_task(in_place()), asyncio.create_task(_hung_up(request))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise HTTPException(CLIENT_GONE, "the client disconnected")
            return task.result()
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.wait((task, gone))
            self._tasks.discard(task)

    async def close(self) -> None:
        """Cancel all work, and wait for its cleanup."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _ping(_: Request) -> Response:
    return JSONResponse("pong")


def _length(headers: Headers, max_bytes: int) -> int:
    """Return the maximum length of a JSON body.

    Raises:
        UnsupportedMediaType: If it is not declared as JSON.
        HTTPException: If it is too long, or has two lengths, which servers may interpret differently.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType("the body must be JSON: send the header Content-Type: application/json")
    length = headers.get("content-length", "")
    if length and "transfer-encoding" in headers:
        said = "send either Content-Length or Transfer-Encoding, not both"
        raise HTTPException(400, said, {"Connection": "close"})
    if not length.isdecimal():
        return max_bytes
    if int(length) > max_bytes:
        raise _too_long(max_bytes)
    return int(length)


async def _body(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
    return bytes(body)


def _too_long(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body has more than {max_bytes} bytes, which is the maximum")


def _read(body: bytes, model: type[Model]) -> Model:
    """Parse and validate a body.

    Raises:
        HTTPException: If it is invalid; with the details in FastAPI's format.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        detail: Any = [
            {"type": each["type"], "loc": ["body", *map(_short, each["loc"])], "msg": _short(each["msg"])}
            for each in found[:_MAX_ERRORS]
        ]
        if len(found) > _MAX_ERRORS:
            msg = f"… and {len(found) - _MAX_ERRORS} more"
            detail.append({"type": "more_errors", "loc": ["body"], "msg": msg})
        raise HTTPException(422, detail) from None


def _short(said: Any) -> Any:
    """Cut the middle of a long text: a refusal may quote the request."""
    if isinstance(said, str) and len(said) > _MAX_SAID:
        return f"{said[: _MAX_SAID // 2]} … {said[-_MAX_SAID // 2 :]}"
    return said


async def _send(body: bytes, send: Send) -> None:
    """Send a response in pieces, so that this takes until most of it has been read."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(0, len(body), _PIECE):
        piece = body[at : at + _PIECE]
        await send({"type": "http.response.body", "body": piece, "more_body": at + _PIECE < len(body)})


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return JSONResponse({"detail": _short(str(error))}, error.status, headers=error.headers)


async def _crashed(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": f"a bug in the server: {type(error).__name__}: {error}"}, 500)
