"""What ToolCompose says of each turn, under "agentic": its keys, their specs, their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor, TensorSpec, Unbounded

from torchrl_agentic.messages import JSON, ParsedCall, Status, ToolResult

KEY = "agentic"
TRAJECTORY = (KEY, "trajectory")
WORTH = (KEY, "trajectory_reward")
CALLS = (KEY, "calls")
_stack: Any = NonTensorStack  # declared abstract, which it is not
_DTYPES = {
    "any_tool_calls": torch.bool,
    "any_error": torch.bool,
    "stop_requested": torch.bool,
    "n_calls": torch.int64,
    "n_errors": torch.int64,
    "n_infra": torch.int64,
    "turn": torch.int64,
    "tool_reward": torch.float32,
    "trajectory_reward": torch.float32,
    "tool_seconds": torch.float32,
    "trajectory": torch.int64,
}
_BY_DTYPE = {dtype: [name for name in _DTYPES if _DTYPES[name] is dtype] for dtype in set(_DTYPES.values())}


def spec(shape: torch.Size, device: torch.device | None, *, calls: bool = False) -> Composite:
    """Describe the entries, each [*shape, 1]. calls: with the list of each row's calls, [*shape]."""
    each = torch.Size((*shape, 1))
    entries: dict[str, TensorSpec] = {
        name: Binary(n=1, shape=each, dtype=dtype, device=device)
        if dtype is torch.bool
        else Unbounded(shape=each, dtype=dtype, device=device)
        for name, dtype in _DTYPES.items()
    }
    if calls:
        entries["calls"] = NonTensor(shape=shape, device=device, example_data=[])
    return Composite(entries, shape=shape, device=device)


def report(
    rows: Iterable[tuple[int, int, Sequence[ToolResult]]],
    trajectories: Mapping[int, int],
    shape: torch.Size,
    device: torch.device | None,
) -> TensorDict:
    """Make the entries of a step or a reset.

    Args:
        rows: Row, turn and results of the rows that have any; the others get zeros.
        trajectories: Row → number of its trajectory.
        shape: The batch size, [*B].
        device: The device of the entries.
    """
    columns: dict[str, list[float]] = {name: [0] * shape.numel() for name in _DTYPES}
    columns["trajectory"] = [trajectories.get(row, 0) for row in range(shape.numel())]
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


def add_worth(tensordict: TensorDictBase, worth: Mapping[int, float]) -> None:
    """Add what trajectories were worth to tools, by row."""
    if any(worth.values()):
        known = tensordict.get(WORTH)
        values = [worth.get(row, 0.0) for row in range(known.numel())]
        more = torch.tensor(values, dtype=known.dtype, device=known.device)
        tensordict.set(WORTH, known + more.reshape(known.shape))


def call_records(
    calls: Sequence[ParsedCall], results: Sequence[ToolResult], number: int
) -> list[dict[str, JSON]]:
    """Say of each call of a turn what came of it.

    number: how many calls the trajectory had before, as the sources of a `TokenLedger` count.
    """
    return [
        {
            "call_id": call.call_id,
            "number": number + index,
            "tool": call.tool,
            "status": str(result.status),
            "reward": result.reward,
            "metrics": dict(result.metrics or {}),
        }
        for index, (call, result) in enumerate(zip(calls, results, strict=True))
    ]


def call_lists(by_row: Mapping[int, list[dict[str, JSON]]], shape: torch.Size) -> TensorDictBase:
    """Make the entry of the calls of all rows, a list for each."""
    flat: list[Any] = [NonTensorData(by_row.get(row, [])) for row in range(shape.numel())]
    for size in reversed(shape[1:]):
        flat = [_stack(*flat[start : start + size]) for start in range(0, len(flat), size)]
    return _stack(*flat)
