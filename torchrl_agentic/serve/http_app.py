"""What our servers have in common: who is served, JSON that is checked and bounded, clients that leave."""

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
"""How much of an answer is sent at once: the rest waits here until the client has read."""
_MAX_ERRORS = 10
"""How many errors of a request are told."""
_MAX_SAID = 400
"""How long a text of a refusal may be."""


@dataclass(frozen=True, slots=True)
class PostRoute(Generic[Model]):
    """What a path does: the model that bodies are checked with, and what makes the answer, as JSON."""

    model: type[Model]
    serve: Callable[[Model], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What requests may take: each, all that are under way together, and how long a body may take to come."""

    max_bytes: int
    max_total_bytes: int
    timeout_s: float

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"body_timeout_s must be above 0; got {self.timeout_s}")
        if not 0 < self.max_bytes <= self.max_total_bytes:
            raise ValueError(
                "max_body_bytes must be above 0, and max_total_body_bytes no less; "
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
    """Make a server with these paths and `GET /v1/ping`.

    A body is read once its request is to be served and has entered. An answer that nobody waits for any more
    is cancelled. `Refused` errors become answers with their status.

    Args:
        posts: what each path does.
        access: who is served; a ping needs no token.
        admission: gives the places in which answers are made.
        limits: of bodies: longer ones are answered with status 413, slower ones with 408.
        start: awaited before the first request.
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
    """Lets those requests through that are served."""

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
    """One path: reads a body, makes the answer in a place, and keeps that until the client has read it."""

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
                said = f"the body has not come within {self.limits.timeout_s:g} s"
                raise HTTPException(408, said, {"Connection": "close"}) from None
            except ClientDisconnect:
                return
            keep(len(body))
            wanted = _read(body, self.post.model)
            async with contextlib.AsyncExitStack() as held:
                answer = await self.work.do(request, self.post.serve, wanted, held)
                await _send(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"), send)


class _Work:
    """What is being done for clients; it is cancelled once nobody waits for it."""

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
        """Do it as soon as there is a place, which `held` gives back, unless the client hangs up before.

        Raises:
            HTTPException: it has; nobody reads the answer.
        """

        async def in_place() -> Any:
            await held.enter_async_context(self._admission.place())
            return await serve(wanted)

        task, gone = asyncio.create_task(in_place()), asyncio.create_task(_hung_up(request))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise HTTPException(CLIENT_GONE, "the client hung up")
            return task.result()
        finally:
            gone.cancel()
            task.cancel()
            await asyncio.wait((task, gone))
            self._tasks.discard(task)

    async def close(self) -> None:
        """Cancel all, and wait until everything has been cleared up."""
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
    """Return how long a body of JSON will be at most.

    Raises:
        Unsupported: it is not JSON, as far as its sender says.
        HTTPException: it is too long, or comes with two lengths, of which servers believe one or the other.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType("the body has to be JSON: send the header Content-Type: application/json")
    length = headers.get("content-length", "")
    if length and "transfer-encoding" in headers:
        said = "a body has Content-Length or Transfer-Encoding, not both"
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
    return HTTPException(413, f"a body of more than {max_bytes} bytes, which is the most that is taken")


def _read(body: bytes, model: type[Model]) -> Model:
    """Read a body.

    Raises:
        HTTPException: it is not what is expected; says so as FastAPI does.
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
    """Leave out the middle of a long text: a refusal may quote what was sent."""
    if isinstance(said, str) and len(said) > _MAX_SAID:
        return f"{said[: _MAX_SAID // 2]} … {said[-_MAX_SAID // 2 :]}"
    return said


async def _send(body: bytes, send: Send) -> None:
    """Send an answer in pieces, so that this takes until most of it has been read."""
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
