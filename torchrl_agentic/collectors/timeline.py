"""`TimelineWriter` writes the spans of each batch beside a dump; `read_timelines` reads them."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from torchrl_agentic.messages import JSON
from torchrl_agentic.records import Recorder
from torchrl_agentic.records.dump import MAX_LINE_BYTES, TIMELINE
from torchrl_agentic.records.jsonl_index import JsonlIndex
from torchrl_agentic.records.line_writer import LineWriter
from torchrl_agentic.records.record import BadLine
from torchrl_agentic.tools.private_files import PRIVATE
from torchrl_agentic.trajectory.span import Cause, Span

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_MOST_PENDING = 8  # batches that wait to be written
_CAUSES: Mapping[str, Cause] = {cause: cause for cause in get_args(Cause)}


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
    began: float
    ended: float
    reason: str = ""
    tokens: int = 0
    held: float = 0.0
    n_omitted: int = 0
    spans: Sequence[Span] = ()


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
    start: float
    stop: float
    waited: float | None = None
    causes: Mapping[str, float] = field(default_factory=dict[str, float])
    ages: Mapping[int, int] = field(default_factory=dict[int, int])
    own: Sequence[Span] = ()
    rows: Sequence[TimelineRow] = ()
    run: str = ""
    time: float = 0.0

    def to_json(self) -> dict[str, JSON]:
        """Return the JSON of a line, with times to the microsecond."""
        return {
            "schema_version": SCHEMA_VERSION,
            "batch": self.number,
            "run": self.run,
            "time": round(self.time, 3),
            "start": _rounded(self.start),
            "stop": _rounded(self.stop),
            "waited": None if self.waited is None else _rounded(self.waited),
            "causes": {cause: _rounded(seconds) for cause, seconds in self.causes.items()},
            "ages": {str(age): count for age, count in self.ages.items()},
            "own": [_span_to_json(span) for span in self.own],
            "trajectories": [
                {
                    "name": row.name,
                    "group": row.group,
                    "began": _rounded(row.began),
                    "ended": _rounded(row.ended),
                    "reason": row.reason,
                    "tokens": row.tokens,
                    "held": _rounded(row.held),
                    "omitted": row.n_omitted,
                    "spans": [_span_to_json(span) for span in row.spans],
                }
                for row in self.rows
            ],
        }

    @classmethod
    def from_json(cls, value: JSON) -> BatchTimeline:
        """Read the JSON of a line.

        Raises:
            ValueError: If it has another form.
        """
        try:
            if (version := value["schema_version"]) != SCHEMA_VERSION:
                raise ValueError(
                    f"the line has version {version!r:.40}, and this package reads {SCHEMA_VERSION}"
                )
            return cls(
                int(value["batch"]),
                _time(value["start"]),
                _time(value["stop"]),
                None if value["waited"] is None else _time(value["waited"]),
                {str(cause): _time(seconds) for cause, seconds in value["causes"].items()},
                {int(age): int(count) for age, count in value["ages"].items()},
                tuple(_span_from_json(span, "") for span in value["own"]),
                tuple(_row_from_json(row) for row in value["trajectories"]),
                str(value["run"]),
                _time(value["time"]),
            )
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"the line is no timeline: {type(error).__name__}: {error}") from None


def _span_to_json(span: Span) -> list[JSON]:
    return [
        span.cause,
        _rounded(span.start),
        _rounded(span.stop),
        span.name,
        span.turn,
        span.version,
        span.tokens,
        span.status,
    ]


def _span_from_json(value: JSON, trajectory: str) -> Span:
    cause, start, stop, name, turn, version, tokens, status = value
    return Span(
        _CAUSES[cause], _time(start), _time(stop), trajectory,
        str(name), int(turn), int(version), int(tokens), str(status),
    )  # fmt: skip


def _row_from_json(value: JSON) -> TimelineRow:
    name = str(value["name"])
    return TimelineRow(
        name,
        str(value["group"]),
        _time(value["began"]),
        _time(value["ended"]),
        str(value["reason"]),
        int(value["tokens"]),
        _time(value["held"]),
        int(value["omitted"]),
        tuple(_span_from_json(span, name) for span in value["spans"]),
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _time(value: JSON) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.40} is no time")
    return number


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
