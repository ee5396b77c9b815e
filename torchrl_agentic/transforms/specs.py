"""The entries of a step that this package reads and writes: columns under "agentic", and done flags.

The specs and values of the columns come from the table `COLUMNS`.
"""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor, TensorSpec, Unbounded

from torchrl_agentic.trajectory.columns import KEY, Column
from torchrl_agentic.trajectory.episode import Episode, OpenTurn, Stage
from torchrl_agentic.trajectory.reasons import number_of
from torchrl_agentic.transforms.history import AgentHistory

TRAJECTORY = (KEY, "trajectory")
TURN = (KEY, "turn")
FINAL_REWARD = (KEY, "trajectory_reward")
NO_VERDICT = (KEY, "no_verdict")
ENDED_BY = (KEY, "ended_by")
DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float32}
_stack: Any = NonTensorStack  # declared abstract, which it is not


def column_specs(
    columns: Iterable[Column], shape: torch.Size, device: torch.device | None
) -> dict[str, TensorSpec]:
    """Return the specs of columns by name: numbers [*shape, 1], lists [*shape].

    Args:
        columns: The columns.
        shape: Batch size of the environment.
        device: Device of the entries.
    """
    each = torch.Size((*shape, 1))
    made: dict[str, TensorSpec] = {}
    for column in columns:
        if column.kind is list:
            made[column.name] = NonTensor(shape=shape, device=device, example_data=[])
        elif column.kind is bool:
            made[column.name] = Binary(n=1, shape=each, dtype=torch.bool, device=device)
        else:
            made[column.name] = Unbounded(shape=each, dtype=DTYPES[column.kind], device=device)
    return made


def write_columns(
    tensordict: TensorDictBase,
    columns: Sequence[Column],
    episodes: Mapping[int, Episode],
    turns: Sequence[OpenTurn] = (),
    *,
    is_first: bool = False,
) -> None:
    """Write columns of a step, or of a reset, under "agentic".

    Args:
        tensordict: The "next" of a step, or the result of a reset, [*B].
        columns: The columns.
        episodes: Trajectories by row.
        turns: Turns of the rows that took part in the step; none at a reset.
        is_first: Whether nothing else is under "agentic" yet.
    """
    shape, device = tensordict.batch_size, tensordict.device
    size, entries = shape.numel(), dict[str, Any]()
    by_kind: dict[type, list[Column]] = {}
    for column in columns:
        by_kind.setdefault(column.kind, []).append(column)
    rows = [turn.episode.row for turn in turns]
    for kind, some in by_kind.items():
        values: list[list[Any]] = [_values(column, episodes, turns, rows, size) for column in some]
        if kind is list:
            for column, lists in zip(some, values, strict=True):
                entries[column.name] = _lists(lists, shape)
            continue
        # One tensor per type is cheaper than one per name.
        made = torch.tensor(values, dtype=DTYPES[kind], device=device).reshape(len(some), *shape, 1)
        entries.update(zip((column.name for column in some), made.unbind(0), strict=True))
    if is_first:
        lists = {name: value for name, value in entries.items() if not isinstance(value, torch.Tensor)}
        tensors = {name: value for name, value in entries.items() if name not in lists}
        written = TensorDict._new_unsafe(tensors, batch_size=shape, device=device)  # pyright: ignore[reportPrivateUsage]  checks cost as much as the rest
        tensordict.set(KEY, written)
        entries = lists
    for name, value in entries.items():
        tensordict.set((KEY, name), value)


def _values(
    column: Column,
    episodes: Mapping[int, Episode],
    turns: Sequence[OpenTurn],
    rows: Sequence[int],
    size: int,
) -> list[Any]:
    values = [column.kind() for _ in range(size)] if column.kind is list else [column.kind()] * size
    if column.of_episode is not None:
        for row, episode in episodes.items():
            values[row] = column.of_episode(episode)
    elif column.of_turn is not None:
        for row, value in zip(rows, map(column.of_turn, turns), strict=True):
            values[row] = value
    return values


def _lists(values: Sequence[Any], shape: torch.Size) -> TensorDictBase:
    """Return an entry with a list per row."""
    flat: list[Any] = [NonTensorData(value) for value in values]
    for size in reversed(shape[1:]):
        flat = [_stack(*flat[start : start + size]) for start in range(0, len(flat), size)]
    return _stack(*flat)


def write_ends(next_tensordict: TensorDictBase, turns: Sequence[OpenTurn], stage: Stage) -> None:
    """Set the flags and the reasons of the rows that a stage has ended; the first reason counts.

    Args:
        next_tensordict: The "next" of a step, [*B].
        turns: The turns.
        stage: The stage, which has acted on them.
    """
    ended = [
        (turn, effect) for turn in turns if (effect := turn.effects[stage]).terminated or effect.truncated
    ]
    if not ended:
        return
    done = next_tensordict.get("done")
    flags = {name: torch.zeros(done.numel(), dtype=torch.bool) for name in ("terminated", "truncated")}
    reasons = torch.zeros(done.numel(), dtype=torch.int64)
    for turn, effect in ended:
        row = turn.episode.row
        flags["terminated"][row], flags["truncated"][row] = effect.terminated, effect.truncated
        reasons[row] = number_of(turn.reason)
    for name, added in flags.items():
        added = added.to(done.device).reshape(done.shape)
        known = next_tensordict.get(name, None)
        next_tensordict.set(name, added if known is None else known | added)
        done = done | added
    next_tensordict.set("done", done)  # collectors look at "done" alone
    known = next_tensordict.get(ENDED_BY, None)
    if known is not None:
        reasons = reasons.to(known.device).reshape(known.shape)
        next_tensordict.set(ENDED_BY, torch.where(known == 0, reasons, known))


def write_final_rewards(next_tensordict: TensorDictBase, turns: Sequence[OpenTurn]) -> None:
    """Write ("agentic", "trajectory_reward") of rows whose tools have given their final rewards.

    Args:
        next_tensordict: The "next" of a step, [*B].
        turns: The turns of these rows.
    """
    final = next_tensordict.get(FINAL_REWARD).clone()
    flat = final.reshape(-1)
    for turn in turns:
        flat[turn.episode.row] = turn.final_reward
    next_tensordict.set(FINAL_REWARD, final)
    mark_no_verdict(next_tensordict, final.isnan())


def write_rewards(next_tensordict: TensorDictBase, turns: Sequence[OpenTurn], stage: Stage) -> None:
    """Write the rewards of a stage as "reward", [*B, 1, 1], or add them to those that are there.

    Args:
        next_tensordict: The "next" of a step, [*B].
        turns: The turns.
        stage: The stage, which has acted on them.
    """
    done = next_tensordict.get("done")
    values = [0.0] * done.numel()
    for turn in turns:
        values[turn.episode.row] = turn.effects[stage].reward
    reward = torch.tensor(values, dtype=torch.float32, device=done.device).reshape(done.shape)
    if any(map(math.isnan, values)):
        mark_no_verdict(next_tensordict, reward.isnan())
    reward = reward.unsqueeze(-1)
    known = next_tensordict.get("reward", None)
    next_tensordict.set("reward", reward if known is None else known.reshape(reward.shape) + reward)


def mark_no_verdict(tensordict: TensorDictBase, rows: torch.Tensor) -> None:
    """Set ("agentic", "no_verdict") of rows whose reward is unknown.

    Args:
        tensordict: The "next" of a step, [*B].
        rows: The rows, bool, [*B, 1].
    """
    if rows.any():
        known = tensordict.get(NO_VERDICT, None)
        tensordict.set(NO_VERDICT, rows if known is None else known | rows)


def with_reward(reward_spec: Any) -> Any:
    """Add the reward to a spec, [*B, 1, 1], also if another transform declared [*B, 1]."""
    shape = torch.Size((*reward_spec.shape, 1, 1))
    if "reward" not in reward_spec.keys():
        reward_spec["reward"] = Unbounded(shape=shape, dtype=torch.float32, device=reward_spec.device)
    elif reward_spec["reward"].shape != shape:
        reward_spec["reward"] = reward_spec["reward"].reshape(shape)
    return reward_spec


def with_truncated(tensordict: TensorDictBase) -> TensorDictBase:
    """Write "truncated", False in all rows, unless it is there."""
    if tensordict.get("truncated", None) is None:
        tensordict.set("truncated", torch.zeros_like(tensordict.get("done")))
    return tensordict


def spec_with_truncated(done_spec: Any) -> Any:
    """Add "truncated", [*B, 1], to the spec, unless it is there."""
    if "truncated" not in done_spec.keys():
        shape = torch.Size((*done_spec.shape, 1))
        done_spec["truncated"] = Binary(n=1, shape=shape, dtype=torch.bool, device=done_spec.device)
    return done_spec


NO_HISTORY = (
    'ToolCompose reads ("history", "prompt"), and this environment has input_mode={mode!r}. '
    "Use ChatEnv(input_mode='history'); a policy may generate from tokens all the same"
)


def observation(spec: Any, columns: Iterable[Column]) -> Any:
    """Add the entries under "agentic" to an observation spec, and make the prompt an `AgentHistory`.

    Args:
        spec: Spec of the observations.
        columns: The columns.

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
    entries = column_specs(columns, spec.shape, spec.device)
    spec[KEY] = Composite(entries, shape=spec.shape, device=spec.device)
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


def row_numbers(tensordict: TensorDictBase, key: str | tuple[str, str]) -> Sequence[Any]:
    """Return the numbers of a column of the flattened batch; None for each row if there is no such column.

    Args:
        tensordict: The batch, [*B].
        key: Key of the column, [*B, 1].
    """
    found = tensordict.get(key, None)
    if found is None:
        return [None] * tensordict.batch_size.numel()
    return torch.Tensor.tolist(found.reshape(-1))


def stepped(tensordict: TensorDictBase) -> list[bool]:
    """Return for each row of a batch whether it takes part in a step.

    A row stays out of a step if "_step" leaves it out, or if its trajectory is over already: "done" of the
    root is true until the row is reset.

    Args:
        tensordict: The root of the step, [*B].
    """
    stepping, done = tensordict.get("_step", None), tensordict.get("done", None)
    active = [True] * tensordict.batch_size.numel() if stepping is None else stepping.reshape(-1).tolist()
    if done is None:
        return active
    return [is_in and not is_over for is_in, is_over in zip(active, done.reshape(-1).tolist(), strict=True)]


def keep_ended(tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
    """Keep the flags, and the reason, of rows that had ended before a step.

    Args:
        tensordict: The root of the step, [*B].
        next_tensordict: Its "next", [*B].
    """
    done = tensordict.get("done", None)
    if done is not None and done.any():
        reason = tensordict.get(ENDED_BY, None)
        if reason is not None:
            next_tensordict.set(ENDED_BY, torch.where(reason != 0, reason, next_tensordict.get(ENDED_BY)))
        for key in ("done", "terminated", "truncated"):
            before, after = tensordict.get(key, None), next_tensordict.get(key, None)
            if before is not None:
                next_tensordict.set(key, before.clone() if after is None else after | before)
    return next_tensordict
