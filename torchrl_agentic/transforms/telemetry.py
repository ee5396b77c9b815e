"""What ToolCompose says of each turn, under "agentic": its keys, their specs, their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Composite, TensorSpec, Unbounded

from torchrl_agentic.messages import Status, ToolResult

KEY = "agentic"
_DTYPES = {
    "any_tool_calls": torch.bool,
    "any_error": torch.bool,
    "stop_requested": torch.bool,
    "n_calls": torch.int64,
    "n_errors": torch.int64,
    "n_infra": torch.int64,
    "turn": torch.int64,
    "tool_reward": torch.float32,
    "tool_seconds": torch.float32,
}
_BY_DTYPE = {dtype: [name for name in _DTYPES if _DTYPES[name] is dtype] for dtype in set(_DTYPES.values())}


def spec(shape: torch.Size, device: torch.device | None) -> Composite:
    """Describe the entries, each [*shape, 1]."""
    each = torch.Size((*shape, 1))
    entries: dict[str, TensorSpec] = {
        name: Binary(n=1, shape=each, dtype=dtype, device=device)
        if dtype is torch.bool
        else Unbounded(shape=each, dtype=dtype, device=device)
        for name, dtype in _DTYPES.items()
    }
    return Composite(entries, shape=shape, device=device)


def report(
    rows: Iterable[tuple[int, int, Sequence[ToolResult]]], shape: torch.Size, device: torch.device | None
) -> TensorDict:
    """Make the entries of (row, turn, results); rows that are not named get zeros."""
    columns: dict[str, list[float]] = {name: [0] * shape.numel() for name in _DTYPES}
    for row, turn, results in rows:
        columns["turn"][row] = turn
        if not results:
            continue
        errors = sum(result.is_error for result in results)
        columns["any_tool_calls"][row] = True
        columns["any_error"][row] = errors > 0
        columns["stop_requested"][row] = any(result.stop for result in results)
        columns["n_calls"][row] = len(results)
        columns["n_errors"][row] = errors
        columns["n_infra"][row] = sum(result.status is Status.INFRA for result in results) if errors else 0
        columns["tool_reward"][row] = sum(result.reward or 0.0 for result in results)
        columns["tool_seconds"][row] = sum(
            result.timing.run_s for result in results if result.timing is not None
        )
    entries: dict[str, torch.Tensor] = {}
    for dtype, names in _BY_DTYPE.items():  # one tensor per type is cheaper than one per name
        made = torch.tensor([columns[name] for name in names], dtype=dtype, device=device)
        entries.update(zip(names, made.reshape(len(names), *shape, 1).unbind(0), strict=True))
    return TensorDict(entries, batch_size=shape, device=device)
