"""`ContainedHook`, a hook whose exceptions are caught, and hooks of functions and of several hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from torchrl_agentic.messages import JSON, Message, Turn
from torchrl_agentic.records.group_record import GroupRecord
from torchrl_agentic.records.hooks import Recorders, Recording, TrajectoryHook
from torchrl_agentic.records.record import Origin, TokenRecord

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Callback(Recording):
    def __init__(self, function: Callable[[Turn], object]) -> None:
        self._function = function

    def record_turn(self, turn: Turn) -> None:
        """Call the function."""
        self._function(turn)


class CallbackHook(TrajectoryHook):
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

    def set_origin(self, origin: Origin) -> None:
        """Call all recordings."""
        for recording in self._recordings:
            recording.set_origin(origin)

    def finish(self, reason: str) -> None:
        """Call all recordings."""
        for recording in self._recordings:
            recording.finish(reason)


class SeveralHooks(TrajectoryHook):
    """Several hooks as one."""

    def __init__(self, hooks: Sequence[TrajectoryHook]) -> None:
        self._hooks = hooks

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start a recording of each hook."""
        return _SeveralRecordings([hook.begin(trajectory, row) for hook in self._hooks])

    def group_left(self, group: GroupRecord) -> None:
        """Call all hooks."""
        for hook in self._hooks:
            hook.group_left(group)

    def weights_updated(self) -> None:
        """Call all hooks."""
        for hook in self._hooks:
            hook.weights_updated()


class ContainedHook(TrajectoryHook):
    """A hook whose exceptions are caught, since a broken observer must not cost a batch."""

    def __init__(self, hook: TrajectoryHook) -> None:
        self.hook = hook
        self._has_raised = False

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start a recording, or one that does nothing if the hook raises."""
        where = f"trajectory {trajectory}, row {row}"
        recording = self.call(where, self.hook.begin, trajectory, row)
        return Recording() if recording is None else _ContainedRecording(self, where, recording)

    def group_left(self, group: GroupRecord) -> None:
        """Forward the group."""
        self.call(f"group {group.number}", self.hook.group_left, group)

    def weights_updated(self) -> None:
        """Forward the update."""
        self.call("an update", self.hook.weights_updated)

    def call(self, where: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a method of the hook; return None if it raises. The first exception is logged.

        Args:
            where: What is recorded, for the log.
            function: The method.
            args: Its arguments.
            kwargs: Its arguments by keyword.
        """
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
    """A recording of a `ContainedHook`."""

    def __init__(self, owner: ContainedHook, where: str, recording: Recording) -> None:
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

    def set_origin(self, origin: Origin) -> None:
        """Forward the origin."""
        self._owner.call(self._where, self._recording.set_origin, origin)

    def finish(self, reason: str) -> None:
        """Forward the end."""
        self._owner.call(self._where, self._recording.finish, reason)


def as_hook(recorder: Recorders) -> TrajectoryHook | None:
    """Convert the argument of `ToolCompose(recorder=...)` to one hook, which logs exceptions.

    Args:
        recorder: A hook, a function that is called with each turn, a list of them, or None.

    Returns:
        The hook, or None if there is nothing to call.

    Raises:
        TypeError: If `recorder` is something else.
    """
    if recorder is None:
        return None
    if isinstance(recorder, ContainedHook | SeveralHooks):
        return recorder
    if isinstance(recorder, TrajectoryHook):
        return ContainedHook(recorder)
    if callable(recorder):
        return ContainedHook(CallbackHook(recorder))
    if not isinstance(recorder, list | tuple):
        raise TypeError(
            "recorder must be a Recorder, a function of a Turn, or a list of them; "
            f"got {type(recorder).__name__}"
        )
    hooks = [hook for hook in map(as_hook, recorder) if hook is not None]
    return SeveralHooks(hooks) if hooks else None
