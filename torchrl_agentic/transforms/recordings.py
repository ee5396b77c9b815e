"""The recordings of an environment's rows, each from its first turn until its trajectory ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrl_agentic.messages import Turn
from torchrl_agentic.records import Recording, TrajectoryHook


class Recordings:
    """What is recorded of each row. One that has ended is recorded again only once it begins anew."""

    def __init__(self, hook: TrajectoryHook | None) -> None:
        self.hook = hook
        self._open: dict[int, Recording] = {}
        self._reasons: dict[int, str] = {}
        self._ended: set[int] = set()

    def turn(self, turn: Turn) -> None:
        """Record a turn of a row that goes on."""
        if self.hook is None or turn.row in self._ended:
            return
        recording = self._open.get(turn.row)
        if recording is None:
            recording = self._open[turn.row] = self.hook.begin(turn.trajectory, turn.row)
        recording.record_turn(turn)
        if turn.outcome.stop_requested:
            self._reasons[turn.row] = "stop_tool"

    def of(self, row: int) -> Recording | None:
        """Give the recording of a row, if it has one that goes on."""
        return self._open.get(row)

    def because(self, rows: Sequence[bool], reason: str) -> None:
        """Say why rows end; what was said first counts."""
        for row in self._open:
            if row < len(rows) and rows[row]:
                self._reasons.setdefault(row, reason)

    def finish(self, rows: Iterable[int], reason: str) -> None:
        """End the recordings of rows. reason: where none was said."""
        for row in rows:
            recording = self._open.pop(row, None)
            if recording is not None:
                self._ended.add(row)
                recording.finish(self._reasons.pop(row, reason))

    def begin(self, rows: Iterable[int], reason: str) -> None:
        """Let rows begin anew; those that had not ended end with that reason."""
        rows = list(rows)
        self.finish(rows, reason)
        self._ended.difference_update(rows)

    def fresh(self) -> Recordings:
        """Make those of another environment, or process, with the same hook."""
        return Recordings(self.hook)

    def __reduce__(self) -> tuple[type[Recordings], tuple[TrajectoryHook | None]]:
        return (Recordings, (self.hook,))
