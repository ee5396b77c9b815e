"""`PeerEngine`: the simulated engine on the wall clock; `engine.py MEASURE` serves it over HTTP.

The server speaks as much of vLLM's HTTP API as the peers need: completions and chat completions of OpenAI's
API, `/inference/v1/generate`, `/pause` and `/resume`. Its processor time is that of its own process.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from load import (
    MAX_TOKENS,
    MEASURES,
    PER_SEQUENCE_S,
    PLACES,
    STEP_S,
    Load,
    Script,
    question,
    tokenizer,
    work,
)

from torchrl_agentic.engines.base import OnIds, Sampled
from torchrl_agentic.testing.simulated_engine import SimulatedEngine


class PeerEngine(SimulatedEngine):
    """A simulated engine that finds the answer by the prompt, and counts sampled tokens by trajectory.

    Args:
        script: The answers.

    Attributes:
        sampled: Number of sampled tokens by number of the trajectory.
        answered: Number of requests that were answered, aborted ones not counted.
        asked: Number of requests.
    """

    def __init__(self, script: Script) -> None:
        super().__init__(self._rest, step_s=STEP_S, per_sequence_s=PER_SEQUENCE_S, max_concurrent=PLACES)
        self.script = script
        self.sampled: Counter[int] = Counter()
        self.answered = self.asked = 0
        self._names = itertools.count()

    def _rest(self, key: str, turn: int, prompt: Sequence[int]) -> Sequence[int]:
        number, asked, done = self.script.find(prompt)
        return self.script.ids(number, asked)[done:]

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Sample one answer; each request counts as one of its own, whatever its key."""
        self.asked += 1
        name = str(next(self._names))
        found = await super().sample(ids, max_tokens=max_tokens, key=name, on_ids=on_ids)
        self.sampled[self.script.find(ids)[0]] += len(found.ids)
        self.answered += found.finish != "aborted"
        return found


class Prompts:
    """Prompts as ids, as the template of the tiny model renders them.

    Args:
        script: The answers.

    Attributes:
        between: Ids that begin a further turn.
    """

    def __init__(self, script: Script) -> None:
        self._tokenizer = script.tokenizer
        between = "\n<|im_start|>assistant\n"
        self.between: list[int] = script.tokenizer(between, add_special_tokens=False)["input_ids"]

    def __call__(self, number: int) -> list[int]:
        """Return the ids of the first prompt of a trajectory."""
        options = {"tools": [work], "add_generation_prompt": True, "return_dict": False}
        return list(self._tokenizer.apply_chat_template(question(number), **options))


async def engine_alone(load: Load, script: Script) -> float:
    """Ask the engine for a whole load without any peer, and wait as its tools do.

    Returns:
        The processor seconds per answer, which are no peer's.
    """
    engine = PeerEngine(script)
    prompts = Prompts(script)
    begun = [prompts(number) for number in range(load.count)]

    async def one(number: int) -> None:
        ids, naps = begun[number], load.plan(number).naps_ms
        for turn in range(len(naps) + 1):
            found = await engine.sample(ids, max_tokens=MAX_TOKENS, key="")
            ids = [*ids, *found.ids, *prompts.between]
            if turn < len(naps):
                await asyncio.sleep(naps[turn] / 1000)

    cpu = time.process_time()
    await asyncio.gather(*(one(number) for number in range(load.count)))
    return (time.process_time() - cpu) / engine.answered


def serve(measure: str) -> None:
    """Serve the engine on a free loopback port, which is printed."""
    from aiohttp import web

    script = Script(MEASURES[measure], tokenizer())
    engine = PeerEngine(script)
    is_open = asyncio.Event()
    is_open.set()

    async def sample(ids: Sequence[int], bound: int) -> Sampled:
        await is_open.wait()
        return await engine.sample(ids, max_tokens=bound, key="")

    async def completions(request: web.Request) -> web.Response:
        asked = await request.json()
        found = await sample(asked["prompt"], asked["max_tokens"])
        choice = {
            "index": 0,
            "text": "",
            "token_ids": list(found.ids),
            "logprobs": {"token_logprobs": [-1.0] * len(found.ids)},
            "finish_reason": vllm_name(found),
        }
        return web.json_response({"choices": [choice]})

    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        found = await sample(asked["token_ids"], asked["sampling_params"]["max_tokens"])
        content = [{"token": f"token_id:{id_}", "logprob": -1.0} for id_ in found.ids]
        choice = {
            "index": 0,
            "token_ids": list(found.ids),
            "logprobs": {"content": content},
            "finish_reason": vllm_name(found),
        }
        return web.json_response({"choices": [choice]})

    prompts = Prompts(script)

    async def chat(request: web.Request) -> web.Response:
        asked = await request.json()
        number, turn = script.place(asked["messages"])
        prompt = [*prompts(number), *prompts.between * turn]
        found = await sample(prompt, MAX_TOKENS)
        message: dict[str, Any] = {"role": "assistant", "content": script.text(number, turn)}
        arguments = script.arguments(number, turn)
        if found.finish == "aborted":
            message["content"] = script.tokenizer.decode(found.ids)
        elif arguments is not None:
            function = {"name": "work", "arguments": arguments}
            message["tool_calls"] = [
                {"id": f"call_{number}_{turn}", "type": "function", "function": function}
            ]
        reason = "tool_calls" if message.get("tool_calls") else vllm_name(found)
        size = len(found.ids)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": size, "total_tokens": len(prompt) + size}
        return web.json_response(
            {
                "id": f"chatcmpl-{number}-{turn}",
                "object": "chat.completion",
                "created": 0,
                "model": "tiny",
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": usage,
            }
        )

    async def pause(request: web.Request) -> web.Response:
        is_open.clear()
        if request.query.get("mode", "abort") == "abort":
            await engine.update(None)
        return web.json_response({"status": "paused"})

    async def resume(request: web.Request) -> web.Response:
        is_open.set()
        return web.json_response({"status": "resumed"})

    async def state(request: web.Request) -> web.Response:
        sampled = {str(number): tokens for number, tokens in engine.sampled.items()}
        return web.json_response({"asked": engine.asked, "answered": engine.answered, "sampled": sampled})

    async def done(request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/pause", pause)
    app.router.add_post("/resume", resume)
    app.router.add_post("/collective_rpc", done)
    app.router.add_get("/state", state)
    app.router.add_get("/health", done)

    async def run() -> None:
        # As in vLLM, a request whose client has gone is dropped.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[union-attr]
        await asyncio.Event().wait()

    asyncio.run(run())


def vllm_name(found: Sampled) -> str:
    """Return vLLM's name for the end of an answer."""
    return "abort" if found.finish == "aborted" else found.finish


if __name__ == "__main__":
    serve(sys.argv[1])
