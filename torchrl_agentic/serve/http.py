"""What our servers have in common: JSON that is checked and bounded, errors as JSON, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.serve.refusals import Refused

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError:
    raise MissingExtra("a server", "starlette", "serve") from None

Model = TypeVar("Model", bound=BaseModel)
CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Post(Generic[Model]):
    """What a path does: the model that bodies are checked with, and what makes the answer, as JSON."""

    model: type[Model]
    serve: Callable[[Model], Coroutine[Any, Any, Any]]


def json_app(
    posts: Mapping[str, Post[Any]], *, max_body_bytes: int, start: Callable[[], Awaitable[object]]
) -> Starlette:
    """Make a server with these paths and `GET /v1/ping`.

    An answer that nobody waits for any more is cancelled. `Refused` errors become answers with their status.

    Args:
        posts: what each path does.
        max_body_bytes: longer bodies are answered with status 413.
        start: awaited before the first request.
    """
    work = _Work()

    def endpoint(post: Post[Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            wanted = await _read(request, post.model, max_body_bytes)
            return JSONResponse(await work.do(request, post.serve(wanted)))

        return answer

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        await start()
        try:
            yield
        finally:
            await work.close()

    routes = [Route(path, endpoint(post), methods=["POST"]) for path, post in posts.items()]
    return Starlette(
        routes=[*routes, Route("/v1/ping", _ping)],
        lifespan=lifespan,
        exception_handlers={HTTPException: _failed, Refused: _refused, Exception: _crashed},
    )


class _Work:
    """What is being done for clients; it is cancelled once nobody waits for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def do(self, request: Request, work: Coroutine[Any, Any, Any]) -> Any:
        """Do it, unless the client hangs up before.

        Raises:
            HTTPException: it has; nobody reads the answer.
        """
        task, gone = asyncio.create_task(work), asyncio.create_task(_hung_up(request))
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


async def _read(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Read the body of a request.

    Raises:
        HTTPException: it is too long, or not what is expected; says so as FastAPI does.
    """
    try:
        return model.model_validate_json(await _body(request, max_bytes))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        detail: Any = [{**each, "loc": ("body", *each["loc"])} for each in found]
        raise HTTPException(422, detail) from None


async def _body(request: Request, max_bytes: int) -> bytes:
    too_long = HTTPException(413, f"a body of more than {max_bytes} bytes, which is the most that is taken")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_long
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise too_long
    return bytes(body)


async def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse({"detail": str(error)}, error.status, headers=error.headers)


async def _crashed(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": f"a bug in the server: {type(error).__name__}: {error}"}, 500)
