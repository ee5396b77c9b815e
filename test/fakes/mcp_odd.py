"""An MCP server whose tools answer with odd bytes, the same over stdio, streamable HTTP and SSE.

Only the standard library is imported for stdio: `python mcp_odd.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

X = {"content": [{"type": "text", "text": "x"}]}
PROGRESS = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "hi"}}


def answer(number: object, result: object = X, **more: object) -> dict[str, Any]:
    """Return an answer."""
    return {"jsonrpc": "2.0", "id": number, "result": result, **more}


def dumps(*messages: object, **options: Any) -> bytes:
    """Return messages as JSON, one behind the other."""
    return "".join(json.dumps(message, **options) for message in messages).encode()


def says(text: str) -> Callable[[object], bytes]:
    """Return a tool whose answer has a text, which may be any bytes of Latin-1 inside a JSON string."""
    return lambda number: dumps(answer(number)).replace(b'"x"', b'"' + text.encode("latin-1") + b'"')


def results(result: object) -> Callable[[object], bytes]:
    """Return a tool that answers with a result."""
    return lambda number: dumps(answer(number, result))


def blocks(*content: object) -> Callable[[object], bytes]:
    """Return a tool that answers with content."""
    return results({"content": list(content)})


def structured(value: str) -> Callable[[object], bytes]:
    """Return a tool whose structured content is some JSON."""
    return lambda number: dumps(answer(number, {"structuredContent": {"v": "?"}})).replace(
        b'"?"', value.encode()
    )


def errors(error: object, **more: object) -> Callable[[object], bytes]:
    """Return a tool that answers with an error."""
    return lambda number: dumps({"jsonrpc": "2.0", "id": number, "error": error, **more})


TOOLS: dict[str, Callable[[Any], bytes]] = {
    "half_emoji": says("party \\ud83c"),
    "latin_1": says("caf\xe9"),
    "control": says("a\x01b\tc"),
    "newline": says("a\nb"),
    "bom": lambda number: b"\xef\xbb\xbf" + dumps(answer(number)),
    "many_digits": structured("9" * 5000),
    "not_a_number": structured("NaN"),
    "deep": structured("[" * 3000 + "]" * 3000),
    "cut": lambda number: dumps(answer(number))[:-8],
    "pretty": lambda number: dumps(answer(number), indent=2),
    "no_jsonrpc": lambda number: dumps({"id": number, "result": X}),
    "text_id": lambda number: dumps(answer(str(number))),
    "float_id": lambda number: dumps(answer(float(number))),
    "null_id": lambda number: dumps(answer(None)),
    "list_id": lambda number: dumps(answer([number])),
    "no_id": lambda number: dumps({"jsonrpc": "2.0", "result": X}),
    "nobody": lambda number: dumps(answer(999_999, {"content": []}), answer(number)),
    "twice": lambda number: dumps(answer(number), answer(number, {"content": []})),
    "two_in_a_line": lambda number: dumps(PROGRESS, answer(number)),
    "batch": lambda number: dumps([PROGRESS, answer(number)]),
    "behind_a_print": lambda number: b"[INFO] 100% {done} " + dumps(answer(number)),
    "before_a_print": lambda number: dumps(answer(number)) + b" done",
    "empty_lines": lambda number: b"\n\n" + dumps(answer(number)) + b"\n\n",
    "long": lambda number: dumps(answer(number)).replace(b'"x"', b'"' + b"x" * 2_000_000 + b'"'),
    "number": results(5),
    "null": results(None),
    "php": results([]),
    "neither": lambda number: dumps({"jsonrpc": "2.0", "id": number}),
    "both": errors(None, result=X),
    "text_error": errors("boom"),
    "odd_error": errors({"code": "E1", "message": None}),
    "input": results({"resultType": "input_required", "inputRequests": {"a": {"params": {"message": "?"}}}}),
    "task": results({"task": {"taskId": "t", "status": "working"}}),
    "only_structured": results({"structuredContent": {"a": 1}}),
    "list_structured": results({"structuredContent": [1, 2]}),
    "null_flags": results({"content": None, "isError": None, "structuredContent": None, "_meta": None}),
    "odd_parts": blocks(
        {"type": "hologram", "data": "…"},
        {"type": "markdown", "text": "# hi"},
        {"type": "text", "text": "a", "annotations": {"priority": "high"}, "_meta": 3},
        {"type": "text", "text": None},
        {"type": "image", "data": 5},
        {"type": "resource", "resource": {"text": "no uri"}},
        {"type": "resource_link", "uri": "file:///a", "name": None, "size": "big"},
        "bare",
        7,
    ),
}  # fmt: skip

LISTED: list[Any] = [
    *({"name": name, "inputSchema": {"type": "object"}} for name in TOOLS),
    {
        "name": "mended", "title": 5, "description": ["no text"], "outputSchema": {"type": "string"},
        "icons": "none", "annotations": {"readOnlyHint": True, "idempotentHint": "?"}, "inputSchema": None,
        "execution": {"taskSupport": "maybe"},
    },
    {"name": "slow"},
    {"name": "silent", "inputSchema": {"properties": []}},
    {"inputSchema": {"type": "object"}},
    "no tool",
    {"name": "no_schema", "inputSchema": "none"},
    {"name": "bad_schema", "inputSchema": {"type": "object", "properties": {"x": {"type": "strin"}}}},
    {"name": "other_schema", "inputSchema": {"type": "string"}},
    {"name": "tasks", "inputSchema": {"type": "object"}, "execution": {"taskSupport": "required"}},
]  # fmt: skip


def work(number: object, seconds: float) -> bytes:
    """Report progress twenty times in some seconds, and answer."""
    for step in range(20):
        time.sleep(seconds / 20)
        params = {"progressToken": number, "progress": step, "total": 10**400}
        sys.stdout.buffer.write(dumps({"method": "notifications/progress", "params": params}) + b"\n")
        sys.stdout.buffer.flush()
    return dumps(answer(number))


def respond(message: dict[str, Any]) -> bytes | None:
    """Return the bytes of a response; None for a notification."""
    number, method = message.get("id"), message.get("method")
    if number is None:
        return None
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        return dumps(
            answer(number, {"protocolVersion": version, "capabilities": {"tools": []}, "serverInfo": None})
        )
    if method == "tools/list":
        return dumps(answer(number, {"tools": LISTED, "nextCursor": ""}))
    if method == "tools/call":
        name, args = message["params"]["name"], message["params"].get("arguments") or {}
        return (
            work(number, **args)
            if name == "slow"
            else {**TOOLS, "mended": says("x"), "silent": lambda _: b""}[name](number)
        )
    return dumps(answer(number, {}))


def app() -> Any:
    """Return the server for streamable HTTP at /json and /events, and for SSE at /sse."""
    import asyncio

    from starlette.applications import Starlette
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    queues: list[asyncio.Queue[bytes]] = []

    def event(body: bytes, end: bytes = b"\n") -> bytes:
        return b"".join(b"data: " + line + end for line in body.split(b"\n")) + end

    async def post(request: Any) -> Response:
        body = respond(json.loads(await request.body()))
        if body is None:
            return Response(status_code=202)
        if request.url.path == "/events":
            return Response(event(body, b"\r\n"), media_type="text/event-stream")
        return Response(body, media_type="application/json")

    async def stream(request: Any) -> StreamingResponse:
        queue = asyncio.Queue[bytes]()
        queues.append(queue)

        async def events() -> Any:
            yield b"event: endpoint\ndata: /messages\n\n"
            while True:
                yield event(await queue.get())

        return StreamingResponse(events(), media_type="text/event-stream")

    async def take(request: Any) -> Response:
        message = json.loads(await request.body())
        if (message.get("params") or {}).get("arguments") == {"refuse": True}:
            return Response(status_code=500)
        body = respond(message)
        if body is not None:
            queues[-1].put_nowait(body)
        return Response(status_code=202)

    return Starlette(
        routes=[
            Route("/json", post, methods=["POST"]),
            Route("/events", post, methods=["POST"]),
            Route("/sse", stream),
            Route("/messages", take, methods=["POST"]),
        ]
    )


if __name__ == "__main__":
    for line in sys.stdin:
        body = respond(json.loads(line))
        if body is not None:
            sys.stdout.buffer.write(body + b"\n")
            sys.stdout.buffer.flush()
