"""`Resumption`: what a collector takes over from the state of an earlier process, and under which names."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable
from typing import Literal, TypeAlias

from torchrl_agentic.collectors.collector_state import CollectorState, GroupState, RunningTrajectory
from torchrl_agentic.collectors.effect_journal import EffectJournal
from torchrl_agentic.collectors.trajectory_state import TrajectoryState

Fate: TypeAlias = Literal["continue", "begin", "restart"]
"""What becomes of a trajectory that had begun in an earlier process.

"continue": it goes on from its state. "begin": it begins again under its name, since none of its calls had
effects. "restart": it begins again under a new name, since calls with effects ran, or may have run.
"""


def fate_of(
    state: TrajectoryState | None, *, last_effects: int | None, is_known: bool, has_effects: bool
) -> Fate:
    """Decide what becomes of a trajectory that had begun in an earlier process.

    It continues if nothing of it was open, and no call with effects may have run since its state was taken.

    Args:
        state: Its state; None if none of its turns had ended.
        last_effects: Number of the last turn in which calls with effects ran, or began to; None for no turn.
        is_known: Whether `last_effects` is known, because a journal has it.
        has_effects: Whether a tool that it may use has effects.
    """
    if state is not None and not state.is_open:
        if is_known:
            is_past = last_effects is None or last_effects < state.counts.turn
        else:
            is_past = bool(state.reason) or not has_effects
        if is_past:
            return "continue"
    may_have_run = last_effects is not None if is_known else has_effects
    return "restart" if may_have_run else "begin"


class Resumption:
    """The groups of an earlier process that have not been taken over yet, and the names of trajectories.

    A trajectory has a key, which the engine gets, and a name, which tools and records get. They are equal
    unless calls with effects ran under that name in an earlier process, or may have: then a suffix makes the
    name new. The key stays, so that an engine that is seeded by it samples the same answers again.

    Args:
        saved: State of the earlier process; None if there was none.
        journal: Journal of the calls with effects, or None.
    """

    def __init__(self, saved: CollectorState | None = None, journal: EffectJournal | None = None) -> None:
        self.journal = journal
        self._groups = {} if saved is None else {group.label: group for group in saved.groups}
        is_known = journal is not None and (saved is None or saved.journal == journal.key)
        self._known = journal if is_known else None
        self._token = None if saved is None or is_known else f"+{secrets.token_hex(3)}"

    @property
    def groups(self) -> tuple[GroupState, ...]:
        """The groups that have not been taken over yet, in the order of their labels."""
        return tuple(self._groups[label] for label in sorted(self._groups))

    def take(self, label: int) -> GroupState | None:
        """Remove and return the group of a task; None if it had not begun.

        Args:
            label: Number of the task, the same in a run that is resumed.
        """
        return self._groups.pop(label, None)

    def start(
        self, key: str, saved: RunningTrajectory | None, has_effects: Callable[[], bool]
    ) -> tuple[str, TrajectoryState | None]:
        """Return the suffix of the name of a trajectory that starts, and the state that it continues.

        Args:
            key: Its key.
            saved: The trajectory of an earlier process whose place it takes, or None.
            has_effects: Returns whether a tool that it may use has effects.
        """
        known = self._known
        if saved is not None:
            last = None if known is None else known.last_turn(saved.name)
            fate = fate_of(
                saved.state,
                last_effects=last,
                is_known=known is not None,
                has_effects=known is None and has_effects(),
            )
            if fate == "continue":
                return saved.suffix, saved.state
        if known is not None:
            return self._unused_suffix(key, known), None
        return self._new_suffix(has_effects), None

    def start_tree(self, start: str, end: str, has_effects: Callable[[], bool]) -> str:
        """Return the suffix of the names of a tree that begins: of its root and of all branches.

        With a journal, it is the first one under which no call with effects of any branch or attempt ran.

        Args:
            start: Start of the names, with the number of the tree.
            end: End of the keys, behind the branch and the attempt.
            has_effects: Returns whether a tool that it may use has effects.
        """
        if self._known is None:
            return self._new_suffix(has_effects)
        form = re.compile(rf"{re.escape(start)}(?:/[0-9.]+)?(?:~[0-9]+)?{re.escape(end)}(\+[0-9]+)?")
        used = {found[1] or "" for name in self._known.names(start) if (found := form.fullmatch(name))}
        suffixes = itertools.chain([""], (f"+{number}" for number in itertools.count(1)))
        return next(suffix for suffix in suffixes if suffix not in used)

    def _new_suffix(self, has_effects: Callable[[], bool]) -> str:
        """Return the suffix of a trajectory that begins without the journal of its state."""
        return self._token if self._token is not None and has_effects() else ""

    @staticmethod
    def _unused_suffix(key: str, journal: EffectJournal) -> str:
        """Return the first suffix under whose name no call with effects ran."""
        suffix, number = "", 0
        while journal.last_turn(f"{key}{suffix}") is not None:
            number += 1
            suffix = f"+{number}"
        return suffix
