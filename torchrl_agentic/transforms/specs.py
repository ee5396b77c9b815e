"""What ToolCompose says of each turn, under "agentic": its keys, their specs, their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor, TensorSpec, Unbounded

from torchrl_agentic.messages import JSON, ParsedCall, Status, ToolResult
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.history import AgentHistory

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


def agentic_spec(shape: torch.Size, device: torch.device | None, *, calls: bool = False) -> Composite:
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


TOKENS_LEFT = (KEY, "tokens_left")
"""Tokens that the prompt leaves of `max_trajectory_tokens`; int64, [*B, 1].

`TurnTokenizer` writes it for the next turn; `agent_policy` reads it.
"""
ROOM = (KEY, "room")
"""Tokens that the prompt left for the answer; int64, [*B, 1]; 0 or less: no room.

`agent_policy` writes it into the root of a step; `EndTrajectory` and `TurnTokenizer` read it.
"""


def out_of_room(tensordict: TensorDictBase) -> list[bool]:
    """Return for each row of a step whether its answer is incomplete for want of room.

    Args:
        tensordict: The root of the step, [*B].
    """
    if tensordict.get(ROOM, None) is None:
        return [False] * tensordict.batch_size.numel()
    stack, rows = border.leaves(tensordict)
    answered = border.prompts(stack, "full")
    return [
        len(row.get(("tokens", "response"))) >= int(row.get(ROOM))
        and not border.read_message(border.messages(conversation)[-1]).is_complete
        for row, conversation in zip(rows, answered, strict=True)
    ]


def with_truncated(tensordict_reset: TensorDictBase) -> TensorDictBase:
    """Begin with "truncated" false in all rows, where it is not written yet."""
    if tensordict_reset.get("truncated", None) is None:
        tensordict_reset.set("truncated", torch.zeros_like(tensordict_reset.get("done")))
    return tensordict_reset


def spec_with_truncated(done_spec: Any) -> Any:
    """Describe "truncated", [*B, 1], where it is not described yet."""
    if "truncated" not in done_spec.keys():
        shape = torch.Size((*done_spec.shape, 1))
        done_spec["truncated"] = Binary(n=1, shape=shape, dtype=torch.bool, device=done_spec.device)
    return done_spec


def truncate(next_tensordict: TensorDictBase, cut: torch.Tensor) -> TensorDictBase:
    """End rows as truncated; those that have ended already stay as they are.

    Args:
        next_tensordict: The "next" of a step, [*B].
        cut: The rows to end, bool, [*B, 1].
    """
    known = next_tensordict.get("truncated", None)
    next_tensordict.set("truncated", cut if known is None else known | cut)
    return next_tensordict.set("done", next_tensordict.get("done") | cut)


NO_HISTORY = (
    'ToolCompose reads ("history", "prompt"), and this environment has input_mode={mode!r}. '
    "Use ChatEnv(input_mode='history'); a policy may generate from tokens all the same"
)


def observation(spec: Any, *, calls: bool = False) -> Any:
    """Add flags and telemetry; the prompt is an `AgentHistory` now. calls: see `spec`.

    Raises:
        ValueError: there is no history to read.
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
    """Leave out the fields of messages that only some messages have."""
    _forget_optional(spec, ("history", "full"))
    return spec


def _forget_optional(spec: Any, key: tuple[str, str]) -> None:
    """Drop what only some messages have: rollouts do not have it, and specs are compared with them."""
    if isinstance(spec, Composite) and key in spec.keys(True):
        history = spec[key]
        for name in ("tool_calls", "tool_responses"):
            if name in history.keys():
                del history[name]
