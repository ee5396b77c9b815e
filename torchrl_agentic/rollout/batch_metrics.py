"""`batch_metrics`: the scalars of a batch; `average_metrics`: their means over processes."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import distributed

from torchrl_agentic.trajectory.reasons import REASONS
from torchrl_agentic.transforms import specs

_SUMS = ("turn", "n_calls", "n_errors", "n_infra", "tool_seconds", "token_drift")


def batch_metrics(batch: TensorDictBase, *, version: int | None = None) -> dict[str, float]:
    """Return the means of a batch of trajectories, for `Logger.log_metrics` of TorchRL.

    Args:
        batch: A batch of `AgentCollector`, or of `trajectory_batch` with "reward" and "advantage", [N]. Of
            trees, the rows that end a trajectory count, and the sampled tokens of all rows.
        version: Policy version of the trainer, for the age of the tokens where the batch has versions.

    Returns:
        "reward/mean", "reward/std", "reward/max"; "groups/mixed", the share of groups with an advantage other
        than 0, or of rows if the batch has no ("collector", "group"); "tokens/sampled", "tokens/all", per
        trajectory; "age/mean" and "age/max", in weight updates per token, if any was sampled. Where the batch
        has them, under "score" the parts of scores, under "agentic" the means of its entries, and under
        "ended" the share of each reason.
    """
    segments: list[Any] = list(batch.unbind(0))
    rows = [
        row for row in segments if ("collector", "shared") not in row.keys(True) or row["next", "done"].all()
    ]
    # In float64, because the squares of large rewards overflow float32.
    rewards = torch.stack([row["reward"].reshape(()).double() for row in rows])
    metrics = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(unbiased=False).float().item(),
        "reward/max": rewards.max().item(),
        "groups/mixed": _share_of_mixed_groups(segments),
        "tokens/sampled": sum(int(row["masks", "all_assistant_mask"].sum()) for row in segments) / len(rows),
        "tokens/all": _mean([float(len(row["tokens", "full"])) for row in rows]),
    }
    if version is not None and ("collector", "policy_version") in rows[0].keys(True):
        versions = torch.cat([row["collector", "policy_version"] for row in segments])
        ages = version - versions[versions >= 0].float()
        metrics |= {"age/mean": ages.mean().item(), "age/max": ages.max().item()} if len(ages) else {}
    parts = rows[0].get((specs.KEY, "score"), None)
    for name in () if parts is None else parts.keys():
        values = [row[specs.KEY, "score", name].item() for row in rows]
        known = [value for value in values if not math.isnan(value)]  # rows may lack a part
        metrics |= {f"score/{name}": _mean(known)} if known else {}
    for name in _SUMS:
        if (specs.KEY, name) in rows[0].keys(True):
            metrics[f"agentic/{name}"] = _mean([row[specs.KEY, name].float().item() for row in rows])
    if (specs.KEY, "ended_by") in rows[0].keys(True):
        reasons = list(map(_reason, rows))
        metrics |= {f"ended/{one}": reasons.count(one) / len(rows) for one in sorted(set(reasons))}
    return metrics


def average_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the means of scalars over the processes of `torch.distributed`, which must all call this.

    Maxima ("*/max") are those over all processes, shares ("ended/*") count as 0 where they are missing, and
    other scalars are averaged over the processes that have them.

    Args:
        metrics: Scalars by name.
    """
    found: list[Any] = [metrics]
    if distributed.is_initialized():
        found = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, metrics)
    names = dict.fromkeys(name for one in found for name in one)
    return {name: _merged(name, [one[name] for one in found if name in one], len(found)) for name in names}


def _merged(name: str, values: list[float], n_processes: int) -> float:
    if name.endswith("/max"):
        return max(values)
    return sum(values) / (n_processes if name.startswith("ended/") else len(values))


def _reason(row: Any) -> str:
    """Return why a trajectory ended; only batches of collectors have the reasons of the user's own stages."""
    if ("collector", "reason") in row.keys(True):
        return row["collector", "reason"]
    return REASONS[int(row[specs.KEY, "ended_by"])]


def _share_of_mixed_groups(rows: list[Any]) -> float:
    is_mixed: dict[int, bool] = {}
    for number, row in enumerate(rows):
        group = int(row["collector", "group"]) if ("collector", "group") in row.keys(True) else number
        is_mixed[group] = is_mixed.get(group, False) or bool(row["advantage"].any())
    return _mean([float(value) for value in is_mixed.values()])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
