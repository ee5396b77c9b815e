"""`FailurePolicy`: what follows when a trajectory fails for a reason that is not the model's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from torchrl_agentic.engines.base import EngineUnusable
from torchrl_agentic.errors import InfrastructureError, InvalidTask, ToolFailed, UserFailed, check_count

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.task import Task
    from torchrl_agentic.trajectory.trajectory import Trajectory

FailureKind: TypeAlias = Literal["timeout", "engine", "tool", "user", "reward", "task", "crash"]
"""Cause of a failure.

"timeout": the trajectory took too long. "engine": the engine, or other infrastructure, was lost or
overloaded. "tool": a tool could not open what the trajectory needs (`ToolFailed`). "user": the simulated user
failed (`UserFailed`). "reward": the reward function raised. "task": the task cannot be used, such as a prompt
that is too long, or one that its reward or user calls invalid (`InvalidTask`). "crash": other code raised,
such as a transform.
"""
OUTAGE_S = 120.0
"""Seconds for which infrastructure may fail without any success before a collector ends."""
OnFailure: TypeAlias = Literal["replace", "drop", "raise"]
INFRASTRUCTURE: frozenset[FailureKind] = frozenset({"timeout", "engine", "tool", "user"})
"""Kinds of failures that say nothing about the policy, the task or the user's code."""


def failure_kind(error: BaseException, phase: Literal["task", "trajectory", "reward"]) -> FailureKind:
    """Return the cause of a failure.

    Mistakes of the model are no failures: the dispatcher answers them with a result.

    Args:
        error: The exception that ended the trajectory.
        phase: What ran when it was raised: the preparation of the task, the turns, or the reward function.
    """
    if isinstance(error, ToolFailed):
        return "tool"
    if isinstance(error, UserFailed):
        return "user"
    if isinstance(error, InfrastructureError | EngineUnusable):
        return "engine"
    if phase == "task" or isinstance(error, InvalidTask):
        return "task"
    if phase == "reward":
        return "reward"
    return "timeout" if isinstance(error, TimeoutError) else "crash"


@dataclass(frozen=True, slots=True)
class FailedTask:
    """A task whose group was dropped, since one of its trajectories failed.

    Attributes:
        number: Number of the task in the order of the tasks, counted from 0.
        task: The task; None if the row could not be read as one.
        kind: Cause of the failure.
        error: The exception that ended the trajectory.
        trajectory: What had happened when it failed, without tokens and with the reason "failed"; None if it
            had not begun.
    """

    number: int
    task: Task | None
    kind: FailureKind
    error: BaseException
    trajectory: Trajectory | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision about a failure.

    Attributes:
        action: "replace": sample the trajectory again from its task. "drop": give up its group. "raise": end
            the iteration with the error.
        reason: Why, as the end of a log line or an error message.
    """

    action: OnFailure
    reason: str


@dataclass(slots=True)
class _Streak:
    """Failures of one type, or of one kind of infrastructure, since the last trajectory that succeeded."""

    began: float
    count: int = 0
    groups: set[int] = field(default_factory=set[int])


class FailurePolicy:
    """Decide whether a failed trajectory is replaced, its group is dropped, or the error is raised.

    A trajectory is replaced a few times; then its group is dropped, because it could fail forever. After a
    failure of the kind "task" the group is dropped at once, because the task would be the same.

    If no trajectory succeeds in between, the cause is not in the groups, and the error is raised whatever
    `on_failure` says: after `max_failures` failures of one type in two groups or more; after as many of one
    kind of `INFRASTRUCTURE`, if they last for `outage_s` seconds, since infrastructure may come back; and
    after `max_drops_in_a_row` dropped groups.

    Args:
        on_failure: "replace" a failed trajectory, "drop" its group, or "raise" the error.
        max_replacements: Number of replacements of one member of a group.
        max_failures: Number of failures without a trajectory that succeeds; None for no limit, also of
            `outage_s` and `max_drops_in_a_row`.
        outage_s: Seconds without a trajectory that succeeds while infrastructure fails.
        max_drops_in_a_row: Number of groups that may be dropped without a trajectory that succeeds.
        clock: Returns the time in seconds.

    Attributes:
        failures: Number of failures by kind.
        replaced: Number of trajectories that were replaced.
        dropped: Number of groups that were dropped.

    Raises:
        TypeError: If a number is not a number.
        ValueError: If `on_failure` is unknown, or a number is too small or not whole.
    """

    def __init__(
        self,
        on_failure: OnFailure,
        *,
        max_replacements: int = 3,
        max_failures: int | None = 16,
        outage_s: float = OUTAGE_S,
        max_drops_in_a_row: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if on_failure not in get_args(OnFailure):
            raise ValueError(f"on_failure is 'replace', 'drop' or 'raise'; got {on_failure!r}")
        check_count("max_replacements", max_replacements, optional=False, least=0)
        check_count("max_failures", max_failures)
        check_count("max_drops_in_a_row", max_drops_in_a_row, optional=False)
        self.failures: Counter[FailureKind] = Counter()
        self.replaced = 0
        self.dropped = 0
        self._on_failure = on_failure
        self._max_replacements = int(max_replacements)
        self._max_failures, self._outage_s, self._clock = max_failures, outage_s, clock
        self._max_drops_in_a_row = max_drops_in_a_row
        self._drops_in_a_row = 0
        self._streaks: dict[object, _Streak] = {}
        self._replacements: dict[int, Counter[int]] = {}
        """Number of replacements of each member, by group."""

    @property
    def infrastructure(self) -> int:
        """Number of failures that say nothing about the policy, the task or the user's code."""
        return sum(self.failures[kind] for kind in INFRASTRUCTURE)

    def fail(
        self,
        group: int,
        member: int,
        kind: FailureKind,
        error: type[BaseException] = Exception,
        *,
        is_overtaken: bool = False,
    ) -> Verdict:
        """Record a failure and decide what follows.

        Args:
            group: Number of the group.
            member: Index of the trajectory in the group.
            kind: Cause of the failure.
            error: Type of the error.
            is_overtaken: Whether another trajectory has come further by now, so that not all of them fail
                like this one.
        """
        self.failures[kind] += 1
        hopeless = None if is_overtaken else self._hopeless(group, kind, error)
        if hopeless is not None:
            return Verdict("raise", hopeless)
        if self._on_failure == "raise":
            return Verdict("raise", "on_failure is 'raise'")
        if self._on_failure == "drop":
            return self._drop(group, "on_failure is 'drop'")
        if kind == "task":
            return self._drop(group, "its task cannot be used")
        counts = self._replacements.setdefault(group, Counter())
        if counts[member] >= self._max_replacements:
            return self._drop(group, f"one of its trajectories was replaced {self._max_replacements} times")
        counts[member] += 1
        self.replaced += 1
        return Verdict("replace", f"replacement {counts[member]} of {self._max_replacements}")

    def succeed(self) -> None:
        """Record that a trajectory ended without a failure."""
        self._drops_in_a_row = 0
        self._streaks.clear()

    def forget(self, group: int) -> None:
        """Forget the replacements of a group that has left, or that restarts with other trajectories.

        Args:
            group: Number of the group.
        """
        self._replacements.pop(group, None)

    def _hopeless(self, group: int, kind: FailureKind, error: type[BaseException]) -> str | None:
        """Count a failure; return why others would fail, too, or None."""
        is_mistake = kind not in INFRASTRUCTURE
        streak = self._streaks.setdefault((kind, error) if is_mistake else kind, _Streak(self._clock()))
        streak.count += 1
        streak.groups.add(group)
        bound = self._max_failures
        if bound is None or streak.count < bound or len(streak.groups) < 2:
            return None
        if is_mistake:
            return f"{streak.count} trajectories failed with {error.__name__}, and none succeeded"
        passed = self._clock() - streak.began
        if passed < self._outage_s:
            return None
        return f"{streak.count} trajectories failed ({kind}) in {passed:.0f} s, and none succeeded"

    def _drop(self, group: int, reason: str) -> Verdict:
        limit = self._max_drops_in_a_row
        if self._max_failures is not None and self._drops_in_a_row >= limit:
            return Verdict("raise", f"{limit} groups were dropped in a row, and no trajectory succeeded")
        self.forget(group)
        self._drops_in_a_row += 1
        self.dropped += 1
        return Verdict("drop", reason)
