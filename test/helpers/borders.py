"""Run one script of answers in an environment and in a collector, and describe what each reports."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchrl.envs import Compose
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic import (
    AgentCollector,
    Column,
    collate_rows,
)
from torchrl_agentic.collectors.batching import collector_batch
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.records import Recording, TrajectoryHook
from torchrl_agentic.rollout.answer_rows import answered, prompt_rows, write_answers
from torchrl_agentic.rollout.policies import TokensToHistory
from torchrl_agentic.testing import load_tiny
from torchrl_agentic.trajectory.reasons import REASONS
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.turn_tokenizer import read_ledger

MODEL, TOKENIZER = load_tiny()
MAX_TURNS = 4
SUMS = (
    "n_calls", "n_errors", "n_infra", "tool_reward", "user_score", "trajectory_reward", "user_final_score",
)  # fmt: skip
"""Columns that a row of a batch sums over the steps of its trajectory."""
ANY = ("any_tool_calls", "any_error", "stop_requested", "cut", "no_verdict", "not_begun", "user_error")
"""Columns that are true in a row if they are true in one of its steps."""
LAST = ("turn", "user_turn", "token_drift", "ended_by")
"""Columns whose last value a row keeps."""


@dataclass(frozen=True)
class Seen:
    """What a border reports of one trajectory.

    Attributes:
        messages: Role, text and id of the call of each message.
        columns: Entries under "agentic", folded over the trajectory; NaN is None.
        reason: Why it ended.
        terminated: Whether it ended by itself.
        truncated: Whether a bound ended it.
        reward: Sum of its rewards; None for NaN, and without a reward transform.
        tokens: Ids and sources of the ledger; None without tokens.
        record: Fields of its record; None without a recorder.
        failure: Kind of the failure in a collector; "" without one.
    """

    messages: list[tuple[str, str, Any]] = field(default_factory=list)
    columns: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    terminated: bool = False
    truncated: bool = False
    reward: float | None = None
    tokens: tuple[list[int], list[int]] | None = None
    record: Mapping[str, Any] | None = None
    failure: str = ""


def differences(env: Seen, collector: Seen) -> dict[str, tuple[Any, Any]]:
    """Return what differs between the borders, by name; columns that only the collector has are left out."""
    mine, theirs = dict(vars(env)), dict(vars(collector))
    for name, value in mine.pop("columns").items():
        mine[f"column {name}"] = value
        theirs[f"column {name}"] = collector.columns.get(name, "absent")
    del theirs["columns"]
    return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


@dataclass(frozen=True)
class Answer:
    """One answer of the model.

    Attributes:
        text: Its text.
        is_cut: Whether it ends without a stop token.
    """

    text: str
    is_cut: bool = False

    def ids(self) -> list[int]:
        ids = TOKENIZER(self.text, add_special_tokens=False)["input_ids"] if self.text else []
        return ids if self.is_cut else [*ids, TOKENIZER.eos_token_id]


def number(value: float) -> float | None:
    """Return a number as float32 holds it; None for NaN, which equals nothing."""
    value = float(torch.tensor(float(value), dtype=torch.float32))
    return None if math.isnan(value) else value


def in_environment(
    transforms: Callable[[TrajectoryHook], Compose],
    rows: Sequence[Mapping[str, Any]],
    scripts: Sequence[Sequence[Answer]],
    *,
    context: int | None = None,
    own: Sequence[Column] = (),
) -> list[Seen]:
    """Roll all rows out side by side, in one environment.

    Args:
        transforms: Returns the transforms, given what records.
        rows: Rows of the data set.
        scripts: Answers of the model in each row; the last one is repeated.
        context: Number of tokens that the model takes, as `agent_policy` reads it from a model.
        own: Columns of stages that the package does not have.
    """
    loader = DataLoader([dict(row) for row in rows], collate_fn=collate_rows, batch_size=len(rows))
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(len(rows),))
    log = Log()
    env.append_transform(transforms(log))
    read = TokensToHistory(TOKENIZER)
    steps: list[list[Any]] = [[] for _ in rows]
    try:
        td = env.reset()
        for turn in range(MAX_TURNS + 2):
            answers, rooms = [], []
            for index, row in enumerate(prompt_rows(td)):
                ids = scripts[index][min(turn, len(scripts[index]) - 1)].ids()
                left = td.get(("agentic", "tokens_left"), None)
                bounds = [] if left is None else [int(left.reshape(-1)[index])]
                bounds += [] if context is None else [context - len(row.tensors["prompt"])]
                rooms.append(min(bounds, default=len(ids) + 1))
                ids = ids[: max(0, rooms[-1])]
                answers.append(answered(row, ids, [-0.5] * len(ids)))
            td = write_answers(td, answers)
            if context is not None:
                td.set(("agentic", "room"), torch.tensor(rooms).reshape(-1, 1))
            was_done = td["done"].reshape(-1).tolist()
            stepped = env.step(read(td))
            for index, one in enumerate(border.leaves(stepped)[1]):
                if not was_done[index]:
                    steps[index].append(one.get("next"))
            if stepped["next", "done"].all():
                break
            td = env.step_mdp(stepped)
    finally:
        env.close()
    records = {row: record for (_, row), record in log.records.items()}
    return [_of_steps(some, records.get(index), own) for index, some in enumerate(steps)]


def _of_steps(steps: Sequence[Any], record: Any, own: Sequence[Column]) -> Seen:
    last = steps[-1]
    told = [step.get("agentic") for step in steps]
    columns: dict[str, Any] = {}
    for name in list(told[-1].keys()):
        values = [one.get(name) for one in told]
        if name in SUMS:
            columns[name] = number(sum(float(value) for value in values))
        elif name in ANY:
            columns[name] = any(bool(value) for value in values)
        elif name in LAST:
            columns[name] = int(values[-1])
        elif name == "calls":
            columns[name] = [call for value in values for call in _plain(value)]
    for column in own:
        values = [_plain(one.get(column.name)) for one in told]
        if column.kind is list:
            columns[column.name] = [item for value in values for item in value]
        else:
            flat = [value[0] for value in values]
            columns[column.name] = {"sum": sum(flat), "any": any(flat), "last": flat[-1]}[column.fold]
    rewards = [step.get("reward", None) for step in steps]
    reward = None if rewards[-1] is None else number(sum(float(one) for one in rewards))
    ledger = read_ledger(last)
    (conversation,) = border.prompts(last)
    return Seen(
        [_said(one.read()) for one in conversation.messages],
        columns,
        REASONS[columns["ended_by"]],
        bool(last["terminated"]),
        bool(last["truncated"]),
        reward,
        (list(ledger.ids), list(ledger.sources)),
        record,
    )


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)


def _said(message: Any) -> tuple[str, str, Any]:
    return message.role, message.text, message.tool_call_id


class Log(TrajectoryHook):
    """Keeps what is recorded of each trajectory, by its name and row."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], dict[str, Any]] = {}

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        return _Log(self.records.setdefault((trajectory, row), {"turns": [], "rewards": [], "rest": []}))


class _Log(Recording):
    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def record_turn(self, turn: Any) -> None:
        statuses = [str(result.status) for result in turn.outcome.results]
        said = [_said(one) for one in (*turn.context, turn.message, *turn.messages)]
        self.record["turns"].append((turn.index, said, statuses))
        self.record["rewards"].append(0.0)

    def add_reward(self, value: float) -> None:
        self.record["rewards"][-1] = value

    def add_messages(self, messages: Sequence[Any]) -> None:
        self.record["rest"] += map(_said, messages)

    def annotate(self, *, score: Any = None, gts: Any = None, tokens: Any = None, **extras: Any) -> None:
        notes = {"score": score, "gts": gts, **extras}
        self.record.update({name: value for name, value in notes.items() if value is not None})
        if tokens is not None:
            self.record["tokens"] = list(tokens.ledger.ids)

    def finish(self, reason: str) -> None:
        self.record["reason"] = reason
        self.record["rewards"] = list(map(number, self.record["rewards"]))


class Script(Engine):
    """An engine that answers from a list for each task.

    Args:
        scripts: Answers by the name of the task; the last one is repeated.
        context: Number of tokens that it takes, or None.
    """

    max_concurrent = 8
    version = 0

    def __init__(self, scripts: Mapping[str, Sequence[Answer]], context: int | None) -> None:
        self.scripts, self.context_length = scripts, context
        self.turns: dict[str, int] = {}

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        await asyncio.sleep(0)
        turn = self.turns[key] = self.turns.get(key, -1) + 1
        script = self.scripts[key.partition("/")[0]]
        found = script[min(turn, len(script) - 1)].ids()
        is_whole = found[-1:] == [TOKENIZER.eos_token_id] and len(found) <= max_tokens
        found = found[:max_tokens]
        return Sampled(found, [-0.5] * len(found), "stop" if is_whole else "length", 0)

    async def update(self, weights):
        return 0

    async def close(self):
        pass


def in_collector(
    transforms: Callable[[TrajectoryHook], Compose],
    rows: Sequence[Mapping[str, Any]],
    scripts: Sequence[Sequence[Answer]],
    *,
    context: int | None = None,
    own: Sequence[Column] = (),
    **options: Any,
) -> list[Seen]:
    """Run the same rows in a collector, each as a task of its own; see `in_environment`."""
    tasks = [{"name": f"t{index}", **row} for index, row in enumerate(rows)]
    engine = Script({f"t{index}": script for index, script in enumerate(scripts)}, context)
    log = Log()
    found: dict[str, Seen] = {}

    def failed(one: Any) -> None:
        assert one.task is not None
        found[one.task.name] = Seen(failure=one.kind)

    collector = AgentCollector(
        transforms(log),
        engine=engine,
        tokenizer=None,
        tasks=tasks,
        max_turns=MAX_TURNS + 2,
        max_new_tokens=100_000,
        max_staleness=None,
        on_failure="drop",
        failure_hook=failed,
        **options,
    )
    kept: dict[str, Any] = {}
    with collector:
        for group in collector.trajectories():
            for trajectory in group:
                kept[trajectory.task.name] = trajectory
    for name, trajectory in kept.items():
        (row,) = collector_batch([(0, [trajectory])]).tensordicts
        record = log.records.get((trajectory.name, trajectory.index))
        found[name] = _of_row(row, trajectory, record, own)
    return [found[f"t{index}"] for index in range(len(rows))]


def _of_row(row: Any, trajectory: Any, record: Any, own: Sequence[Column]) -> Seen:
    columns: dict[str, Any] = {}
    for name, value in row.get("agentic").items():
        if name in SUMS:
            columns[name] = number(float(value))
        elif name in ANY:
            columns[name] = bool(value)
        elif name in LAST:
            columns[name] = int(value)
        elif name == "calls":
            columns[name] = _plain(value)
    for column in own:
        value = _plain(row["agentic", column.name])
        columns[column.name] = value if column.kind is list else value[0]
    ledger = trajectory.ledger
    return Seen(
        [_said(message) for message in trajectory.messages],
        columns,
        trajectory.reason,
        trajectory.terminated,
        trajectory.truncated,
        number(float(row["reward"])),
        (list(ledger.ids), list(ledger.sources)),
        record,
    )
