"""The interface of recorders: a `TrajectoryHook` starts a `Recording` for each trajectory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from torchrl_agentic.messages import JSON, Message, Turn

if TYPE_CHECKING:
    from torchrl_agentic.records.record import TokenRecord

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Recording:
    """Observer of one trajectory; this base class ignores everything. All methods run on the stepping thread.

    `record_turn` is called once per turn. The other methods are called where the values are known:
    `add_reward` after the turn that it belongs to, `annotate` at any time. Nothing is called after `finish`.
    """

    __slots__ = ()

    def record_turn(self, turn: Turn) -> None:
        """Record a turn."""
        del turn

    def add_reward(self, value: float) -> None:
        """Record the reward of the environment for the last turn."""
        del value

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Record messages that were added after the last turn, as the trajectory ended."""
        del messages

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Record facts about the whole trajectory; None means not known yet.

        Args:
            score: Score of the trajectory.
            gts: The right answer (ground truth), as the data set has it.
            tokens: Tokens of the trajectory.
            extras: Other fields, by name.
        """
        del score, gts, tokens, extras

    def finish(self, reason: str) -> None:
        """End the recording.

        Args:
            reason: See `TrajectoryRecord.termination_reason`.
        """
        del reason


class TrajectoryHook:
    """Observer of the trajectories of environments: `ToolCompose(recorder=...)`. The default does nothing.

    One hook may serve several environments, and is copied to workers with them. The first exception of a hook
    is logged with its traceback, later ones are ignored; the step and the other hooks continue.
    """

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start the recording of a trajectory.

        Args:
            trajectory: Name of the trajectory in its environment.
            row: Its place in the batch.

        Returns:
            The recording, which gets the turns.
        """
        del trajectory, row
        return Recording()


class _Callback(Recording):
    def __init__(self, function: Callable[[Turn], object]) -> None:
        self._function = function

    def record_turn(self, turn: Turn) -> None:
        """Call the function."""
        self._function(turn)


class _CallbackHook(TrajectoryHook):
    """Calls a function with each turn."""

    def __init__(self, function: Callable[[Turn], object]) -> None:
        self._function = function

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start a recording that calls the function."""
        return _Callback(self._function)

    def __repr__(self) -> str:
        return repr(self._function)


class _SeveralRecordings(Recording):
    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings

    def record_turn(self, turn: Turn) -> None:
        """Call all recordings."""
        for recording in self._recordings:
            recording.record_turn(turn)

    def add_reward(self, value: float) -> None:
        """Call all recordings."""
        for recording in self._recordings:
            recording.add_reward(value)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Call all recordings."""
        for recording in self._recordings:
            recording.add_messages(messages)

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Call all recordings."""
        for recording in self._recordings:
            recording.annotate(score=score, gts=gts, tokens=tokens, **extras)

    def finish(self, reason: str) -> None:
        """Call all recordings."""
        for recording in self._recordings:
            recording.finish(reason)


class _SeveralHooks(TrajectoryHook):
    """Several hooks as one."""

    def __init__(self, hooks: Sequence[TrajectoryHook]) -> None:
        self._hooks = hooks

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start a recording of each hook."""
        return _SeveralRecordings([hook.begin(trajectory, row) for hook in self._hooks])


class _ContainedHook(TrajectoryHook):
    """A hook whose exceptions are caught, since a broken observer must not cost a batch."""

    def __init__(self, hook: TrajectoryHook) -> None:
        self.hook = hook
        self._has_raised = False

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start a recording, or one that does nothing if the hook raises."""
        where = f"trajectory {trajectory}, row {row}"
        recording = self.call(where, self.hook.begin, trajectory, row)
        return Recording() if recording is None else _ContainedRecording(self, where, recording)

    def call(self, where: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a method of the hook; return None if it raises. The first exception is logged."""
        try:
            return function(*args, **kwargs)
        except Exception:
            if not self._has_raised:
                self._has_raised = True
                logger.exception(
                    "recorder %r raised in %s (%s); the step continues, and later exceptions are not logged",
                    self.hook,
                    getattr(function, "__name__", function),
                    where,
                )
            return None


class _ContainedRecording(Recording):
    """A recording of a `_ContainedHook`."""

    def __init__(self, owner: _ContainedHook, where: str, recording: Recording) -> None:
        self._owner, self._where, self._recording = owner, where, recording

    def record_turn(self, turn: Turn) -> None:
        """Forward the turn."""
        where = f"{self._where}, turn {turn.index}"
        self._owner.call(where, self._recording.record_turn, turn)

    def add_reward(self, value: float) -> None:
        """Forward the reward."""
        self._owner.call(self._where, self._recording.add_reward, value)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Forward the messages."""
        self._owner.call(self._where, self._recording.add_messages, messages)

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Forward the facts."""
        self._owner.call(self._where, self._recording.annotate, score=score, gts=gts, tokens=tokens, **extras)

    def finish(self, reason: str) -> None:
        """Forward the end."""
        self._owner.call(self._where, self._recording.finish, reason)


Recorders: TypeAlias = "TrajectoryHook | Callable[[Turn], object] | Sequence[Recorders] | None"
"""Argument of `ToolCompose(recorder=...)`: a hook, a function that gets each turn, or several of them."""


def as_hook(recorder: Recorders) -> TrajectoryHook | None:
    """Convert the argument of `ToolCompose(recorder=...)` to one hook, which logs exceptions.

    Args:
        recorder: A hook, a function that is called with each turn, a list of them, or None.

    Returns:
        The hook, or None if there is nothing to call.

    Raises:
        TypeError: If `recorder` is something else.
    """
    if recorder is None or isinstance(recorder, _ContainedHook | _SeveralHooks):
        return recorder
    if isinstance(recorder, TrajectoryHook):
        return _ContainedHook(recorder)
    if callable(recorder):
        return _ContainedHook(_CallbackHook(recorder))
    if not isinstance(recorder, list | tuple):
        raise TypeError(
            "recorder must be a Recorder, a function of a Turn, or a list of them; "
            f"got {type(recorder).__name__}"
        )
    hooks = [hook for hook in map(as_hook, recorder) if hook is not None]
    return _SeveralHooks(hooks) if hooks else None
