"""A server of vLLM or SGLang that takes and gives token ids, on a loopback address.

It continues each prompt deterministically: `answer_of` gives the whole answer to a prompt, and a prompt that
already has its beginning gets the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fakes.web import Act, Visit, WebServer, answer

PROMPT = 4
"""Length of a prompt without an answer."""
STOP = 2


def answer_of(prompt: Sequence[int]) -> list[int]:
    """Return the whole answer to a prompt: up to 21 ids that depend on it, and the stop token."""
    seed = sum(prompt[:PROMPT])
    return [10 + (seed * 7 + place * 3) % 80 for place in range(8 + seed % 13)] + [STOP]


def log_prob_of(place: int) -> float:
    """Return the log-probability of the id at a place of an answer."""
    return -0.01 * (place + 1)


class TokenServer(WebServer):
    """A server of one kind.

    Attributes:
        kind: "vllm" or "sglang".
        context: Number of tokens that its model takes.
        is_incremental: Streams of SGLang have new ids only, instead of all so far.
        loaded: Folders that weights were loaded from, with the names of their files.
        running: Number of requests that run.
        cancelled: Number of requests whose client went away.
    """

    def __init__(self, kind: str, *, context: int = 64, is_incremental: bool = False) -> None:
        own: dict[str, dict[str, Act]] = {
            "vllm": {
                "/inference/v1/generate": self.generate,
                "/pause": self.pause,
                "/resume": self.resume,
                "/collective_rpc": self.load,
            },
            "sglang": {
                "/generate": self.generate,
                "/pause_generation": self.pause,
                "/continue_generation": self.resume,
                "/update_weights_from_disk": self.load,
            },
        }
        super().__init__({"/health": self.health, **own[kind]})
        self.kind, self.context, self.is_incremental = kind, context, is_incremental
        self.loaded: list[tuple[str, list[str]]] = []
        self.running = self.cancelled = 0
        self.is_paused = asyncio.Event()
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def health(self, visit: Visit) -> None:
        """Say that all is well."""
        await visit.send(answer(b""))

    async def pause(self, visit: Visit) -> None:
        """End all requests and let no other begin."""
        self.is_open.clear()
        self.is_paused.set()
        await send(visit, {"status": "paused"})

    async def resume(self, visit: Visit) -> None:
        """End a pause."""
        self.is_paused.clear()
        self.is_open.set()
        await send(visit, {"status": "resumed"})

    async def load(self, visit: Visit) -> None:
        """Note the folder of the new weights."""
        from pathlib import Path

        body = json.loads(visit.body)
        folder = body["model_path"] if self.kind == "sglang" else body["kwargs"]["weights_path"]
        self.loaded.append((folder, sorted(path.name for path in Path(folder).iterdir())))
        assert not self.running
        await send(visit, {"success": True})

    async def generate(self, visit: Visit) -> None:
        """Sample an answer, a token at each turn of the event loop."""
        body = json.loads(visit.body)
        params = body["sampling_params"]
        ids = body["input_ids" if self.kind == "sglang" else "token_ids"]
        if len(ids) >= self.context:
            message = f"the prompt has {len(ids)} tokens, more than {self.context}"
            await send(visit, {"error": {"message": message}}, "400 Bad Request")
            return
        await self.is_open.wait()
        bound = params["max_new_tokens" if self.kind == "sglang" else "max_tokens"]
        first = len(ids) - PROMPT
        whole = answer_of(ids)[first : first + bound]
        found, finish = 0, "length"
        self.running += 1
        try:
            if body["stream"]:
                await visit.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            while found < len(whole) and not self.is_paused.is_set():
                await asyncio.sleep(0.001)
                if visit.writer.transport.is_closing():
                    raise ConnectionError
                found += 1
                if found == len(whole) and whole[-1] == STOP:
                    finish = "stop"
                if body["stream"] and found < len(whole):
                    await visit.send(_event(self.response(whole, first, found - 1, found, None)))
            if found < len(whole):
                finish = "abort"
        except ConnectionError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if body["stream"]:
            start = found if finish == "abort" else found - 1
            await visit.send(_event(self.response(whole, first, start, found, finish)), b"data: [DONE]\n\n")
            visit.writer.close()
        else:
            await send(visit, self.response(whole, first, 0, found, finish))

    def response(
        self, whole: Sequence[int], first: int, start: int, stop: int, finish: str | None
    ) -> Mapping[str, Any]:
        """Return a response with the ids from `start` to `stop`.

        Args:
            whole: The answer.
            first: Place of its first id in the whole answer to the prompt.
            start: Place of the first new id.
            stop: Place behind the last id.
            finish: Why it ended, or None.
        """
        if self.kind == "sglang":
            start = start if self.is_incremental else 0
            pairs = [[log_prob_of(first + n), whole[n], None] for n in range(start, stop)]
            meta = {
                "id": "1",
                "finish_reason": None if finish is None else {"type": finish},
                "completion_tokens": stop,
                "output_token_logprobs": pairs,
            }
            return {"text": "", "output_ids": list(whole[start:stop]), "meta_info": meta}
        content = [{"token_id": whole[n], "logprob": log_prob_of(first + n)} for n in range(start, stop)]
        choice = {
            "index": 0,
            "finish_reason": finish,
            "token_ids": list(whole[start:stop]),
            "logprobs": {"content": content},
        }
        return {"request_id": "1", "choices": [choice]}


async def send(visit: Visit, data: object, status: str = "200 OK") -> None:
    """Send JSON."""
    await visit.send(answer(json.dumps(data).encode(), "application/json", status))


def _event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
