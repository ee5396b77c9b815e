"""GRPO with tools: a tiny model learns to call Python and to use its results.

    python examples/grpo_tools.py --out runs/grpo

It starts from a weak model, which `train_tiny.py --weak` trains in a minute or two, and needs no GPU. Each
iteration samples several answers per problem, runs their tool calls in the sandbox, compares the answers
within each group, and takes a few optimizer steps on `GRPOLoss` over the sampled tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import lazy_stack
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.objectives.llm import GRPOLoss

from torchrl_agentic import EndTrajectory, PythonTool, ToolCompose, TurnTokenizer
from torchrl_agentic.rollout import (
    Trajectory,
    agent_policy,
    answer_reward,
    chats_of,
    group_advantage,
    rollout,
    training_policy,
    trajectory_batch,
)
from torchrl_agentic.testing.tiny import load_tiny, tiny_questions

SYSTEM = "You solve problems with a Python tool."
MAX_TURNS, MAX_NEW_TOKENS = 5, 64


def make_env(tokenizer: Any, rows: int) -> TransformedEnv:
    """Create an environment of `rows` conversations, each with its own interpreter."""
    compose = ToolCompose([PythonTool(timeout=5)], parser="hermes")
    return TransformedEnv(
        ChatEnv(batch_size=(rows,)),
        Compose(
            compose,
            EndTrajectory(max_turns=MAX_TURNS, when_no_calls=True),
            TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable"),
        ),
    )


def reward(trajectory: Trajectory, answer: str) -> float:
    """Return 1 for a right answer of a trajectory that called a tool, else 0."""
    used = any(message.role == "tool" for message in trajectory.messages)
    return answer_reward(trajectory.answer, answer) if trajectory.has_ended and used else 0.0


def evaluate(env: TransformedEnv, policy: Any, questions: Sequence[Any]) -> float:
    """Return the share of questions with a right answer."""
    rows = env.batch_size.numel()
    right = 0.0
    for start in range(0, len(questions), rows):
        some = questions[start : start + rows]
        found = rollout(env, policy, chats_of([one["query"] for one in some], SYSTEM), max_turns=MAX_TURNS)
        right += sum(reward(one, asked["answer"]) for one, asked in zip(found, some, strict=True))
    return right / len(questions)


def train(
    model: Any,
    tokenizer: Any,
    *,
    iterations: int = 60,
    prompts: int = 16,
    group: int = 8,
    lr: float = 1e-4,
    minibatch: int = 32,
    target: float = 0.9,
    seed: int = 0,
    out: Path | None = None,
    curve: list[dict[str, float]],
) -> None:
    """Train a model, and record figures of each iteration.

    Args:
        model: The model, trained in place.
        tokenizer: Its tokenizer.
        iterations: Largest number of iterations.
        prompts: Problems per iteration.
        group: Answers per problem.
        lr: Learning rate of AdamW.
        minibatch: Trajectories per optimizer step.
        target: Share of right answers over the last four iterations, at temperature 1, that ends training.
        seed: Seed of sampling and of the order of trajectories.
        out: Folder for `curve.csv`, or None.
        curve: List to which one dict of figures per iteration is appended.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    env = make_env(tokenizer, prompts * group)
    policy = agent_policy(model, tokenizer, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
    loss_fn = GRPOLoss(
        training_policy(model, tokenizer), masking_strategy="rlhf", clip_epsilon=0.2, entropy_bonus=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    began = time.perf_counter()
    for iteration in range(iterations):
        asked = tiny_questions(prompts, seed=seed * 10_000 + iteration, split="train")
        repeated = [one for one in asked for _ in range(group)]
        queries = chats_of([one["query"] for one in repeated], SYSTEM)
        found = rollout(env, policy, queries, max_turns=MAX_TURNS)
        rewards = torch.tensor(
            [reward(one, question["answer"]) for one, question in zip(found, repeated, strict=True)]
        )
        batch = trajectory_batch([one.ledger for one in found])
        for row, advantage in zip(batch.tensordicts, group_advantage(rewards, group), strict=True):
            row["advantage"] = advantage
        taught = [row for row in batch.tensordicts if row["advantage"].abs().item() > 0]
        random.shuffle(taught)
        losses = [0.0]
        for start in range(0, len(taught), minibatch):
            loss = loss_fn(lazy_stack(taught[start : start + minibatch])).loss_objective
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        calls = sum(any(m.role == "tool" for m in one.messages) for one in found) / len(found)
        figures = {
            "iteration": iteration,
            "seconds": round(time.perf_counter() - began, 1),
            "success": rewards.mean().item(),
            "calls": calls,
            "tokens": sum(sum(one.ledger.mask) for one in found if one.ledger) / len(found),
            "loss": sum(losses) / len(losses),
        }
        curve.append(figures)
        print(" ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)
        if out is not None:
            write_curve(curve, out)
        if len(curve) >= 4 and sum(row["success"] for row in curve[-4:]) / 4 >= target:
            break
    env.close()


def write_curve(curve: Sequence[dict[str, float]], out: Path) -> None:
    """Write the figures as CSV."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(curve[0]))
        writer.writeheader()
        writer.writerows(curve)


def plot(curve: Sequence[dict[str, float]], before: float, after: float, path: Path) -> None:
    """Draw the curve, with the share of right answers on held-out problems before and after."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    minutes = [row["seconds"] / 60 for row in curve]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(minutes, [100 * row["success"] for row in curve], label="sampled, problems of training")
    axes.plot(
        [0, minutes[-1]], [100 * before, 100 * after], "o", color="black", label="greedy, held-out problems"
    )
    axes.set(xlabel="minutes on 2 CPU cores", ylabel="right answers, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, and print the shares of right answers before and after."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    parser.add_argument("--model", type=Path, help="initial model; default: train a weak one in OUT/weak")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.model or options.out / "weak"
    if not (folder / "model.safetensors").is_file():
        sys.path.insert(0, str(Path(__file__).parent))
        import train_tiny

        train_tiny.train(folder, weak=True, threads=options.threads)
    model, tokenizer = load_tiny(folder=folder)
    env = make_env(tokenizer, 64)
    held_out = tiny_questions(128, seed=1)
    greedy = agent_policy(model, tokenizer, max_new_tokens=MAX_NEW_TOKENS, temperature=0)
    sampled = agent_policy(model, tokenizer, max_new_tokens=MAX_NEW_TOKENS)
    before = evaluate(env, greedy, held_out), evaluate(env, sampled, held_out)
    print(f"before: {before[0]:.1%} right when greedy, {before[1]:.1%} when sampled", flush=True)
    curve: list[dict[str, float]] = []
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends training early and evaluates the model
        train(
            model,
            tokenizer,
            curve=curve,
            iterations=options.iterations,
            lr=options.lr,
            seed=options.seed,
            out=options.out,
        )
    after = evaluate(env, greedy, held_out), evaluate(env, sampled, held_out)
    env.close()
    print(f"after: {after[0]:.1%} right when greedy, {after[1]:.1%} when sampled, of {len(held_out)}")
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    plot(curve, before[0], after[0], options.out / "curve.png")


if __name__ == "__main__":
    main()
