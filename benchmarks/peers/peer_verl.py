"""verl's `ToolAgentLoop` in its `AgentLoopWorker`: `peer_verl.py MEASURE OUT URL`.

The worker runs in this process instead of a Ray actor. Its client is verl's own for asynchronous training,
which resumes aborted answers; only the two methods that ask Ray for a server are replaced.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import verl.experimental.agent_loop.tool_agent_loop  # noqa: F401  # registers "tool_agent"
from engine import PeerEngine, engine_alone
from hydra import compose, initialize_config_module
from load import MAX_TURNS, TINY, question, tokenizer
from measure import Run
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

RESPONSE_LENGTH = 1_536


class Client(FullyAsyncLLMServerClient):
    """verl's client over the simulated engine."""

    def __init__(self, config: Any, engine: PeerEngine) -> None:
        super().__init__(config)
        self._server = SimpleNamespace(generate=SimpleNamespace(remote=self._generate))
        self._engine = engine

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "simulated", self._server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass

    async def _generate(
        self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        version = self._engine.version
        found = await self._engine.sample(prompt_ids, max_tokens=sampling_params["max_tokens"], key="")
        return TokenOutput(
            token_ids=list(found.ids),
            log_probs=list(found.log_probs or ()),
            stop_reason="aborted" if found.finish == "aborted" else "completed",
            extra_fields={"global_steps": version},
        )


def config_of() -> Any:
    """Return verl's configuration, with what a multi-turn rollout needs."""
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        f"actor_rollout_ref.model.path={TINY}",
        "actor_rollout_ref.model.use_remove_padding=false",
        f"{rollout}.name=vllm",
        f"{rollout}.prompt_length=256",
        f"{rollout}.response_length={RESPONSE_LENGTH}",
        f"{rollout}.agent.default_agent_loop=tool_agent",
        f"{rollout}.multi_turn.enable=true",
        f"{rollout}.multi_turn.format=hermes",
        f"{rollout}.multi_turn.max_assistant_turns={MAX_TURNS}",
        f"{rollout}.multi_turn.function_tool_path={Path(__file__).with_name('verl_tools.py')}",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def batch_of(count: int) -> DataProto:
    """Return prompts as verl's trainer passes them."""
    prompts = np.empty(count, dtype=object)
    prompts[:] = [question(number) for number in range(count)]
    columns = {"raw_prompt": prompts, "index": np.arange(count)}
    return DataProto(batch=None, non_tensor_batch=columns, meta_info={"global_steps": 0, "validate": False})


async def main() -> None:
    """Run one measure."""
    run = Run(sys.argv[1:4], tokenizer())
    load = run.load
    own = await engine_alone(load, run.script) if run.measure == "plain" else 0.0
    engine = PeerEngine(run.script)
    run.count = lambda: {"asked": engine.asked, "answered": engine.answered, "sampled": engine.sampled}
    config = config_of()
    worker = AgentLoopWorker(config, Client(config, engine))
    run.begin()

    async def update() -> None:
        while True:
            await asyncio.sleep(1.0)
            await engine.update(None)

    other = asyncio.create_task(update()) if run.measure == "updates" else None

    async def collect() -> None:
        found = await worker.generate_sequences(batch_of(load.count))
        for number, ids, mask in zip(
            found.non_tensor_batch["index"],
            found.batch["responses"],
            found.batch["response_mask"],
            strict=True,
        ):
            run.deliver(int(number), ids[mask.bool()].tolist())

    collecting = asyncio.create_task(collect())
    while not collecting.done() and run.elapsed_s < run.limit_s:
        await asyncio.wait([collecting], timeout=0.2)
        if await asyncio.to_thread(run.hold):
            break
    if collecting.done():
        collecting.result()
    del other
    run.end(own)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main())
