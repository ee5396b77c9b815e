"""`AgentCollector`: `peer_ours.py MEASURE OUT URL [http|openai]`, over the engine or its HTTP server.

Over HTTP with token ids it begins new trajectories without end, as TRL does (`peer_trl.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import torch
from engine import PeerEngine, engine_alone
from load import CALL_TIMEOUT_S, MAX_TOKENS, MAX_TURNS, question, tokenizer, work
from measure import Run
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector, Task, Trajectory
from torchrl_agentic.engines import HTTPEngine, OpenAIEngine


def engine_of(road: str, run: Run, model_tokenizer: Any) -> Any:
    """Return the engine of a road."""
    if road == "http":
        return HTTPEngine(run.url, kind="vllm", tokenizer=model_tokenizer, max_concurrent=1_000)
    if road == "openai":
        return OpenAIEngine("tiny", base_url=f"{run.url}/v1", api_key="none", max_concurrent=1_000)
    engine = PeerEngine(run.script)
    run.count = lambda: {"asked": engine.asked, "answered": engine.answered, "sampled": engine.sampled}
    return engine


async def batches(
    collector: AgentCollector, road: str
) -> AsyncIterator[list[tuple[int, list[int] | Trajectory]]]:
    """Yield the number and the sampled ids of each trajectory; over messages, the trajectory itself."""
    if road == "openai":
        iterator = collector.trajectories()
        while (found := await asyncio.to_thread(next, iterator, None)) is not None:
            yield [(int(one.name.partition("/")[0]), one) for one in found]
        return
    async for batch in collector:
        rows = []
        for row in batch.tensordicts:
            mask = row["masks", "all_assistant_mask"]
            rows.append((int(row["query"][1:]), row["tokens", "full"][mask].tolist()))
        yield rows


def ids_of(run: Run, number: int, trajectory: Trajectory) -> list[int]:
    """Return the ids of a trajectory of messages, which are those of the script if its texts are."""
    said = [message for message in trajectory.messages if message.role == "assistant"]
    ids: list[int] = []
    for turn, message in enumerate(said):
        is_equal = message.text == run.script.text(number, turn)
        ids += run.script.ids(number, turn) if is_equal else run.script.tokenizer(message.text)["input_ids"]
    return ids


async def update(collector: AgentCollector, road: str) -> None:
    """Update the weights every second."""
    while True:
        await asyncio.sleep(1.0)
        await collector.update_weights({"weight": torch.zeros(1)} if road == "http" else None)


async def main(road: str) -> None:
    """Run one measure."""
    model_tokenizer = tokenizer()
    run = Run(sys.argv[1:4], model_tokenizer)
    load = run.load
    own = await engine_alone(load, run.script) if road == "engine" and run.measure == "plain" else 0.0
    engine = engine_of(road, run, model_tokenizer)
    compose = ToolCompose(
        [tool(work)],
        "openai" if road == "openai" else "hermes",
        per_call_timeout=None if run.measure == "memory" else CALL_TIMEOUT_S,
    )
    collector = AgentCollector(
        Compose(compose, EndTrajectory(max_turns=MAX_TURNS, when_no_calls=True)),
        engine=engine,
        tokenizer=None if road == "openai" else model_tokenizer,
        tasks=[Task(str(number), question(number)) for number in range(load.tasks(refills=road == "http"))],
        groups_per_batch=16,
        max_in_flight=load.count,
        max_staleness=None,
        max_turns=MAX_TURNS,
        max_new_tokens=MAX_TOKENS,
    )
    run.begin()
    other = asyncio.create_task(update(collector, road)) if run.measure == "updates" else None

    async def collect() -> None:
        async for rows in batches(collector, road):
            for number, found in rows:
                run.deliver(number, found if isinstance(found, list) else ids_of(run, number, found))
            if run.is_complete:
                return

    collecting = asyncio.create_task(collect())
    while not collecting.done() and run.elapsed_s < run.limit_s:
        await asyncio.wait([collecting], timeout=0.2)
        if await asyncio.to_thread(run.hold):
            break
    if collecting.done():
        collecting.result()
    if other is not None and other.done():
        other.result()
    with contextlib.suppress(Exception):
        run.figures["stats"] = str(collector.stats)[:2000]
    run.end(own)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[4] if len(sys.argv) > 4 else "engine"))
