"""GRPO with trees against GRPO with flat groups, at equal numbers of sampled tokens.

    python examples/tree_grpo.py --out runs/trees
    python examples/tree_grpo.py --out runs/trees --seeds 1 --tokens 20000

The task is one for which trees should help: an expensive beginning, then a few decisions, and one reward at
the end. The model writes about 100 words of notes about a vault, which take most of its tokens, and inspects
it; then it sets three dials, one per turn. The reward is 1 if the vault is open, else 0. A flat group pays
for the notes of each trajectory anew. A tree writes them once, and forks behind them and behind each dial;
the branches of a fork show which position was right.

The policy is as small as the question allows: it knows the form of these conversations as a table of which
token follows which, and learns one more table, the logits of the positions by vault and number of dials set.
Collector, tools, sessions and batches are those of any other model. Both kinds of groups train on the same
vaults with the same optimizer and learning rate, until each has sampled the same number of tokens, which are
counted exactly. Trees have more leaves, so that they run more tool calls and train on more rows.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import itertools
import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrl_agentic import AgentCollector, StopSignal, Tool, ToolCompose
from torchrl_agentic.collectors import Branching, Task, Trajectory
from torchrl_agentic.engines import Sampled
from torchrl_agentic.engines.base import Engine, OnIds
from torchrl_agentic.testing import byte_tokenizer
from torchrl_agentic.tools.base import ToolContext

CODES = {"amber": "312", "birch": "023", "cedar": "130", "dune": "201"}
"""Vaults, and the positions of their dials."""
N_DIALS = 3
N_NOTES = 96
"""Mean number of words of the notes."""
WORDS = ("north", "south", "steel", "quiet", "heavy", "round", "green", "hollow")
CALLS = ('<tool_call>{"name": "dial", "arguments": {"to": ', "}}</tool_call>")
INSPECT = '<tool_call>{"name": "inspect", "arguments": {}}</tool_call>'
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""
KINDS: dict[str, tuple[int, Branching | None]] = {
    "flat groups of 8": (8, None),
    "one tree of 27 leaves": (1, Branching(at=(1, 2, 3), width=3)),
}
"""Number of trajectories or trees of a group, and where they fork."""


class Inspect(Tool):
    """Says how many dials a vault has."""

    name, description = "inspect", "Inspect the vault."
    input_schema: Mapping[str, Any] = {"type": "object", "properties": {}}

    async def run(self, args: Mapping[str, Any], ctx: ToolContext) -> str:
        """Return the number of dials."""
        return str(N_DIALS)


class Dial(Tool):
    """The dials of one vault, which remember their positions."""

    name, description = "dial", "Set the next dial."
    input_schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {"to": {"type": "integer", "minimum": 0, "maximum": 3}},
        "required": ["to"],
    }

    def __init__(self, positions: Sequence[int] = ()) -> None:
        self.positions = list(positions)

    @contextlib.asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open the dials of a trajectory, none of which is set."""
        yield Dial()

    @contextlib.asynccontextmanager
    async def branch(self, live: Tool, trajectory: str) -> AsyncGenerator[Tool]:
        """Open a copy of the dials of another trajectory."""
        assert isinstance(live, Dial)
        yield Dial(live.positions)

    async def run(self, args: Mapping[str, Any], ctx: ToolContext) -> str:
        """Set the next dial; the third one ends the trajectory, whatever is behind the door."""
        self.positions.append(args["to"])
        if len(self.positions) == N_DIALS:
            raise StopSignal("done")
        return "set"


async def reward(trajectory: Trajectory) -> float:
    """Return 1 if the three dials are those of the vault, else 0."""
    dials = [str(call.args["to"]) for call, result in trajectory.calls if call.tool == "dial" and call.args]
    return float("".join(dials) == trajectory.task.answer)


def vaults() -> Iterator[Task]:
    """Yield each vault once per round, without end."""
    for number in itertools.count():
        for name, code in CODES.items():
            yield Task(f"{name}-{number}", [{"role": "user", "content": name}], answer=code)


def tokenizer() -> Any:
    """Return a tokenizer with one token per word of these conversations."""
    found = byte_tokenizer("tiny-qwen", added=(*CALLS, INSPECT, *WORDS, *CODES))
    found.chat_template = TEMPLATE
    return found


def collector_of(engine: Any, words: Any, kind: str, seed: int) -> AgentCollector:
    """Return the collector of one run; a batch has a group of each vault."""
    group, branching = KINDS[kind]
    return AgentCollector(
        ToolCompose([Inspect(), Dial()], parser="hermes"),
        engine=engine,
        tokenizer=words,
        tasks=vaults(),
        group_size=group,
        groups_per_batch=len(CODES),
        max_in_flight=512,
        max_staleness=0,
        max_turns=5,
        max_new_tokens=8 * N_NOTES,
        reward=reward,
        branching=branching,
        name=f"{kind}-{seed}",
    )


class Policy(torch.nn.Module):
    """Knows which token follows which; learns logits of the positions by vault and number of dials set.

    Args:
        words: The tokenizer.
    """

    def __init__(self, words: Any) -> None:
        super().__init__()
        size = len(words)
        self.vaults = words.convert_tokens_to_ids([*CODES])
        notes, digits = (words.convert_tokens_to_ids([*texts]) for texts in (WORDS, "0123"))
        (space,) = words.encode(" ", add_special_tokens=False)
        self.begin, self.end, self.inspect = words.convert_tokens_to_ids([*CALLS, INSPECT])
        follows = torch.full((2, size, size), -20.0)  # before and after the inspection
        follows[0, space, notes] = 0.0
        follows[1, space, self.begin] = 0.0
        follows[0, notes] = follows[0, space].clone()
        follows[0, notes, self.inspect] = math.log(len(WORDS) / (N_NOTES - 1))
        follows[1, self.begin, digits] = 0.0
        follows[1, digits, self.end] = 0.0
        follows[1, [self.inspect, self.end], words.eos_token_id] = 0.0
        self.register_buffer("follows", follows)
        self.digits = digits
        self.learned = torch.nn.Parameter(torch.zeros(len(CODES), N_DIALS + 1, len(digits)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the token behind each token of one trajectory, [T, V].

        Args:
            ids: Token ids, [T].
        """
        known = set(ids[:10].tolist())
        vault = next(number for number, token in enumerate(self.vaults) if token in known)
        is_inspected = (ids == self.inspect).cumsum(0)
        n_set = (ids == self.end).cumsum(0)
        logits = self.follows[is_inspected, ids].index_add(
            -1, torch.tensor(self.digits), self.learned[vault, n_set]
        )
        return logits.log_softmax(-1)


class PolicyEngine(Engine):
    """Samples from a `Policy`.

    Args:
        policy: The policy, which the engine owns.
        stop: Id that ends an answer.
        seed: Seed of the sampling.
    """

    def __init__(self, policy: Policy, stop: int, seed: int) -> None:
        self.version, self.max_concurrent = 0, 256
        self._policy, self._stop, self._rng = policy, stop, np.random.default_rng(seed)

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Sample one answer."""
        policy, found, log_probs = self._policy, list[int](), list[float]()
        vault = next(number for number, token in enumerate(policy.vaults) if token in ids[:10])
        is_inspected, n_set, last = int(policy.inspect in ids), ids.count(policy.end), ids[-1]
        follows, learned = policy.follows.numpy(), policy.learned.detach().numpy()
        while len(found) < max_tokens and last != self._stop:
            logits = follows[is_inspected, last].copy()
            logits[policy.digits] += learned[vault, n_set]
            last = int(np.argmax(logits + self._rng.gumbel(size=len(logits))))
            found.append(last)
            log_probs.append(float(logits[last] - np.logaddexp.reduce(logits)))
            is_inspected, n_set = is_inspected | (last == policy.inspect), n_set + (last == policy.end)
        if on_ids is not None:
            on_ids(found)
        return Sampled(found, log_probs, "stop" if last == self._stop else "length")

    async def update(self, weights: Any) -> int:
        """Load the weights of a policy."""
        self._policy.load_state_dict(weights)
        self.version += 1
        return self.version

    async def close(self) -> None:
        """Do nothing."""


def loss_of(policy: Policy, rows: Sequence[Any]) -> torch.Tensor:
    """Return the loss of GRPO for one step on fresh samples, whose ratio of probabilities is 1.

    Args:
        policy: The policy.
        rows: Rows of a batch.
    """
    gains: list[torch.Tensor] = []
    for row in rows:
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        log_probs = policy(ids[:-1]).gather(-1, ids[1:, None])[:, 0]
        ratios = (log_probs - row["log_probs", "full"][1:])[mask[1:]].exp()
        gains.append(ratios * row["advantage"].item())
    return -torch.cat(gains).mean()


def train(kind: str, words: Any, *, budget: int, lr: float, seed: int) -> Iterator[dict[str, Any]]:
    """Train a policy; yield the sampled tokens and the share of opened vaults of each step.

    Args:
        kind: One of `KINDS`.
        words: The tokenizer.
        budget: Number of sampled tokens after which training ends.
        lr: Learning rate of Adam.
        seed: Seed of the sampling.
    """
    policy = Policy(words)
    engine = PolicyEngine(copy.deepcopy(policy), words.eos_token_id, seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    tokens = 0
    with collector_of(engine, words, kind, seed) as collector:
        for step, batch in enumerate(collector):
            rows = batch.tensordicts
            tokens += sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows)
            rewards = root_rewards(rows)
            # Rows of equal rewards have no gradient, but enlarge the mean, and Adam moves without a gradient.
            taught = [row for row in rows if row["advantage"].any()]
            if taught:
                optimizer.zero_grad()
                loss_of(policy, taught).backward()
                optimizer.step()
            collector.update_policy_weights_(policy)
            opened = sum(rewards) / len(rewards)
            yield {"kind": kind, "seed": seed, "step": step, "tokens": tokens, "opened": opened}
            if tokens >= budget:
                return


def root_rewards(rows: Sequence[Any]) -> list[float]:
    """Return the mean reward of each tree, or the reward of each flat trajectory."""
    is_tree = ("collector", "path") in rows[0].keys(True)
    roots = [row for row in rows if not is_tree or "." not in row["collector", "path"]]
    return [row["reward"].item() for row in roots]


def write(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the curve as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(curve[0]))
        writer.writeheader()
        writer.writerows(curve)


def opened_at(run: Sequence[Mapping[str, Any]], tokens: Sequence[float], width: int) -> list[float]:
    """Return the share of opened vaults around numbers of sampled tokens, in percent.

    Args:
        run: Points of one run.
        tokens: Numbers of sampled tokens.
        width: Number of tokens before each number whose steps are averaged; at least the last step is.
    """
    found: list[float] = []
    for at in tokens:
        before = [point for point in run if point["tokens"] <= at]
        near = [100 * one["opened"] for one in before if one["tokens"] > at - width or one is before[-1]]
        found.append(sum(near) / len(near) if near else math.nan)
    return found


def runs_of(curve: Sequence[Mapping[str, Any]], kind: str) -> list[list[Mapping[str, Any]]]:
    """Return the runs of one kind, by seed.

    Args:
        curve: Points of all runs.
        kind: One of `KINDS`.
    """
    points = [point for point in curve if point["kind"] == kind]
    return [[p for p in points if p["seed"] == seed] for seed in sorted({p["seed"] for p in points})]


def plot(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the mean of the seeds for each kind of group, and each seed thinly."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    last = max(point["tokens"] for point in curve)
    tokens = np.linspace(0, last, 61)[3:]
    for kind, color in zip(KINDS, ("tab:gray", "tab:green"), strict=True):
        found = [opened_at(run, tokens, last // 20) for run in runs_of(curve, kind)]
        for values in found:
            axes.plot(tokens / 1000, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(tokens / 1000, np.mean(found, 0), color=color, linewidth=2.5, label=kind)
    axes.set(xlabel="sampled tokens, thousands", ylabel="vaults opened, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train both kinds with several seeds, and write the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/trees"))
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled tokens of each run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.4)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    words = tokenizer()
    curve: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for kind in KINDS:
            curve += train(kind, words, budget=options.tokens, lr=options.lr, seed=seed)
            (*_, run) = runs_of(curve, kind)
            at = [options.tokens // 4, options.tokens // 2, options.tokens]
            shares = ", ".join(f"{share:.0f} %" for share in opened_at(run, at, options.tokens // 10))
            print(f"{kind}, seed {seed}: {shares} opened at {at} sampled tokens", flush=True)
            write(curve, options.out / "curve.csv")
    plot(curve, options.out / "curve.png")


if __name__ == "__main__":
    main()
