"""The entries that this package writes under "agentic": their keys, specs and values."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor, TensorSpec, Unbounded

from torchrl_agentic.dispatch import SessionRows
from torchrl_agentic.errors import LARGEST_REWARD
from torchrl_agentic.messages import JSON, ParsedCall, Status, ToolResult
from torchrl_agentic.transforms.history import AgentHistory
from torchrl_agentic.transforms.row_turn import RowTurn

KEY = "agentic"
TRAJECTORY = (KEY, "trajectory")
FINAL_REWARD = (KEY, "trajectory_reward")
NO_VERDICT = (KEY, "no_verdict")
CALLS = (KEY, "calls")
ENDED_BY = (KEY, "ended_by")
REASONS = (
    "", "stop_tool", "no_calls", "max_turns", "max_trajectory_tokens", "user", "refused", "max_new_tokens",
    "user_failed", "not_begun",
)  # fmt: skip
"""Why a trajectory ended, by the number in ("agentic", "ended_by").

0: it goes on, or another transform ended it.
"""
_stack: Any = NonTensorStack  # declared abstract, which it is not
_DTYPES = {
    "any_tool_calls": torch.bool,
    "any_error": torch.bool,
    "stop_requested": torch.bool,
    "cut": torch.bool,
    "no_verdict": torch.bool,
    "not_begun": torch.bool,
    "n_calls": torch.int64,
    "n_errors": torch.int64,
    "n_infra": torch.int64,
    "turn": torch.int64,
    "tool_reward": torch.float32,
    "trajectory_reward": torch.float32,
    "tool_seconds": torch.float32,
    "trajectory": torch.int64,
    "ended_by": torch.int64,
}
_BY_DTYPE = {dtype: [name for name in _DTYPES if _DTYPES[name] is dtype] for dtype in set(_DTYPES.values())}


def agentic_spec(shape: torch.Size, device: torch.device | None, *, calls: bool = False) -> Composite:
    """Return the spec of the entries, each [*shape, 1].

    Args:
        shape: Batch size of the environment.
        device: Device of the entries.
        calls: Whether there is a list of calls per row, [*shape].
    """
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


def write_report(
    tensordict: TensorDictBase, sessions: SessionRows[Any], turns: Sequence[RowTurn], *, calls: bool = False
) -> None:
    """Write the entries of a step, or of a reset, under "agentic".

    Args:
        tensordict: The "next" of a step, or the result of a reset, [*B].
        sessions: Sessions of the rows.
        turns: Turns of the rows that took part in the step; none at a reset.
        calls: Whether the list of calls is written too.
    """
    shape, device = tensordict.batch_size, tensordict.device
    columns: dict[str, list[float]] = {name: [0] * shape.numel() for name in _DTYPES}
    for row, number in sessions.ids.items():
        columns["trajectory"][row] = number
    if turns:
        for row, session in sessions.sessions.items():
            columns["turn"][row] = session.turn
    for turn in turns:
        columns["cut"][turn.row] = turn.is_cut
        columns["not_begun"][turn.row] = turn.session.begin_error is not None
        _count(columns, turn.row, turn.results)
    entries: dict[str, torch.Tensor] = {}
    for dtype, names in _BY_DTYPE.items():  # one tensor per type is cheaper than one per name
        made = torch.tensor([columns[name] for name in names], dtype=dtype, device=device)
        entries.update(zip(names, made.reshape(len(names), *shape, 1).unbind(0), strict=True))
    written = TensorDict._new_unsafe(entries, batch_size=shape, device=device)  # pyright: ignore[reportPrivateUsage]  checks cost as much as the rest
    if calls:
        lists: dict[int, list[dict[str, JSON]]] = {}
        for turn in turns:
            lists[turn.row] = call_records(turn.calls, turn.results, turn.session.n_calls)
            turn.session.n_calls += len(turn.calls)
        written.set("calls", call_lists(lists, shape))
    tensordict.set(KEY, written)


def _count(columns: Mapping[str, list[float]], row: int, results: Sequence[ToolResult]) -> None:
    """Write the counts and sums over the results of a row."""
    if not results:
        return
    errors = sum(result.is_error for result in results)
    is_stopped = any(result.stop for result in results)
    columns["any_tool_calls"][row] = True
    columns["any_error"][row] = errors > 0
    columns["stop_requested"][row] = is_stopped
    columns["ended_by"][row] = REASONS.index("stop_tool") if is_stopped else 0
    columns["n_calls"][row] = len(results)
    columns["n_errors"][row] = errors
    columns["n_infra"][row] = sum(result.status is Status.INFRA for result in results) if errors else 0
    reward = sum(result.reward or 0.0 for result in results)
    is_known = abs(reward) <= LARGEST_REWARD
    columns["no_verdict"][row] = not is_known
    columns["tool_reward"][row] = reward if is_known else math.nan
    columns["tool_seconds"][row] = sum(result.timing.run_s for result in results if result.timing is not None)


def mark_ended(next_tensordict: TensorDictBase, rows: torch.Tensor, reason: str) -> None:
    """Write why rows end; the first reason that is written for a row counts.

    Args:
        next_tensordict: The "next" of a step, [*B].
        rows: The rows that end, bool, [*B, 1].
        reason: One of `REASONS`.
    """
    known = next_tensordict.get(ENDED_BY, None)
    if known is not None:
        number = torch.full_like(known, REASONS.index(reason))
        next_tensordict.set(ENDED_BY, torch.where(rows.reshape(known.shape) & (known == 0), number, known))


def add_final_rewards(tensordict: TensorDictBase, rewards: Mapping[int, float]) -> None:
    """Add the final rewards of tools to ("agentic", "trajectory_reward").

    Args:
        tensordict: The "next" of a step, [*B].
        rewards: Sums of the tools' final rewards by row; NaN where a tool has no verdict.
    """
    if any(rewards.values()):
        known = tensordict.get(FINAL_REWARD)
        values = [rewards.get(row, 0.0) for row in range(known.numel())]
        more = torch.tensor(values, dtype=known.dtype, device=known.device)
        final = known + more.reshape(known.shape)
        tensordict.set(FINAL_REWARD, final)
        mark_no_verdict(tensordict, final.isnan())


def mark_no_verdict(tensordict: TensorDictBase, rows: torch.Tensor) -> None:
    """Set ("agentic", "no_verdict") of rows whose reward is unknown.

    Args:
        tensordict: The "next" of a step, [*B].
        rows: The rows, bool, [*B, 1].
    """
    if rows.any():
        known = tensordict.get(NO_VERDICT, None)
        tensordict.set(NO_VERDICT, rows if known is None else known | rows)


def call_records(
    calls: Sequence[ParsedCall], results: Sequence[ToolResult], number: int
) -> list[dict[str, JSON]]:
    """Return id, number, tool, status, reward and metrics of each call of a turn.

    Args:
        calls: The calls.
        results: Their results.
        number: Number of calls of the trajectory before, as the sources of a `TokenLedger` count them.
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
    """Return the entry with a list of calls per row.

    Args:
        by_row: Records of the calls by row.
        shape: The batch size, [*B].
    """
    flat: list[Any] = [NonTensorData(by_row.get(row, [])) for row in range(shape.numel())]
    for size in reversed(shape[1:]):
        flat = [_stack(*flat[start : start + size]) for start in range(0, len(flat), size)]
    return _stack(*flat)


def with_truncated(tensordict_reset: TensorDictBase) -> TensorDictBase:
    """Write "truncated", False in all rows, unless it is there."""
    if tensordict_reset.get("truncated", None) is None:
        tensordict_reset.set("truncated", torch.zeros_like(tensordict_reset.get("done")))
    return tensordict_reset


def spec_with_truncated(done_spec: Any) -> Any:
    """Add "truncated", [*B, 1], to the spec, unless it is there."""
    if "truncated" not in done_spec.keys():
        shape = torch.Size((*done_spec.shape, 1))
        done_spec["truncated"] = Binary(n=1, shape=shape, dtype=torch.bool, device=done_spec.device)
    return done_spec


def truncate(next_tensordict: TensorDictBase, cut: torch.Tensor) -> TensorDictBase:
    """Set `truncated` and `done` of some rows.

    Args:
        next_tensordict: The "next" of a step, [*B].
        cut: True for the rows to end, bool, [*B, 1].
    """
    known = next_tensordict.get("truncated", None)
    next_tensordict.set("truncated", cut if known is None else known | cut)
    return next_tensordict.set("done", next_tensordict.get("done") | cut)


NO_HISTORY = (
    'ToolCompose reads ("history", "prompt"), and this environment has input_mode={mode!r}. '
    "Use ChatEnv(input_mode='history'); a policy may generate from tokens all the same"
)


def observation(spec: Any, *, calls: bool = False) -> Any:
    """Add the entries under "agentic" to an observation spec, and make the prompt an `AgentHistory`.

    Args:
        spec: Spec of the observations.
        calls: Whether there is a list of calls per row.

    Raises:
        ValueError: If the environment has no history.
    """
    if "history" not in spec.keys():
        raise ValueError(NO_HISTORY.format(mode="tokens or text"))
    _forget_optional(spec, ("history", "prompt"))
    prompt = spec["history", "prompt"]
    fields = {name: prompt[name] for name in prompt.keys()}
    spec["history"]["prompt"] = Composite(
        fields, shape=prompt.shape, device=prompt.device, data_cls=AgentHistory
    )
    spec[KEY] = agentic_spec(spec.shape, spec.device, calls=calls)
    return spec


def action(spec: TensorSpec) -> TensorSpec:
    """Remove the fields of messages that only some messages have."""
    _forget_optional(spec, ("history", "full"))
    return spec


def _forget_optional(spec: Any, key: tuple[str, str]) -> None:
    """Remove optional fields of messages, which rollouts do not always have, from a spec."""
    if isinstance(spec, Composite) and key in spec.keys(True):
        history = spec[key]
        for name in ("tool_calls", "tool_responses"):
            if name in history.keys():
                del history[name]
