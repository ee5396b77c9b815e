"""A short GRPO run over an engine with weights of its own, and its log-probabilities beside the model's."""

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from helpers.processes import run_program
from helpers.vllm_engines import own_log_probs
from torchrl.objectives.llm import GRPOLoss

from torchrl_agentic import ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.rollout import tasks_of, training_policy
from torchrl_agentic.testing import load_tiny, tiny_questions

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "vllm_weights.md"
SYSTEM = "You solve problems with a Python tool."
STEPS = 3
GROUPS = 4
LEARNING_RATE = 1e-3


@tool
def python(code: str) -> str:
    """Run Python code in a fresh interpreter and return what it prints.

    Args:
        code: The code.
    """
    value = code.removeprefix("print(").removesuffix(")")
    try:
        return str(eval(value, {"__builtins__": {}}))  # arithmetic of a model of our own
    except (SyntaxError, TypeError, ArithmeticError, NameError) as error:
        return f"{type(error).__name__}: {error}"


@dataclass
class Gaps:
    """Differences between log-probabilities of the engine and of the trained model, of one batch."""

    each: list[torch.Tensor] = field(default_factory=list)

    @property
    def largest(self) -> float:
        return torch.cat(self.each).max().item()

    @property
    def mean(self) -> float:
        return torch.cat(self.each).mean().item()


def gaps_of(batch, model, version):
    """Return the gaps of a batch, one trajectory at a time, without padding.

    Args:
        batch: Trajectories of a collector.
        model: The trained model.
        version: Policy version of all sampled tokens.
    """
    gaps = Gaps()
    for row in batch.tensordicts:
        ids, mask = row["tokens", "full"].tolist(), row["masks", "all_assistant_mask"]
        assert set(row["collector", "policy_version"][mask].tolist()) == {version}
        known = own_log_probs(model, ids[:1], ids[1:])
        gaps.each.append((known - row["log_probs", "full"][1:])[mask[1:]].abs())
    return gaps


def shortness(trajectory):
    """Return a reward for short answers, which differs within most groups."""
    return -float(sum(len(message.text) for message in trajectory.messages if message.role == "assistant"))


def train(engine, *, dtype=torch.float32, is_synced=True):
    """Train the tiny model for a few steps, and update the engine's weights after each.

    Args:
        engine: Samples with weights of its own, which become those of the tiny model first.
        dtype: Data type of the trained model.
        is_synced: False: updates are counted, but the engine keeps its weights.

    Returns:
        The gaps of each batch; the first was sampled before the first optimizer step.
    """
    torch.manual_seed(0)
    model, tokenizer = load_tiny(dtype=dtype)
    first = event_loop.run(engine.update(model.state_dict()))
    collector = AgentCollector(
        ToolCompose([python], "hermes"),
        engine=engine,
        tokenizer=tokenizer,
        tasks=tasks_of(tiny_questions(GROUPS * (STEPS + 1), seed=3), SYSTEM),
        group_size=4,
        groups_per_batch=GROUPS,
        max_staleness=0,
        max_new_tokens=64,
        max_turns=4,
        reward=shortness,
    )
    loss_fn = GRPOLoss(
        training_policy(model, tokenizer), masking_strategy="rlhf", clip_epsilon=0.2, entropy_bonus=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    found = []
    collector.set_seed(0)  # other answers train other weights
    with collector:
        for step, batch in enumerate(collector):
            found.append(gaps_of(batch, model, version=first + step))
            loss_fn(batch).loss_objective.backward()
            optimizer.step()
            optimizer.zero_grad()
            collector.update_policy_weights_(model if is_synced else None)
    event_loop.run(engine.update(load_tiny(dtype=dtype)[0].state_dict()))
    return found


def run_page(heading, folder, old="", new=""):
    """Run the first program below a heading of the page on weight updates, and return what it prints.

    Args:
        heading: The heading.
        folder: Folder for the program.
        old: A text of the program.
        new: What replaces it.
    """
    section = PAGE.read_text("utf-8").split(f"## {heading}\n")[1]
    (program, *_) = re.findall(r"```\{code-block\} python\n(.*?)```", section, re.S)
    assert old in program
    path = folder / "program.py"
    path.write_text(program.replace(old, new) if old else program, "utf-8")
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = run_program(
        [sys.executable, "-W", "ignore", str(path)],
        env={"PYTHONPATH": str(PAGE.parents[2]), **os.environ, **own},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [line for line in done.stdout.splitlines() if line.startswith("version ")]
