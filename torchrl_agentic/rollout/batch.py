"""Make batches for a loss from rollouts: one row per trajectory, with the mask of sampled tokens."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import NestedKey

from torchrl_agentic.collectors.batching import group_advantage, ledger_row
from torchrl_agentic.engines.sampling import TEMPERATURE, Sampling, sampling_of, warn_of_bias
from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.tools.row_data import RIGHT_ANSWERS
from torchrl_agentic.trajectory.columns import COLUMNS, folded
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.turn_tokenizer import read_ledger

logger = logging.getLogger(__name__)

Steps = TensorDictBase | Sequence[TensorDictBase]
_TURN = (specs.KEY, "turn")
_GROUP = ("collector", "group")


def trajectory_batch(
    steps: Steps | Sequence[TokenLedger], *, columns: Sequence[NestedKey] = ()
) -> LazyStackedTensorDict:
    """Return each finished trajectory as one row, whose tokens hold all its turns.

    The batch is what `GRPOLoss(..., masking_strategy="rlhf")` takes, once each row has an "advantage" [1, 1]:
    from `group_advantage`, or from TorchRL's `MCAdvantage` as the transform of a replay buffer.

    A trajectory counts once, at the step that ended it, however often the steps repeat it: `env.rollout`
    repeats the last step of a row that waits for others.

    Args:
        steps: Steps of an environment with a `TurnTokenizer`: a rollout [B, T], a batch of a collector, a
            list of either; or ledgers that were kept. Steps of trajectories that have not ended are left out,
            and trajectories without a sampled token, whose prompt left no room for an answer.
        columns: Additional entries to keep of the step that ended a trajectory, such as columns of the
            data set.

    Returns:
        A ragged batch [N], in the order of the steps. T is the number of tokens up to the last sampled one:

        - ("tokens", "full"): int64, [T].
        - ("masks", "all_attention_mask"): bool, [T], all true.
        - ("masks", "all_assistant_mask"): bool, [T], true where a token was sampled.
        - ("log_probs", "full"): float32, [T], in nats, as sampled; NaN for the other tokens.

        And where the steps have them, not from ledgers:

        - ("next", "reward"): float32, [1, 1], the sum over the steps of the trajectory that were given; NaN
          if there is no verdict (`ToolCompose`).
        - ("next", "done"), "terminated", "truncated": bool, [1].
        - ("agentic", …): the entries of the steps, each [1], as the turns add up: counts and rewards are
          sums, flags are true if one step's is, and numbers such as "turn", and those of stages of your own,
          are those of the last step.
        - "query", "answer" and the other columns that `AnswerRewardTransform` knows, and `columns`: as they
          are.

    Raises:
        ValueError: If no trajectory with a sampled token is done in these steps, or a ledger has none.
        KeyError: If a trajectory lacks one of `columns`.
    """
    rows: list[TensorDictBase | None]
    if isinstance(steps, Sequence) and steps and isinstance(steps[0], TokenLedger):
        kept = cast("Sequence[TokenLedger]", steps)
        if empty := [number for number, ledger in enumerate(kept) if not ledger.sampled_stop]:
            raise ValueError(
                f"ledger {empty[0]} has no sampled token, so there is nothing to train: leave it out"
            )
        rows = [ledger_row(ledger) for ledger in kept]
    else:
        rows = [row for _, row in _ended(cast("Steps", steps), columns)]
        if not rows:
            raise ValueError("no trajectory has ended in these steps; roll out to the end of each")
    found = [row for row in rows if row is not None]
    if not found:
        raise ValueError("no trajectory in these steps has a sampled token: their prompts are too long")
    return LazyStackedTensorDict(*found, stack_dim=0)


def _ended(
    steps: Steps, columns: Sequence[NestedKey]
) -> Iterator[tuple[TensorDictBase, TensorDictBase | None]]:
    """Yield the step that ended each trajectory, and its row; None if it has no sampled token."""
    known = list(_distinct(steps))
    returns, facts = _returns(known), _facts(known)
    for step in known:
        if _has_ended(step):
            ledger = read_ledger(step.get("next"))
            of_trajectory = facts.get(_trajectory(step), {})
            yield step, _kept(step, ledger, returns, of_trajectory, columns) if ledger.sampled_stop else None


def group_batches(
    steps: Iterable[Steps], *, group_size: int, groups_per_batch: int = 1, key: NestedKey = "query"
) -> Iterator[LazyStackedTensorDict]:
    """Yield batches of whole groups from the steps of TorchRL's collectors, as `AgentCollector` yields them.

    Args:
        steps: The batches of a collector, such as an `LLMCollector` with `yield_completed_trajectories=True`.
        group_size: Number of trajectories per prompt.
        groups_per_batch: Number of groups in a batch; groups that are left over at the end are not yielded.
        key: Column that all trajectories of a group share, and no other group that runs.

    A trajectory without a verdict (its reward is NaN), or without a sampled token, leaves its group short:
    the others are compared with each other, and a warning says so.

    Yields:
        The rows of `trajectory_batch`, group by group, with "reward" and "advantage", float32, [1, 1] each,
        as `group_advantage` computes it, and ("collector", "group"), int64, [1], the number of the group. If
        the collector has the policy of `agent_policy`, ("collector", "temperature"), float32, [1].

    Raises:
        ValueError: If the steps have no rewards, or one is not finite in float32.
    """
    begun: dict[Any, list[TensorDictBase | None]] = {}
    numbers = itertools.count()
    sampling = sampling_of(getattr(steps, "policy", None))
    warn_of_bias(sampling)
    whole: list[list[TensorDictBase]] = []
    for some in steps:
        for step, row in _ended(some, [key]):
            if ("next", "reward") not in step.keys(True):
                raise ValueError("these steps have no rewards: append a reward transform to the environment")
            is_usable = row is not None and not bool(row["next", "reward"].isnan() or _has_failed(step))
            name = str(step[key])
            begun.setdefault(name, []).append(row if is_usable else None)
            if len(begun[name]) == group_size:
                members = begun.pop(name)
                group = [one for one in members if one is not None]
                if len(group) < group_size:
                    lost = group_size - len(group)
                    logger.warning("%d of %d trajectories of %.80r cannot be used", lost, group_size, name)
                if group:
                    whole.append(_compared(group, next(numbers), sampling))
        while len(whole) >= groups_per_batch:
            batch, whole = whole[:groups_per_batch], whole[groups_per_batch:]
            yield LazyStackedTensorDict(*(one for group in batch for one in group), stack_dim=0)


def _has_failed(step: TensorDictBase) -> bool:
    """Return True if the trajectory could not begin, or its simulated user failed."""
    flags = (step.get(("next", specs.KEY, name), None) for name in ("not_begun", "user_error"))
    return any(flag is not None and bool(flag.any()) for flag in flags)


def _compared(group: list[TensorDictBase], number: int, sampling: Sampling | None) -> list[TensorDictBase]:
    """Write reward, advantage and group into the rows of a group, as `AgentCollector` does."""
    rewards = torch.stack([row["next", "reward"] for row in group])
    for row, reward, advantage in zip(group, rewards, group_advantage(rewards, len(group)), strict=True):
        row.update({"reward": reward, "advantage": advantage}).set(_GROUP, torch.tensor([number]))
        if sampling is not None:
            row.set(TEMPERATURE, torch.tensor([sampling.temperature]))
    return group


def ledgers(steps: Steps) -> list[TokenLedger]:
    """Return the ledger of each finished trajectory, in the order of the steps."""
    return [read_ledger(step.get("next")) for step in finished(steps)]


def finished(steps: Steps) -> list[TensorDictBase]:
    """Return the steps, each of one row, in which a trajectory ended: one per trajectory."""
    return [step for step in _distinct(steps) if _has_ended(step)]


def _rows(steps: Steps) -> Iterator[TensorDictBase]:
    """Yield the steps of single rows."""
    if not isinstance(steps, TensorDictBase):
        for step in steps:
            yield from _rows(step)
    elif steps.batch_dims == 0:
        yield steps
    else:
        yield from border.leaves(steps)[1]


def _distinct(steps: Steps) -> Iterator[TensorDictBase]:
    """Yield each step once, without steps of rows that were done before."""
    seen: set[tuple[int, int]] = set()
    for step in _rows(steps):
        done, trajectory = step.get("done", None), _trajectory(step)
        if done is not None and bool(done.any()):
            continue
        if trajectory:
            key = (trajectory, int(step.get(("next", *_TURN))))
            if key in seen:
                continue
            seen.add(key)
        yield step


def _trajectory(step: TensorDictBase) -> int:
    """Return the number of a step's trajectory; 0 if it has none."""
    number = step.get(("next", *specs.TRAJECTORY), None)
    return 0 if number is None else int(number)


def _has_ended(step: TensorDictBase) -> bool:
    return bool(step.get(("next", "done")).any())


def _returns(steps: Sequence[TensorDictBase]) -> dict[int, torch.Tensor]:
    """Return the sum of the rewards of each trajectory, by its number."""
    returns: dict[int, torch.Tensor] = {}
    for step in steps:
        trajectory, reward = _trajectory(step), step.get(("next", "reward"), None)
        if trajectory and reward is not None:
            known = returns.get(trajectory)
            returns[trajectory] = reward if known is None else known + reward
    return returns


def _facts(steps: Sequence[TensorDictBase]) -> dict[int, dict[str, Any]]:
    """Return the entries under "agentic" of each trajectory, folded over its steps, by its number."""
    found: dict[int, dict[str, Any]] = {}
    for step in steps:
        entries = step.get(("next", specs.KEY), None)
        if entries is None or not _trajectory(step):
            continue
        facts = found.setdefault(_trajectory(step), {})
        for name in entries.keys():  # noqa: SIM118  a TensorDict iterates over its rows
            column, entry = COLUMNS.get(str(name)), entries.get(name)
            if column is None and isinstance(entry, torch.Tensor) and entry.numel() == 1:
                facts[str(name)] = entry.item()
            elif column is not None and column.kind is not list:
                new = column.kind(entry.item())
                facts[column.name] = folded(column, facts[column.name], new) if column.name in facts else new
    return found


def _kept(
    step: TensorDictBase,
    ledger: TokenLedger,
    returns: dict[int, torch.Tensor],
    facts: Mapping[str, Any],
    columns: Sequence[NestedKey],
) -> TensorDictBase:
    """Make the row of a trajectory from the step that ended it, and its tokens."""
    row = ledger_row(ledger)
    reward = returns.get(_trajectory(step), step.get(("next", "reward"), None))
    if reward is not None:
        row.set(("next", "reward"), reward.reshape(1, 1).float())
    for key in ("done", "terminated", "truncated"):
        if (flag := step.get(("next", key), None)) is not None:
            row.set(("next", key), flag.reshape(1))
    for name, value in facts.items():
        kind = COLUMNS[name].kind if name in COLUMNS else type(value)
        row.set((specs.KEY, name), torch.tensor([value], dtype=specs.DTYPES[kind]))
    for key in ("query", *RIGHT_ANSWERS, *columns):
        if (value := step.get(key, None)) is not None:
            row.set(key, value)
        elif key in columns:
            known = ", ".join(map(str, step.keys()))
            raise KeyError(f"the steps have no {key!r} to keep; they have: {known}")
    return row
