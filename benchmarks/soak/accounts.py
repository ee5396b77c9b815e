"""The books of a soak test: trajectories, requests and tool calls, each of which must end exactly once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, ClassVar, get_args

from tensordict import LazyStackedTensorDict

from torchrl_agentic import Tool
from torchrl_agentic.collectors import FailedTask, Trajectory
from torchrl_agentic.collectors.failures import FailureKind
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.engines.base import OnIds
from torchrl_agentic.messages import Status, Turn

UNNEEDED = "abandoned"
"""Reason of trajectories that were not needed, since their group was dropped."""


class Accounts:
    """Counts what begins and what ends, apart from the collector's own statistics.

    Attributes:
        faults: A line for each entry that is wrong, at most 100.
        begun: Number of trajectories that have opened their tools.
        closed: Number of trajectories that have closed them.
        finished: Number of trajectories that got as far as their reward.
        rows: Number of trajectories in batches.
        tasks: Number of tasks that the collector has read.
        groups: Number of tasks whose groups left in batches.
        dropped: Number of tasks whose groups were dropped.
        turns: Number of turns.
        calls: Number of tool calls, by the status of their result.
        requests: Requests to the engine, by "begun" and by their outcome.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.begun = self.closed = self.finished = self.rows = 0
        self.tasks = self.groups = self.dropped = self.turns = 0
        self.calls: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._open: set[str] = set()
        self._rewarded: dict[str, None] = {}
        self._answers: Counter[str] = Counter()
        self._ran: Counter[str] = Counter()

    def fault(self, line: str) -> None:
        """Note an entry that is wrong."""
        if len(self.faults) < 100:
            self.faults.append(line)

    def open(self, name: str) -> None:
        """Enter a trajectory that begins."""
        if name in self._open:
            self.fault(f"trajectory {name} began twice")
        self._open.add(name)
        self.begun += 1

    def close(self, name: str) -> None:
        """Enter a trajectory that closes."""
        if name not in self._open:
            self.fault(f"trajectory {name} closed without having begun")
        self._open.discard(name)
        self.closed += 1

    def answer(self, key: str) -> None:
        """Enter an answer of the engine that is complete."""
        self._answers[key] += 1

    def run(self, key: str) -> None:
        """Enter that a call of a tool runs; its key must be unique."""
        self._ran[key] += 1
        if self._ran[key] > 1:
            self.fault(f"call {key} ran {self._ran[key]} times")

    def turn(self, turn: Turn) -> None:
        """Enter a turn: each call has one result, and ids and results belong together."""
        self.turns += 1
        calls, results = turn.outcome.calls, turn.outcome.results
        where = f"turn {turn.index} of {turn.trajectory}"
        if len(calls) != len(results):
            self.fault(f"{where}: {len(calls)} calls, {len(results)} results")
        if len({call.call_id for call in calls}) != len(calls):
            self.fault(f"{where}: two calls have one id")
        for call, result in zip(calls, results, strict=False):
            self.calls[result.status.value] += 1
            key = call.args.get("key")
            if isinstance(key, str):
                ran = self._ran.pop(key, 0)
                if result.status is Status.OK and ran != 1:
                    self.fault(f"{where}: call {key} has a result and ran {ran} times")
                if result.status is Status.OK and key not in result.text:
                    self.fault(f"{where}: call {key} has the result of another: {result.text[:60]!r}")

    def reward(self, trajectory: Trajectory) -> None:
        """Enter a trajectory that has ended: each of its messages is one answer of the engine."""
        if trajectory.name in self._rewarded:
            self.fault(f"trajectory {trajectory.name} was rewarded twice")
        self._rewarded[trajectory.name] = None
        self.finished += 1
        answers = self._answers.pop(trajectory.name, 0)
        if answers != len(trajectory.turns):
            self.fault(f"trajectory {trajectory.name}: {answers} answers, {len(trajectory.turns)} turns")

    def batch(self, batch: LazyStackedTensorDict) -> None:
        """Enter a batch: each of its trajectories was rewarded, and is in no other batch."""
        groups: set[int] = set()
        for row in batch.tensordicts:
            name = row["collector", "name"]
            if name not in self._rewarded:
                self.fault(f"trajectory {name} is in a batch, twice or without a reward")
            self._rewarded.pop(name, None)
            groups.add(int(row["collector", "group"]))
            self.rows += 1
        self.groups += len(groups)

    def failed(self, task: FailedTask) -> None:
        """Enter a task whose group was dropped."""
        del task
        self.dropped += 1

    @property
    def late(self) -> int:
        """Number of tasks that were read, and whose groups neither left nor were dropped."""
        return self.tasks - self.groups - self.dropped

    def check_idle(self, figures: Mapping[str, Any]) -> None:
        """Check the books while no trajectory runs and none waits for its batch.

        Args:
            figures: Snapshot of the collector's statistics.
        """
        columns = self.columns(figures)
        if self._open or self.begun != self.closed:
            self.fault(f"{len(self._open)} trajectories hold their tools open though none runs")
        if figures["in_flight"] or figures["engine"]["requests"] or figures["engine"]["queued"]:
            self.fault(f"the collector counts {figures['in_flight']} trajectories and {figures['engine']}")
        never_opened = columns["began"] - self.begun  # cancelled before their first step
        if not 0 <= never_opened <= columns["unneeded"]:
            self.fault(f"{self.begun} trajectories opened their tools; the collector counts {columns}")
        lost = columns["unneeded"] + columns["failed"]  # some of them while their reward was computed
        if not 0 <= self.finished - columns["ended"] <= lost:
            self.fault(f"{self.finished} trajectories got a reward; the collector counts {columns}")
        if not self.rows == figures["batches"]["trajectories"] <= columns["ended"]:
            self.fault(f"{self.rows} trajectories came in batches; the collector counts {columns}")
        if self.requests["begun"] * 2 != self.requests.total():
            self.fault(f"requests do not add up: {dict(self.requests)}")
        if self.late:
            self.fault(f"{self.tasks} tasks, {self.groups} in batches, {self.dropped} dropped")
        # Of trajectories that were not needed, or whose group was dropped.
        self._answers.clear()
        self._ran.clear()
        self._rewarded.clear()

    @staticmethod
    def columns(figures: Mapping[str, Any]) -> dict[str, int]:
        """Return how many trajectories began, ended, failed, were not needed, and run.

        Args:
            figures: Snapshot of the collector's statistics.
        """
        reasons: Mapping[str, int] = figures["reasons"]
        failed = sum(reasons.get(kind, 0) for kind in get_args(FailureKind))
        unneeded = reasons.get(UNNEEDED, 0)
        ended = sum(reasons.values())
        return {
            "began": ended + figures["in_flight"],
            "ended": ended - failed - unneeded,
            "failed": failed,
            "unneeded": unneeded,
            "running": figures["in_flight"],
        }


class Census(Tool):
    """Enters each trajectory when its tools open and when they close; the model has no use for it.

    Args:
        accounts: The books.
    """

    name, description = "census", "Do nothing."
    open_at_reset: bool = True

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    @contextlib.asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Enter the begin and the end of a trajectory."""
        self._accounts.open(trajectory)
        try:
            yield self
        finally:
            self._accounts.close(trajectory)

    async def run(self, args: Mapping[str, Any], ctx: Any) -> str:
        """Return nothing of interest."""
        return "counted"


class CountedTool(Tool):
    """A tool whose calls have a unique key, so that one that runs twice is noticed.

    Args:
        accounts: The books.
        act: Called with the key, while the call runs.
    """

    name, description = "look", "Look something up."
    input_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"key": {"type": "string"}},
        "required": ["key"],
    }

    def __init__(self, accounts: Accounts, act: Callable[[str], Any]) -> None:
        self._accounts, self._act = accounts, act

    async def run(self, args: Mapping[str, Any], ctx: Any) -> str:
        """Return what was found."""
        self._accounts.run(args["key"])
        await self._act(args["key"])
        return f"found {args['key']}"


class CountedEngine(Engine):
    """Counts the requests of an engine, and how each of them ended.

    Args:
        engine: The engine.
        accounts: The books.
        stop_id: The token that ends an answer.
    """

    def __init__(self, engine: Any, accounts: Accounts, stop_id: int) -> None:
        self.engine, self._accounts, self._stop_id = engine, accounts, stop_id
        self.max_concurrent: int = engine.max_concurrent
        self.context_length: int | None = engine.context_length

    @property
    def version(self) -> int:
        """Number of weight updates so far."""
        return self.engine.version

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Sample one answer.

        Args:
            ids: Token ids of the prompt.
            max_tokens: Upper bound on the number of sampled ids.
            key: Name of the trajectory.
            on_ids: Called with each piece of sampled ids.
        """
        requests = self._accounts.requests
        requests["begun"] += 1
        outcome = "cancelled"
        try:
            found = await self.engine.sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)
            outcome = found.finish
        except Exception:
            outcome = "failed"
            raise
        finally:
            requests[outcome] += 1
        if outcome != "aborted" or len(found.ids) == max_tokens or [*found.ids[-1:]] == [self._stop_id]:
            self._accounts.answer(key)
        return found

    async def update(self, weights: Any) -> int:
        """Load new weights."""
        return await self.engine.update(weights)

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()
