"""`RecordStage`: complete the records of trajectories that have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.row_data import RIGHT_ANSWERS
from torchrl_agentic.trajectory.episode import Stage
from torchrl_agentic.trajectory.final_answer import final_answer
from torchrl_agentic.trajectory.task import first_known

if TYPE_CHECKING:
    from torchrl_agentic.records import TokenRecord
    from torchrl_agentic.tokens.ledger import TokenLedger
    from torchrl_agentic.trajectory.episode import EpisodeRecording, OpenTurn


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
            if turn.is_over and recording.is_open:
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
