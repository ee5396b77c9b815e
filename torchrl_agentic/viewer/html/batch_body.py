"""Convert the timeline of a batch to the JSON that the page reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torchrl_agentic.collectors.timeline import BatchTimeline, TimelineRow
from torchrl_agentic.messages import JSON
from torchrl_agentic.trajectory.span import Span

_NAME_CHARS = 160


class _Numbers:
    """Numbers of texts that repeat, in the order in which they were first met."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.texts.setdefault(text[:_NAME_CHARS], len(self.texts))


def batch_row(batch: BatchTimeline) -> list[JSON]:
    """Return what the list of batches shows: number, run, time, duration, wait, trajectories, tokens."""
    return [
        batch.number,
        batch.run[:_NAME_CHARS],
        batch.time,
        max(0.0, batch.stop - batch.start),
        None if batch.waited is None else max(0.0, batch.stop - batch.waited),
        len(batch.rows),
        sum(row.tokens for row in batch.rows),
    ]


def batch_body(batch: BatchTimeline, records: Mapping[str, int | None]) -> dict[str, JSON]:
    """Return the timeline of a batch, with times since its start, and its rows by group.

    Args:
        batch: The timeline.
        records: Number in the page of each trajectory that was recorded; None for a name of several ones.
    """
    texts = _Numbers()
    return {
        "stop": batch.stop - batch.start,
        "waited": None if batch.waited is None else batch.waited - batch.start,
        "causes": [
            [name, batch.causes[name]] for name in sorted(batch.causes, key=lambda one: -batch.causes[one])
        ],
        "ages": sorted([age, count] for age, count in batch.ages.items()),
        "own": [_span(span, batch.start, texts) for span in batch.own],
        "rows": [
            {
                "name": row.name[:_NAME_CHARS],
                "group": row.group[:_NAME_CHARS],
                "began": row.began - batch.start,
                "ended": row.ended - batch.start,
                "reason": row.reason[:_NAME_CHARS],
                "tokens": row.tokens,
                "held": row.held,
                "omitted": row.n_omitted,
                "record": records.get(row.name),
                "spans": [_span(span, batch.start, texts) for span in _by_start(row.spans)],
            }
            for row in _by_group(batch.rows)
        ],
        "texts": list(texts.texts),
    }


def _by_start(spans: Iterable[Span]) -> list[Span]:
    """Return spans in the order in which they began, and the tools of a turn before its calls, as drawn."""
    return sorted(spans, key=lambda span: (span.start, -span.stop, span.cause == "tool"))


def _by_group(rows: Iterable[TimelineRow]) -> list[TimelineRow]:
    """Return rows group by group, the group first that began first."""
    ranks: dict[str, int] = {}
    rows = sorted(rows, key=lambda row: row.began)
    for row in rows:
        ranks.setdefault(row.group, len(ranks))
    return sorted(rows, key=lambda row: ranks[row.group])


def _span(span: Span, start: float, texts: _Numbers) -> list[JSON]:
    return [
        span.cause,
        round(span.start - start, 6),
        round(span.stop - start, 6),
        texts(span.name),
        span.turn,
        span.version,
        span.tokens,
        texts(span.status.lower()),
    ]
