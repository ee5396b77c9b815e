"""The interface of recorders: what they are told of each trajectory, from its first turn to its end."""

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
    """What is recorded of one trajectory: here nothing. All is called on the thread that steps.

    `turn` comes once per turn, the others where somebody knows: `reward` after the turn that it belongs to,
    `note` at any time. After `finish` nothing comes any more.
    """

    __slots__ = ()

    def turn(self, turn: Turn) -> None:
        """Record a turn."""
        del turn

    def reward(self, value: float) -> None:
        """Record what the last turn was worth to the environment."""
        del value

    def added(self, messages: Sequence[Message]) -> None:
        """Record messages that others have put behind those of the last turn, as the trajectory ended."""
        del messages

    def note(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Record what is known of the whole trajectory; what is None is not known yet."""
        del score, gts, tokens, extras

    def finish(self, reason: str) -> None:
        """End the recording. reason: see `TrajectoryRecord.termination_reason`."""
        del reason


class TrajectoryHook:
    """Watches the trajectories of environments: `ToolCompose(recorder=...)`. This one looks away.

    One may serve several environments, and is copied to workers with them. The first exception of a hook is
    logged with its traceback, later ones are not; the step and the other hooks go on.
    """

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Begin the recording of a trajectory: its name in its environment, its place in the batch."""
        del trajectory, row
        return Recording()


class _Callback(Recording):
    def __init__(self, function: Callable[[Turn], object]) -> None:
        self._function = function

    def turn(self, turn: Turn) -> None:
        """Hand the turn on."""
        self._function(turn)


class _Calling(TrajectoryHook):
    """Calls a function with each turn."""

    def __init__(self, function: Callable[[Turn], object]) -> None:
        self._function = function

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Begin."""
        return _Callback(self._function)

    def __repr__(self) -> str:
        return repr(self._function)


class _Both(Recording):
    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings

    def turn(self, turn: Turn) -> None:
        """Tell all."""
        for recording in self._recordings:
            recording.turn(turn)

    def reward(self, value: float) -> None:
        """Tell all."""
        for recording in self._recordings:
            recording.reward(value)

    def added(self, messages: Sequence[Message]) -> None:
        """Tell all."""
        for recording in self._recordings:
            recording.added(messages)

    def note(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Tell all."""
        for recording in self._recordings:
            recording.note(score=score, gts=gts, tokens=tokens, **extras)

    def finish(self, reason: str) -> None:
        """Tell all."""
        for recording in self._recordings:
            recording.finish(reason)


class _All(TrajectoryHook):
    """Several hooks as one."""

    def __init__(self, hooks: Sequence[TrajectoryHook]) -> None:
        self._hooks = hooks

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Begin with all."""
        return _Both([hook.begin(trajectory, row) for hook in self._hooks])


class _ContainedHook(TrajectoryHook):
    """A hook whose exceptions stay out of the step, since a broken observer must not cost a batch."""

    def __init__(self, hook: TrajectoryHook) -> None:
        self.hook = hook
        self._has_raised = False

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Begin a recording; one that does nothing if the hook raises."""
        where = f"trajectory {trajectory}, row {row}"
        recording = self.call(where, self.hook.begin, trajectory, row)
        return Recording() if recording is None else _Contained(self, where, recording)

    def call(self, where: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a method of the hook; return None if it raises. The first exception is logged."""
        try:
            return function(*args, **kwargs)
        except Exception:
            if not self._has_raised:
                self._has_raised = True
                logger.exception(
                    "recorder %r raised in %s (%s); the step goes on, later exceptions are not logged",
                    self.hook,
                    getattr(function, "__name__", function),
                    where,
                )
            return None


class _Contained(Recording):
    """A recording of a `_ContainedHook`."""

    def __init__(self, owner: _ContainedHook, where: str, recording: Recording) -> None:
        self._owner, self._where, self._recording = owner, where, recording

    def turn(self, turn: Turn) -> None:
        """Hand the turn on."""
        where = f"{self._where}, turn {turn.index}"
        self._owner.call(where, self._recording.turn, turn)

    def reward(self, value: float) -> None:
        """Hand the reward on."""
        self._owner.call(self._where, self._recording.reward, value)

    def added(self, messages: Sequence[Message]) -> None:
        """Hand the messages on."""
        self._owner.call(self._where, self._recording.added, messages)

    def note(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Hand on what is known of the whole trajectory."""
        self._owner.call(self._where, self._recording.note, score=score, gts=gts, tokens=tokens, **extras)

    def finish(self, reason: str) -> None:
        """Hand the end on."""
        self._owner.call(self._where, self._recording.finish, reason)


Recorders: TypeAlias = "TrajectoryHook | Callable[[Turn], object] | Sequence[Recorders] | None"
"""What `ToolCompose(recorder=...)` takes: a hook, a function that is called with each turn, or several."""


def as_hook(recorder: Recorders) -> TrajectoryHook | None:
    """Make one hook of what `ToolCompose(recorder=...)` takes, whose exceptions are logged and not raised.

    Args:
        recorder: A hook, a function that is called with each turn, a list of them, or None.

    Returns:
        The hook, or None if there is nothing to call.

    Raises:
        TypeError: If `recorder` is something else.
    """
    if recorder is None or isinstance(recorder, _ContainedHook | _All):
        return recorder
    if isinstance(recorder, TrajectoryHook):
        return _ContainedHook(recorder)
    if callable(recorder):
        return _ContainedHook(_Calling(recorder))
    if not isinstance(recorder, list | tuple):
        raise TypeError(
            "recorder= takes a Recorder, a function of a Turn, or a list of them; "
            f"got {type(recorder).__name__}"
        )
    hooks = [hook for hook in map(as_hook, recorder) if hook is not None]
    return _All(hooks) if hooks else None
