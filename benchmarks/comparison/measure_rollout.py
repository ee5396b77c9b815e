"""Measures of one library, as a line of JSON: `TOOL_FAULT=control python measure_rollout.py trl`.

It runs one batch of the training program of the library. TOOL_FAULT is what the tool does: "", "slow",
"hang", "raise", "exit", "large" or "control". Figures: seconds and processor seconds of the rollout, right
answers, whether exactly the sampled tokens carry loss, and control tokens that results brought into the ids.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
import time
from itertools import groupby
from typing import Any

import torch
from arithmetic_task import FAULT, GROUP, PROMPTS


class Clock:
    """Seconds and processor seconds since its creation."""

    def __init__(self) -> None:
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def figures(self) -> dict[str, float]:
        """Return both, rounded."""
        wall, cpu = time.perf_counter() - self.start, time.process_time() - self.cpu
        return {"seconds": round(wall, 2), "cpu_seconds": round(cpu, 2)}


def check_masks(
    rows: list[tuple[list[int], list[int]]], sampled: list[list[int]], start: int
) -> dict[str, Any]:
    """Compare runs of tokens that carry loss with the answers that were sampled.

    Args:
        rows: Ids and loss mask of each conversation, prompt included.
        sampled: Ids of each answer, as the model sampled them.
        start: Id of `<|im_start|>`; the template writes two of them around the results of a turn.
    """
    left = collections.Counter(map(tuple, sampled))
    wrong, foreign, results = 0, 0, 0
    for ids, mask in rows:
        runs = [
            (bit, [id_ for _, id_ in run])
            for bit, run in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
        ]
        for bit, run in (
            runs[1:] if runs[-1][0] else runs[1:-1]
        ):  # without the prompt, and what follows the end
            if bit:
                wrong += left[tuple(run)] < 1
                left[tuple(run)] -= 1
            else:
                results += len(run)
                foreign += run.count(start) - 2
    return {
        "sampled_tokens": sum(map(len, sampled)),
        "tokens_with_loss": sum(sum(mask) for _, mask in rows),
        "answers_with_other_ids": wrong,
        "answers_without_loss": sum(count for count in left.values() if count > 0),
        "result_tokens": results,
        "control_tokens_from_results": foreign,
    }


def measure_trl() -> dict[str, Any]:
    """Run one batch of TRL's trainer; its methods for rollouts are private."""
    import train_trl

    trainer = train_trl.make()
    sampled, found = [], {}
    single, whole = trainer._generate_single_turn, trainer._generate

    def generate_single_turn(*args: Any, **options: Any) -> Any:
        ids, log_probs = single(*args, **options)
        sampled.extend(list(map(int, one)) for one in ids)
        return ids, log_probs

    def generate(prompts: list[Any]) -> Any:
        clock = Clock()
        output = whole(prompts)
        found.update(clock.figures(), output=output)
        return output

    trainer._generate_single_turn, trainer._generate = generate_single_turn, generate
    inputs = [row for row in trainer.train_dataset.select(range(PROMPTS)) for _ in range(GROUP)]
    trainer._generate_and_score_completions(inputs)
    prompts, completions, masks, messages, *_ = found.pop("output")
    rows = [([*p, *c], [0] * len(p) + list(m)) for p, c, m in zip(prompts, completions, masks, strict=True)]
    rewards = train_trl.reward(messages, [row["answer"] for row in inputs])
    last = [one[-1] for one in messages]
    return {
        **found,
        "answers": len(rows),
        "right": sum(rewards),
        "ends_with_a_message": sum(one["role"] == "assistant" and not one.get("tool_calls") for one in last),
        **check_masks(rows, sampled, trainer.processing_class.convert_tokens_to_ids("<|im_start|>")),
        "first": [one["content"][:120] for one in messages[0] if one.get("content")],
    }


def measure_torchrl_agentic() -> dict[str, Any]:
    """Run one batch of the collector."""
    import train_torchrl_agentic

    options = {"per_call_timeout": 1.0} if FAULT == "hang" else {}  # the default is 30 s
    _, tokenizer, engine, collector = train_torchrl_agentic.make(**options)
    sampled, sample = [], engine.sample

    async def recorded(*args: Any, **options: Any) -> Any:
        found = await sample(*args, **options)
        sampled.append(list(found.ids))
        return found

    engine.sample = recorded
    with collector:
        clock = Clock()
        batch = next(iter(collector.trajectories()))
        figures = clock.figures()
    rows = [(list(one.ledger.ids), [int(bit) for bit in one.ledger.mask]) for one in batch]
    return {
        **figures,
        "answers": len(batch),
        "right": sum(one.reward for one in batch),
        "ends_with_a_message": sum(one.has_ended for one in batch),
        **check_masks(rows, sampled, tokenizer.convert_tokens_to_ids("<|im_start|>")),
        "first": [message.text[:120] for message in batch[0].messages[2:] if message.text],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measures = {"trl": measure_trl, "torchrl_agentic": measure_torchrl_agentic}
    with contextlib.redirect_stdout(sys.stderr):
        figures = measures[sys.argv[1]]()
    print(json.dumps({"library": sys.argv[1], "fault": FAULT, **figures}))
