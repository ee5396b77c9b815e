"""`TaskRecords`: records of trajectories under the names of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrl_agentic.messages import JSON, Message, Turn
from torchrl_agentic.records import Origin, Recording, TokenRecord, TrajectoryHook

Finish = Callable[[Recording, Turn, JSON, str], None]


class TaskRecords(TrajectoryHook):
    """Records the trajectories of a collector under the names of their tasks, without its rewards.

    Args:
        hook: The recorder.
        finish: Ends a recording: called with the recording, the last turn, the right answer or None, and the
            reason why the trajectory ended.
    """

    def __init__(self, hook: TrajectoryHook, finish: Finish) -> None:
        self._hook, self._finish = hook, finish

    def begin(self, trajectory: str, row: int = 0) -> Recording:
        """Start a recording under the name of the task, which is a part of the name of the trajectory."""
        return _TaskRecording(self._hook.begin(trajectory.rpartition("/")[0], row), self._finish)


class _TaskRecording(Recording):
    __slots__ = ("_answer", "_finish", "_last", "_recording")

    def __init__(self, recording: Recording, finish: Finish) -> None:
        self._recording, self._finish = recording, finish
        self._last: Turn | None = None
        self._answer: JSON = None

    def record_turn(self, turn: Turn) -> None:
        """Forward the turn."""
        self._last = turn
        self._recording.record_turn(turn)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Forward the messages."""
        self._recording.add_messages(messages)

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Forward the facts."""
        self._answer = self._answer if gts is None else gts
        self._recording.annotate(score=score, gts=gts, tokens=tokens, **extras)

    def set_origin(self, origin: Origin) -> None:
        """Forward the origin."""
        self._recording.set_origin(origin)

    def finish(self, reason: str) -> None:
        """End the recording."""
        if self._last is None or reason == "failed":
            self._recording.finish(reason)
        else:
            self._finish(self._recording, self._last, self._answer, reason)
