"""A server with OpenAI's chat completions API on a loopback address, whose answers a test scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fakes.web import Act, Visit, WebServer, answer

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17}


def call(name: str, arguments: Any, call_id: str | None = "c1") -> dict[str, Any]:
    """Return a tool call; arguments that are text are sent as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def completion(
    content: Any = None,
    calls: Sequence[Any] = (),
    finish: str | None = None,
    usage: Any = USAGE,
    **message: Any,
) -> dict[str, Any]:
    """Return a response with one message; `message` has its further fields."""
    said = {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls)} if calls else {}),
        **message,
    }
    choice = {"index": 0, "message": said, "finish_reason": finish or ("tool_calls" if calls else "stop")}
    return {"id": "chat-1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


def pieces_of(response: Mapping[str, Any], size: int = 3) -> list[dict[str, Any]]:
    """Return the events of a stream that amount to a response, with texts in pieces of `size` characters."""
    (choice,) = response["choices"]
    said = dict(choice["message"])
    deltas: list[dict[str, Any]] = [{"role": said.pop("role"), "content": ""}]
    calls = said.pop("tool_calls", [])
    for name, value in said.items():
        if isinstance(value, str):
            deltas += [{name: value[at : at + size]} for at in range(0, len(value), size)]
    for index, one in enumerate(calls):
        text = one["function"]["arguments"]
        deltas.append(
            {"tool_calls": [{**one, "index": index, "function": {**one["function"], "arguments": ""}}]}
        )
        for at in range(0, len(text), size):
            piece = {"index": index, "function": {"arguments": text[at : at + size]}}
            deltas.append({"tool_calls": [piece]})
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    return [*events, {"choices": [], "usage": response["usage"]}]


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(data: Any) -> bytes:
    """Return an event of a stream."""
    return f"data: {json.dumps(data)}\n\n".encode()


def failure(status: str, message: str, headers: Mapping[str, str] | None = None, **fields: Any) -> Act:
    """Return a handler that sends an error in OpenAI's form."""
    body = json.dumps({"error": {"message": message, **fields}}).encode()

    async def act(visit: Visit) -> None:
        await visit.send(answer(body, "application/json", status, headers))

    return act


Script = Callable[[Mapping[str, Any], int], Any]
"""Function of the body of a request and its number; returns a response, or a handler of the visit."""


class ChatServer(WebServer):
    """A server that answers by a script.

    Args:
        script: A script, or the responses and handlers of all requests in order, of which the last repeats.
        crowd: Number of requests that must run at the same time before the first one is answered.

    Attributes:
        bodies: Bodies of the requests so far.
        running: Number of requests that run.
        peak: Largest number of requests that ran at the same time.
        arrived: Set whenever a request arrives.
    """

    def __init__(self, script: Script | Sequence[Any], *, crowd: int = 1) -> None:
        super().__init__({PATH: self.complete})
        steps = script
        self.script: Script = (
            script if callable(script) else lambda _, number: steps[min(number, len(steps) - 1)]
        )
        self.crowd = crowd
        self.bodies: list[dict[str, Any]] = []
        self.running = self.peak = 0
        self.arrived = asyncio.Event()
        self.is_crowded = asyncio.Event()

    @property
    def base_url(self) -> str:
        """The URL that clients are given."""
        return self.url("/v1")

    async def complete(self, visit: Visit) -> None:
        """Answer a request."""
        body = json.loads(visit.body)
        number = len(self.bodies)
        self.bodies.append(body)
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.arrived.set()
        if self.running >= self.crowd:
            self.is_crowded.set()
        try:
            await self.is_crowded.wait()
            found = self.script(body, number)
            if callable(found):
                await found(visit)
            elif body.get("stream"):
                await visit.send(STREAM_HEAD, *map(event, pieces_of(found)), b"data: [DONE]\n\n")
                visit.writer.close()
            else:
                await visit.send(answer(json.dumps(found).encode(), "application/json"))
        finally:
            self.running -= 1
