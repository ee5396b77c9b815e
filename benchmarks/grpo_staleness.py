"""GRPO with tools: a tiny model learns to call Python and to use its results, while others still sample.

    python benchmarks/grpo_staleness.py --out runs/staleness-1
    python benchmarks/grpo_staleness.py --out runs/staleness-0 --staleness 0

It starts from a weak model, which `train_tiny.py --weak` trains in a minute or two, and needs no GPU. The
collector samples several answers per problem and runs their tool calls in the sandbox; each batch takes a few
optimizer steps on `GRPOLoss` over the sampled tokens. With --staleness 1, the default, the next batch is
sampled meanwhile, and no batch waits for its slowest tool. With --staleness 0 the same script alternates
between sampling and training.

The tool is as slow as services are: its calls wait for a log-normal time with a median of 2 s and a 99th
percentile of 10 s (--tool-latency, --tool-tail).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import lazy_stack
from torchrl.envs import Compose
from torchrl.objectives.llm import GRPOLoss

from torchrl_agentic import EndTrajectory, Faulty, PythonTool, ToolCompose, training_policy
from torchrl_agentic.collectors import AgentCollector, Task, Trajectory
from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines import TransformersEngine
from torchrl_agentic.rollout import answer_reward, rollout, tasks_of
from torchrl_agentic.testing.tiny import load_tiny, tiny_questions

SYSTEM = "You solve problems with a Python tool."
MAX_TURNS, MAX_NEW_TOKENS, MAX_LATENCY_S = 5, 64, 25.0
P99 = 2.326
"""Standard deviations above the median that one draw in 100 exceeds."""


def agent(median: float = 0.0, tail: float = 5.0, *, seed: int = 0) -> Compose:
    """Return the tool and the end of trajectories; each trajectory has its own interpreter.

    Args:
        median: Median of the seconds that a call waits; 0: no wait.
        tail: Factor between the 99th percentile and the median.
        seed: Seed of the times.
    """
    tool: Any = PythonTool(timeout=5)
    if median:
        spread = math.log(tail) / P99

        def latency(rng: random.Random) -> float:
            return min(MAX_LATENCY_S, rng.lognormvariate(math.log(median), spread))

        tool = Faulty(tool, seed, latency=latency)
    compose = ToolCompose([tool], parser="hermes")
    return Compose(compose, EndTrajectory(max_turns=MAX_TURNS, when_no_calls=True))


def reward(trajectory: Trajectory) -> float:
    """Return 1 for a right answer of a trajectory that called a tool, else 0."""
    is_valid = trajectory.has_ended and trajectory.n_calls > 0
    return answer_reward(trajectory.answer, trajectory.task.answer) if is_valid else 0.0


def evaluate(model: Any, tokenizer: Any, questions: Sequence[Any], temperature: float) -> float:
    """Return the share of questions with a right answer, with a tool that answers at once."""
    engine = TransformersEngine(model, tokenizer, temperature=temperature, seed=0)
    tasks = tasks_of(questions, SYSTEM)
    found = rollout(
        agent(), engine, tokenizer, tasks, max_turns=MAX_TURNS, max_new_tokens=MAX_NEW_TOKENS, reward=reward
    )
    event_loop.run(engine.close())
    return sum(trajectory.reward for trajectory in found) / len(found)


def problems(batches: int, prompts: int, seed: int) -> Iterator[Task]:
    """Yield the problems of training, batch by batch."""
    for batch in range(batches):
        asked = tiny_questions(prompts, seed=seed * 10_000 + batch, split="train")
        for task in tasks_of(asked, SYSTEM):
            yield replace(task, name=f"{batch}-{task.name}")


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
    staleness: int = 1,
    transforms: Compose,
    seed: int = 0,
    out: Path | None = None,
    curve: list[dict[str, float]],
) -> None:
    """Train a model, and record figures of each iteration.

    Args:
        model: The model, trained in place.
        tokenizer: Its tokenizer.
        iterations: Largest number of iterations, of one batch each.
        prompts: Problems per batch.
        group: Answers per problem.
        lr: Learning rate of AdamW.
        minibatch: Trajectories per optimizer step.
        target: Share of right answers over the last four batches, at temperature 1, that ends training.
        staleness: Largest age of a batch in updates; 0: sampling and training alternate.
        transforms: The agent.
        seed: Seed of sampling and of the order of trajectories.
        out: Folder for `curve.csv`, or None.
        curve: List to which one dict of figures per iteration is appended.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    # The engine samples from a copy, which `update_policy_weights_` brings up to date between two steps.
    engine = TransformersEngine(copy.deepcopy(model), tokenizer, max_concurrent=prompts * group, seed=seed)
    collector = AgentCollector(
        transforms,
        engine=engine,
        tokenizer=tokenizer,
        tasks=problems(iterations, prompts, seed),
        group_size=group,
        groups_per_batch=prompts,
        max_in_flight=(1 + staleness) * prompts * group,
        max_staleness=staleness,
        max_turns=MAX_TURNS,
        max_new_tokens=MAX_NEW_TOKENS,
        reward=reward,
    )
    loss_fn = GRPOLoss(
        training_policy(model, tokenizer), masking_strategy="rlhf", clip_epsilon=0.2, entropy_bonus=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: event_loop.run(engine.close()))
        stack.enter_context(collector)
        for iteration, batch in enumerate(collector):
            rows = batch.tensordicts
            # Rows of equal rewards have no gradient, but cost a pass, and AdamW moves without a gradient.
            taught = [row for row in rows if row["advantage"].any()]
            random.shuffle(taught)
            losses = [0.0]
            for start in range(0, len(taught), minibatch):
                loss = loss_fn(lazy_stack(taught[start : start + minibatch])).loss_objective
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
            versions = torch.cat([row["collector", "policy_version"] for row in rows])
            figures = {
                "iteration": iteration,
                "seconds": round(time.perf_counter() - began, 1),
                "success": mean(row["reward"].item() for row in rows),
                "calls": mean(row["agentic", "n_calls"].item() > 0 for row in rows),
                "tokens": (versions >= 0).sum().item() / len(rows),
                "age": engine.version - versions[versions >= 0].float().mean().item(),
                "loss": mean(losses),
            }
            collector.update_policy_weights_(model)
            curve.append(figures)
            print(" ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)
            if out is not None:
                write_curve(curve, out)
            if len(curve) >= 4 and mean(row["success"] for row in curve[-4:]) >= target:
                break
        print(collector.stats, flush=True)


def mean(values: Iterator[float] | Sequence[float]) -> float:
    """Return the mean of numbers."""
    found = list(values)
    return sum(found) / len(found)


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
    parser.add_argument("--out", type=Path, default=Path("runs/staleness-1"))
    parser.add_argument("--model", type=Path, help="initial model; default: train a weak one in OUT/weak")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--staleness", type=int, default=1, help="largest age of a batch in weight updates")
    parser.add_argument("--tool-latency", type=float, default=2.0, help="median wait of a call, in seconds")
    parser.add_argument("--tool-tail", type=float, default=5.0, help="99th percentile, in medians")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = options.model or options.out / "weak"
    if not (folder / "model.safetensors").is_file():
        sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
        import train_tiny

        train_tiny.train(folder, weak=True, threads=options.threads)
    model, tokenizer = load_tiny(folder=folder)
    held_out = tiny_questions(128, seed=1)
    before = [evaluate(model, tokenizer, held_out, temperature) for temperature in (0.0, 1.0)]
    print(f"before: {before[0]:.1%} right when greedy, {before[1]:.1%} when sampled", flush=True)
    curve: list[dict[str, float]] = []
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends training early and evaluates the model
        train(
            model,
            tokenizer,
            curve=curve,
            iterations=options.iterations,
            lr=options.lr,
            staleness=options.staleness,
            transforms=agent(options.tool_latency, options.tool_tail, seed=options.seed),
            seed=options.seed,
            out=options.out,
        )
    after = [evaluate(model, tokenizer, held_out, temperature) for temperature in (0.0, 1.0)]
    print(f"after: {after[0]:.1%} right when greedy, {after[1]:.1%} when sampled, of {len(held_out)}")
    model.save_pretrained(options.out / "model")
    tokenizer.save_pretrained(options.out / "model")
    plot(curve, before[0], after[0], options.out / "curve.png")


if __name__ == "__main__":
    main()
