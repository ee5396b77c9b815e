"""`EpisodeRecording`, the record of a live trajectory, and `RecordStage`, which completes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.messages import JSON, Message, Turn
from torchrl_agentic.tools.row_data import RIGHT_ANSWERS
from torchrl_agentic.trajectory.episode import Stage
from torchrl_agentic.trajectory.final_answer import final_answer
from torchrl_agentic.trajectory.task import first_known

if TYPE_CHECKING:
    from torchrl_agentic.messages import StoredMessage
    from torchrl_agentic.records import Origin, Recording, TokenRecord, TrajectoryHook
    from torchrl_agentic.tokens.ledger import TokenLedger
    from torchrl_agentic.trajectory.episode import OpenTurn


class EpisodeRecording:
    """The record of one trajectory, from its first turn to its end; it does nothing without a hook.

    Args:
        hook: Receives the record, or None.
        trajectory: Name of the trajectory.
        row: Its place in the batch, or in its group.
        origin: Where the trajectory comes from, if that is known.

    Attributes:
        row: Its place in the batch, or in its group.
        n_messages: Number of messages of the conversation that are recorded.
    """

    __slots__ = (
        "_has_ended",
        "_hook",
        "_origin",
        "_recording",
        "_trajectory",
        "n_messages",
        "row",
    )

    def __init__(
        self, hook: TrajectoryHook | None, trajectory: str, row: int, origin: Origin | None = None
    ) -> None:
        self._origin = origin
        self._hook, self._trajectory, self.row = hook, trajectory, row
        self._recording: Recording | None = None
        self._has_ended = False
        self.n_messages = 0

    @property
    def is_open(self) -> bool:
        """True if a turn is recorded, and the record has not ended."""
        return self._recording is not None

    def record(self, turn: Turn) -> None:
        """Record a turn."""
        self.n_messages += len(turn.context) + 1 + len(turn.messages)
        if self._hook is not None and not self._has_ended:
            if self._recording is None:
                self._recording = self._hook.begin(self._trajectory, self.row)
                if self._origin is not None:
                    self._recording.set_origin(self._origin)
            self._recording.record_turn(turn)

    def add_reward(self, value: float) -> None:
        """Record the reward of the last turn; a later one replaces it."""
        if self._recording is not None:
            self._recording.add_reward(value)

    def add_rest(self, messages: Sequence[StoredMessage | Message]) -> None:
        """Record the messages of a whole conversation that came after its last recorded turn.

        Args:
            messages: All messages.
        """
        rest, self.n_messages = messages[self.n_messages :], len(messages)
        if self._recording is not None:
            read = [one if isinstance(one, Message) else one.read() for one in rest]
            self._recording.add_messages(read)

    def annotate(
        self,
        *,
        score: float | None = None,
        gts: JSON = None,
        tokens: TokenRecord | None = None,
        **extras: JSON,
    ) -> None:
        """Record facts about the whole trajectory; see `Recording.annotate`.

        Args:
            score: Score of the trajectory.
            gts: The right answer.
            tokens: Tokens of the trajectory.
            extras: Other fields, by name.
        """
        if self._recording is not None:
            self._recording.annotate(score=score, gts=gts, tokens=tokens, **extras)

    def set_origin(self, origin: Origin) -> None:
        """Record where the trajectory comes from."""
        if self._recording is not None:
            self._recording.set_origin(origin)

    def finish(self, reason: str) -> None:
        """End the record, if there is one.

        Args:
            reason: Why the trajectory ended.
        """
        recording, self._recording = self._recording, None
        if recording is not None:
            self._has_ended = True
            recording.finish(reason)


class RecordStage(Stage):
    """Adds rewards, right answers and further columns to the records of trajectories.

    Args:
        gts: Column of the data set with the right answer, or None for the first of `RIGHT_ANSWERS`.
        extras: Keys of other columns, of the data set or of the step, by their names in the record.
        tokens: Whether the tokens are recorded.
    """

    name = "RecordTransform"
    reads_answer = False

    def __init__(self, gts: Any = None, extras: Mapping[str, Any] | None = None, *, tokens: bool) -> None:
        self.gts: Sequence[Any] = RIGHT_ANSWERS if gts is None else (gts,)
        self._is_known_answer = gts is None
        self.extras, self.tokens = dict(extras or {}), tokens

    def run(self, turns: Sequence[OpenTurn]) -> None:
        """Complete the records of the trajectories that have ended."""
        for turn in turns:
            recording = turn.episode.recording
            if turn.is_over and recording is not None and recording.is_open:
                recording.add_rest(turn.messages)
                self.annotate(recording, turn.lookup)

    def annotate(
        self, recording: EpisodeRecording, lookup: Callable[[Iterable[Any]], Mapping[Any, Any]]
    ) -> None:
        """Record the right answer and the further columns.

        Args:
            recording: The record.
            lookup: Returns columns by name.
        """
        found = lookup([*self.gts, *self.extras.values()])
        gts = first_known(found, self.gts)
        if self._is_known_answer:
            gts = final_answer(gts)
        extras = {name: _single(found.get(key)) for name, key in self.extras.items()}
        recording.annotate(gts=gts, **extras)


def token_record(ledger: TokenLedger, tokenizer: Any) -> TokenRecord:
    """Return the tokens of a trajectory for its record.

    Args:
        ledger: The tokens.
        tokenizer: Decodes each span, or None.
    """
    from torchrl_agentic.records import TokenRecord

    if tokenizer is None:
        return TokenRecord(ledger)
    ids = ledger.ids
    texts: Iterable[str] = (tokenizer.decode(ids[span.start : span.stop]) for span in ledger.spans())
    return TokenRecord(ledger, tuple(texts))


def _single(value: JSON) -> JSON:
    """Return the number of a column of one number per row."""
    items = cast("list[JSON]", value) if isinstance(value, list) else []
    return items[0] if len(items) == 1 else cast("JSON", value)
