"""A short training run for the pictures: `python docs/screenshots/training_dump.py FOLDER [STEPS]`.

The tiny model, spoilt by noise, learns again to call Python. FOLDER gets the trajectories in groups of 8,
their timelines, and the scalars of a CSVLogger, as any training run with a recorder has them.
"""

from __future__ import annotations

import copy
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tensordict import lazy_stack
from torchrl.envs import Compose
from torchrl.objectives.llm import GRPOLoss
from torchrl.record.loggers.csv import CSVLogger

from torchrl_agentic import (
    EndTrajectory,
    Faulty,
    PythonTool,
    Recorder,
    RecordTransform,
    ToolCompose,
    training_policy,
)
from torchrl_agentic.collectors import AgentCollector, Trajectory
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import TransformersEngine
from torchrl_agentic.rollout import answer_reward, tasks_of
from torchrl_agentic.testing.tiny import load_tiny, tiny_questions

PROMPTS, GROUP, NOISE = 8, 8, 0.03


def reward(trajectory: Trajectory) -> float:
    """Return 1 for the right answer, and 0.1 for a call before a wrong one."""
    right = answer_reward(trajectory.answer, trajectory.task.answer)
    return right or 0.1 * (trajectory.n_calls > trajectory.n_errors)


def main(out: Path, steps: int) -> None:
    """Train, and record."""
    shutil.rmtree(out, ignore_errors=True)
    torch.manual_seed(0)
    random.seed(0)
    model, tokenizer = load_tiny()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(NOISE * torch.randn_like(weights))
    logger = CSVLogger("log", log_dir=str(out))
    engine = TransformersEngine(copy.deepcopy(model), tokenizer, max_concurrent=PROMPTS * GROUP, seed=0)
    python = Faulty(PythonTool(timeout=5), seed=0, latency=lambda rng: min(2.0, rng.lognormvariate(-3, 1)))
    tasks = [
        replace(task, name=f"sum-{number}")
        for number, task in enumerate(
            tasks_of(tiny_questions(PROMPTS * steps, seed=5), "You solve problems with a Python tool.")
        )
    ]
    loss_fn = GRPOLoss(training_policy(model, tokenizer), masking_strategy="rlhf", entropy_bonus=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    with Recorder(out / "trajectories", run="demo") as recorder:
        collector = AgentCollector(
            Compose(
                ToolCompose([python], parser="hermes", recorder=recorder),
                EndTrajectory(max_turns=4, when_no_calls=True),
                RecordTransform(tokens=True),
            ),
            engine=engine,
            tokenizer=tokenizer,
            tasks=tasks,
            group_size=GROUP,
            groups_per_batch=PROMPTS,
            max_staleness=1,
            max_turns=4,
            max_new_tokens=64,
            reward=reward,
            timeline=recorder,
        )
        with collector:
            for step, batch in enumerate(collector):
                recorder.step = step
                rows = [row for row in batch.tensordicts if row["advantage"].abs().item() > 0]
                loss = loss_fn(lazy_stack(rows)).loss_objective if rows else None
                if loss is not None:
                    optimizer.zero_grad()
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    logger.log_scalar("train/loss", loss.item(), step=step)
                logger.log_scalar("train/reward", batch["reward"].mean().item(), step=step)
                print(step, round(batch["reward"].mean().item(), 3), flush=True)
                collector.update_policy_weights_(model)
    event_loop.run(engine.close())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12)
