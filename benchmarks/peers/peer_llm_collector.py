"""TorchRL's `LLMCollector`: `peer_llm_collector.py MEASURE OUT ""`.

The policy asks the engine for all rows and waits for the longest answer, as TorchRL's wrappers do. The calls
of a step are run by this package, all at once and with a time limit, since TorchRL's own transform runs the
calls of a batch one after the other.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import warnings
from collections import defaultdict

import torch
from engine import PeerEngine, engine_alone
from load import CALL_TIMEOUT_S, MAX_TOKENS, MAX_TURNS, question, tokenizer, work
from measure import Run
from torch.utils.data import DataLoader
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic import EndTrajectory, ToolCompose, TurnTokenizer, tool
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.rollout import agent_policy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrl.collectors.llm import LLMCollector


def main() -> None:
    """Run one measure."""
    model_tokenizer = tokenizer()
    run = Run(sys.argv[1:4], model_tokenizer)
    load = run.load
    own = asyncio.run(engine_alone(load, run.script)) if run.measure == "plain" else 0.0
    engine = PeerEngine(run.script)
    run.count = lambda: {"asked": engine.asked, "answered": engine.answered, "sampled": dict(engine.sampled)}
    compose = ToolCompose(
        [tool(work)], "hermes", per_call_timeout=None if run.measure == "memory" else CALL_TIMEOUT_S
    )
    # Constructing the environment takes a first batch of prompts, which no trajectory gets.
    numbers = [*range(19 * load.count, 20 * load.count), *range(19 * load.count)]
    rows = [{"query": question(number)[0]["content"]} for number in numbers]
    loader = DataLoader(rows, collate_fn=collate)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(load.count,))
    for transform in (
        compose,
        EndTrajectory(max_turns=MAX_TURNS, when_no_calls=True),
        TurnTokenizer(model_tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable"),
    ):
        env.append_transform(transform)
    policy = agent_policy(engine, model_tokenizer, max_new_tokens=MAX_TOKENS)
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=1, yield_completed_trajectories=True)
    run.begin()
    threading.Thread(target=watch, args=(run, own), daemon=True).start()
    updated = time.monotonic()
    sampled: defaultdict[int, list[int]] = defaultdict(list)
    for batch in collector:
        for turn in batch.unbind(0):
            number = int(turn["query"][1:])
            sampled[number] += turn["tokens", "response"].tolist()
            if turn["next", "done"].any():
                run.deliver(number, sampled[number])
        if run.measure == "updates" and time.monotonic() - updated >= 1.0:
            updated = time.monotonic()
            event_loop.run(engine.update(None))
        if run.is_complete:
            run.end(own)


def collate(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return a batch of prompts."""
    return {"query": [row["query"] for row in rows]}


def watch(run: Run, own: float) -> None:
    """End the run at its limit, or when its memory was measured; the collector itself blocks."""
    while run.elapsed_s < run.limit_s and not run.hold():
        time.sleep(0.2)
    run.end(own)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
