"""`TimelineWriter` writes the spans of each batch beside a dump; `read_timelines` reads them."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeAlias

from torchrl_agentic.codec import line_from_json, to_json
from torchrl_agentic.json_fields import AsMicroseconds, AsTuple
from torchrl_agentic.messages import JSON
from torchrl_agentic.records import Recorder
from torchrl_agentic.records.dump import MAX_LINE_BYTES, TIMELINE
from torchrl_agentic.records.jsonl_index import JsonlIndex
from torchrl_agentic.records.line_writer import LineWriter
from torchrl_agentic.records.record import BadLine
from torchrl_agentic.tools.private_files import PRIVATE
from torchrl_agentic.trajectory.span import Span

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
_MOST_PENDING = 8  # batches that wait to be written

Seconds: TypeAlias = Annotated[float, AsMicroseconds]


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """A trajectory of a batch.

    Attributes:
        name: Name of the trajectory.
        group: Name of its group.
        began: When it began, in seconds by the clock of the collector.
        ended: When it ended.
        reason: Why it ended.
        tokens: Number of its sampled tokens.
        held: Seconds for which the trainer waited for it; see `WaitCauses.held`.
        n_omitted: Number of its first spans that are left out.
        spans: Its spans, in the order of their ends.
    """

    name: str
    group: str
    began: Seconds
    ended: Seconds
    reason: str = ""
    tokens: int = 0
    held: Seconds = 0.0
    n_omitted: int = 0
    spans: Annotated[Sequence[Span], AsTuple] = ()


@dataclass(frozen=True, slots=True)
class BatchTimeline:
    """Time line of one batch: the spans of its trajectories until it was complete.

    Attributes:
        number: Number of the batch, counted from 0.
        start: When its first trajectory began, in seconds by the clock of the collector.
        stop: When it was complete.
        waited: When the trainer began to wait for it; None if it was ready before.
        causes: Seconds of that wait by cause.
        ages: Number of sampled tokens by age, in updates.
        own: Spans of the collector itself, such as updates.
        rows: Its trajectories.
        run: Id of the run.
        time: Wall-clock time of `stop`, in seconds since 1970.
    """

    number: int
    start: Seconds
    stop: Seconds
    waited: Seconds | None = None
    causes: Mapping[str, Seconds] = field(default_factory=dict[str, float])
    ages: Mapping[int, int] = field(default_factory=dict[int, int])
    own: Annotated[Sequence[Span], AsTuple] = ()
    rows: Annotated[Sequence[TimelineRow], AsTuple] = ()
    run: str = ""
    time: Seconds = 0.0

    def to_json(self) -> dict[str, JSON]:
        """Return the JSON of a line, with times to the microsecond."""
        return {"schema_version": SCHEMA_VERSION, **to_json(self, exclude=_LEFT_OUT)}

    @classmethod
    def from_json(cls, value: JSON) -> BatchTimeline:
        """Read the JSON of a line.

        Raises:
            ValueError: If it has another form.
        """
        found = line_from_json(cls, value, SCHEMA_VERSION)
        return replace(found, rows=tuple(map(_named, found.rows)))


_LEFT_OUT = {"rows": {"__all__": {"spans": {"__all__": {"trajectory"}}}}}
"""The name of the row is that of its spans."""


def _named(row: TimelineRow) -> TimelineRow:
    return replace(row, spans=tuple(replace(span, trajectory=row.name) for span in row.spans))


class TimelineWriter:
    """Appends the timeline of each batch, as a line of JSON, to the file "timeline.jsonl" of a folder.

    A background thread encodes and writes. If it falls behind by more than a few batches, the timelines of
    further batches are left out, so that the collector never waits for a disk.

    Args:
        folder: The folder, which is created; use that of the dump, so that the viewer finds both.
        run: Id of the run, such as that of the `Recorder`.
        mode: Permissions of the file if it is created.

    Attributes:
        path: The file.
        n_omitted: Number of batches that were left out.
    """

    def __init__(self, folder: str | Path, *, run: str = "", mode: int = PRIVATE) -> None:
        self.path = Path(folder) / TIMELINE
        self.n_omitted = 0
        self._run = run
        self._writer = LineWriter(1, mode=mode)
        self._slots = threading.BoundedSemaphore(_MOST_PENDING)

    @classmethod
    def beside(cls, recorder: Recorder) -> TimelineWriter:
        """Create the writer for the folder, the run and the permissions of a recorder."""
        return cls(recorder.file.parent, run=recorder.run, mode=recorder.mode)

    def write(self, batch: BatchTimeline) -> None:
        """Queue a timeline; its run and its wall-clock time are filled in."""
        if not self._slots.acquire(blocking=False):
            if not self.n_omitted:
                logger.warning("%s is written too slowly: timelines of some batches are left out", self.path)
            self.n_omitted += 1
            return
        now = time.time()

        def encoded() -> bytes:
            try:
                line = {**batch.to_json(), "run": self._run, "time": round(now, 3)}
                return json.dumps(line, separators=(",", ":")).encode() + b"\n"
            finally:
                self._slots.release()

        self._writer.put(self.path, encoded, 0)

    def close(self) -> None:
        """Write what is queued, and close the file. A later `write` opens it again."""
        self._writer.close()


def read_timelines(folder: str | Path) -> Iterator[BatchTimeline | BadLine]:
    """Read the timelines of a dump, batch by batch.

    Args:
        folder: The folder of the dump. If it has no timelines, nothing is yielded.

    Returns:
        An iterator over the batches; `BadLine` for a line that cannot be read.

    Raises:
        OSError: If the file cannot be read; `DumpTooLarge` if it has too many lines.
    """
    path = Path(folder) / TIMELINE
    if not path.is_file():
        return
    lines = JsonlIndex(path)
    try:
        lines.scan()
        for index in range(len(lines)):
            if lines.size(index) > MAX_LINE_BYTES:
                yield BadLine(lines.number(index), f"the line has {lines.size(index):,} bytes")
                continue
            try:
                yield BatchTimeline.from_json(json.loads(lines.read(index)))
            except (ValueError, RecursionError) as error:
                yield BadLine(lines.number(index), str(error))
    finally:
        lines.close()
