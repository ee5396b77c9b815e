"""The task with torchrl_agentic: `python train_torchrl_agentic.py`."""

import copy

import torch
from arithmetic_task import (
    GROUP,
    MAX_CALLS_IN_TURN,
    MAX_TOKENS,
    MODEL,
    PROMPTS,
    SYSTEM,
    is_right,
    python,
    questions,
)
from torchrl.objectives.llm import GRPOLoss

from torchrl_agentic import ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.engines import TransformersEngine
from torchrl_agentic.rollout import tasks_of, training_policy
from torchrl_agentic.testing import load_tiny


def reward(trajectory):
    return float(is_right(trajectory.answer, trajectory.task.answer))


def make(**options):
    model, tokenizer = load_tiny(folder=MODEL)
    engine = TransformersEngine(
        copy.deepcopy(model), tokenizer, temperature=1.0, max_concurrent=GROUP * PROMPTS
    )
    collector = AgentCollector(
        ToolCompose([tool(python)], "hermes", **options),
        engine=engine,
        tokenizer=tokenizer,
        tasks=tasks_of(questions(), SYSTEM),
        group_size=GROUP,
        groups_per_batch=PROMPTS,
        max_staleness=0,
        max_turns=MAX_CALLS_IN_TURN + 1,
        max_new_tokens=MAX_TOKENS,
        reward=reward,
    )
    return model, tokenizer, engine, collector


def main():
    model, tokenizer, _, collector = make()
    loss_fn = GRPOLoss(training_policy(model, tokenizer), masking_strategy="rlhf", entropy_bonus=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    with collector:
        for batch in collector:
            loss_fn(batch).loss_objective.backward()
            optimizer.step()
            optimizer.zero_grad()
            collector.update_policy_weights_(model)
            print("reward", batch["reward"].mean().item())


if __name__ == "__main__":
    main()
