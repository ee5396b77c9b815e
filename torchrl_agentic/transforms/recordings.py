"""`Recordings`: what a `ToolCompose` records of its rows, from the first turn of a trajectory to its end."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable

from tensordict import TensorDictBase

from torchrl_agentic.messages import Message, Turn
from torchrl_agentic.records import Recording, TrajectoryHook
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.specs import ENDED_BY, REASONS


class Recordings:
    """The open recordings by row. A trajectory that has ended is recorded again only after its reset.

    Args:
        hook: Receives the trajectories, or None to record nothing.
    """

    def __init__(self, hook: TrajectoryHook | None) -> None:
        self.hook = hook
        self._open: dict[int, Recording] = {}
        self._ended: set[int] = set()
        self._lengths: dict[int, int] = {}
        self._reasons: dict[int, str] = {}

    def recorded(self, row: int) -> int:
        """Return the number of messages of a row's conversation that are recorded."""
        return self._lengths.get(row, 0)

    def turn(self, turn: Turn, length: int) -> None:
        """Record a turn.

        Args:
            turn: The turn; its row must not have ended.
            length: Number of messages of the conversation after the turn.
        """
        self._lengths[turn.row] = length
        if self.hook is None or turn.row in self._ended:
            return
        recording = self._open.get(turn.row)
        if recording is None:
            recording = self._open[turn.row] = self.hook.begin(turn.trajectory, turn.row)
        recording.record_turn(turn)

    def of(self, row: int) -> Recording | None:
        """Return the open recording of a row, or None."""
        return self._open.get(row)

    def unrecorded(self, row: int, conversation: border.Conversation) -> list[Message]:
        """Return the messages that came after the last recorded turn of a row, and count them as recorded.

        Args:
            row: Index in the flattened batch.
            conversation: The conversation of the row.
        """
        length = len(conversation)
        known, self._lengths[row] = self._lengths.get(row, length), length
        return [message.read() for message in conversation.messages[known:]]

    def read_reasons(self, next_tensordict: TensorDictBase) -> None:
        """Remember why rows end, for a recording that the environment closes before its next step.

        Args:
            next_tensordict: The "next" of a step, [*B].
        """
        numbers = next_tensordict.get(ENDED_BY, None) if self._open else None
        if numbers is not None and numbers.any():
            for row, number in enumerate(numbers.reshape(-1).tolist()):
                if number and row in self._open:
                    self._reasons[row] = REASONS[number]

    def finish_done(self, next_tensordict: TensorDictBase) -> None:
        """End the recordings of the rows that are done, with the reasons that the TensorDict holds.

        Args:
            next_tensordict: The "next" of a step, [*B].
        """
        self.read_reasons(next_tensordict)
        done = next_tensordict.get("done").reshape(-1).tolist()
        if any(done) and self._open:
            cut = next_tensordict.get("truncated", None)
            truncated = [False] * len(done) if cut is None else cut.reshape(-1).tolist()
            for row, is_done in enumerate(done):
                if is_done:  # the flags tell only where no reason was read
                    self._finish(row, "truncated" if truncated[row] else "terminated")

    def begin(self, rows: Iterable[int], reason: str) -> None:
        """Prepare rows for new trajectories.

        Args:
            rows: Rows of the flattened batch.
            reason: Reason for the recordings that are still open.
        """
        for row in rows:
            self._finish(row, reason)
            self._ended.discard(row)
            self._lengths.pop(row, None)

    def _finish(self, row: int, reason: str) -> None:
        recording, reason = self._open.pop(row, None), self._reasons.pop(row, reason)
        if recording is not None:
            self._ended.add(row)
            recording.finish(reason)

    def fresh(self) -> Recordings:
        """Return recordings of another environment or process, with the same hook."""
        return Recordings(self.hook)

    def __reduce__(self) -> tuple[type[Recordings], tuple[TrajectoryHook | None]]:
        return (Recordings, (self.hook,))
