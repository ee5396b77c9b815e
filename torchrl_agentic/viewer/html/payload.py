"""Convert trajectories and the timelines of batches to the JSON that the page reads, with bounded texts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping

from torchrl_agentic.collectors.timeline import BatchTimeline, TimelineRow
from torchrl_agentic.messages import JSON, Message, ParsedCall, ToolResult, Turn
from torchrl_agentic.records import TokenRecord, TrajectoryRecord
from torchrl_agentic.records.json_dump import plain
from torchrl_agentic.tokens.ledger import SAMPLED
from torchrl_agentic.trajectory.span import Span
from torchrl_agentic.viewer.html.summary import MessagePiece, final_answer, pieces, summary_lines

MAX_CHARS = 1_000_000
"""Largest number of characters of text of a trajectory in the page; its longest texts are cut."""
_NAME_CHARS = 160  # of each name in a timeline
_ANSWER_CHARS = 5000  # of the last message beside the right answer; the turns below have it whole


class Clip:
    """Cuts strings longer than `cap` characters, and counts the omitted characters.

    Args:
        cap: Largest number of characters of a string; None for no limit.

    Attributes:
        lengths: Number of characters of each string so far.
        left_out: Number of omitted characters.
    """

    def __init__(self, cap: int | None = None) -> None:
        self.cap = cap
        self.lengths: list[int] = []
        self.left_out = 0

    def __call__(self, text: object) -> str:
        """Return a string, cut if it is too long; convert other values to JSON first."""
        text = text if isinstance(text, str) else as_text(text)
        self.lengths.append(len(text))
        if self.cap is None or len(text) <= self.cap:
            return text
        left_out = len(text) - self.cap
        self.left_out += left_out
        return f"{text[: self.cap]}\n[… {left_out:,} more characters are not in this page]"


def as_text(value: JSON) -> str:
    """Return a string as it is, and other JSON values as indented JSON."""
    return value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False, indent=2)


def trajectory_payload(record: TrajectoryRecord) -> dict[str, JSON]:
    """Return the data of a trajectory for the page, with at most about `MAX_CHARS` characters of text."""
    clip = Clip()
    found = _payload(record, clip)
    if sum(clip.lengths) > MAX_CHARS:
        clip = Clip(fair_cap(clip.lengths, MAX_CHARS))
        found = _payload(record, clip)
    return {**found, "left_out": clip.left_out}


def fair_cap(lengths: list[int], most: int) -> int:
    """Return the length to which the longest texts must be cut so that all texts together fit.

    Args:
        lengths: Number of characters of each text.
        most: Largest number of characters of all texts together.
    """
    left = most
    for done, length in enumerate(sorted(lengths)):
        share = left // (len(lengths) - done)
        if length > share:
            return share
        left -= length
    return max(lengths, default=0)


def _payload(record: TrajectoryRecord, clip: Clip) -> dict[str, JSON]:
    calls = [_call(turn, call, result, clip) for turn, call, result in record.calls]
    rewards = record.rewards + (None,) * (len(record.turns) - len(record.rewards))
    numbers = iter(range(len(calls)))
    given = final_answer(record)
    return {
        "id": clip(record.request_id),
        "trajectory": clip(record.trajectory),
        "run": clip(record.run),
        "row": record.row,
        "started": seconds(record.started),
        "group": clip(record.group),
        "summary": [(line.tone, line.text, line.call, line.quote) for line in summary_lines(record)],
        "right": None if record.gts is None else clip(record.gts),
        "given": given if len(given) <= _ANSWER_CHARS else f"{given[:_ANSWER_CHARS]} …",
        "turns": [
            _turn(turn, reward, numbers, clip) for turn, reward in zip(record.turns, rewards, strict=False)
        ],
        "calls": calls,
        "tokens": None if record.tokens is None else _tokens(record.tokens, clip),
        "extras": [[clip(name), clip(value)] for name, value in record.extras.items()],
        "versions": [[clip(name), clip(value)] for name, value in record.versions.items()],
    }


def _turn(turn: Turn, reward: float | None, numbers: Iterator[int], clip: Clip) -> dict[str, JSON]:
    calls = [next(numbers) for _ in turn.outcome.calls]
    return {
        "index": turn.index,
        "reward": reward,
        "notes": clip(", ".join(map(str, turn.notes))),
        "role": clip(turn.message.role),
        "complete": turn.message.finish != "length",
        "context": [_message(message, clip) for message in turn.context],
        "said": [
            [piece.kind, clip(piece.text), None if piece.call is None else calls[piece.call]]
            for piece in (*pieces(turn), *_refusal(turn.message))
        ],
        "calls": calls,
        "answers": [_message(message, clip) for message in turn.messages],
    }


def _refusal(message: Message) -> Iterator[MessagePiece]:
    if message.refusal:
        yield MessagePiece("text", f"[refusal] {message.refusal}")


def _message(message: Message, clip: Clip) -> list[str]:
    return [clip(message.role), clip(message.text)]


def _call(turn: Turn, call: ParsedCall, result: ToolResult, clip: Clip) -> dict[str, JSON]:
    timing = result.timing
    notes, error = [*call.notes, *result.notes], call.error
    told = error is not None and str(error.message) in result.text
    return {
        "turn": turn.index,
        "id": clip(call.call_id),
        "tool": clip(call.tool),
        "args": [[clip(name), clip(_argument(value))] for name, value in call.args.items()],
        "status": result.status,
        "result": clip(result.text),
        "bytes": len(result.text.encode("utf-8", "replace")),
        "start": None if timing is None else seconds(timing.start),
        "queue": None if timing is None else seconds(timing.queue_s),
        "run": None if timing is None else seconds(timing.run_s),
        "reward": result.reward,
        "metrics": clip(result.metrics) if result.metrics else "",
        "stop": result.stop,
        "notes": clip(", ".join(map(str, notes))),
        "error": "" if error is None else clip(error.code if told else f"{error.code}: {error.message}"),
    }


def _argument(value: JSON) -> str:
    """Return an argument as text: programs as they are, other values as JSON, which tells 5 from "5"."""
    return value if isinstance(value, str) and "\n" in value else json.dumps(plain(value), ensure_ascii=False)


def seconds(value: JSON) -> float | None:
    """Return a number of seconds, or None if the value is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _tokens(tokens: TokenRecord, clip: Clip) -> list[JSON]:
    """Return the runs of tokens: source, number, text or ids, mean log-probability of sampled tokens."""
    ledger, found = tokens.ledger, list[JSON]()
    ids, log_probs = ledger.ids, ledger.log_probs
    for number, span in enumerate(ledger.spans()):
        known = [p for p in log_probs[span.start : span.stop] if not math.isnan(p)]
        likely = sum(known) / len(known) if known and span.source == SAMPLED else None
        text = tokens.texts[number] if number < len(tokens.texts) else ""
        shown = text or " ".join(map(str, ids[span.start : span.stop]))
        found.append([span.source, span.stop - span.start, clip(shown), likely])
    return found


class _Numbers:
    """Numbers repeated strings in the order of their first occurrence."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.texts.setdefault(text[:_NAME_CHARS], len(self.texts))


def batch_row(batch: BatchTimeline) -> list[JSON]:
    """Return a row of the list of batches: number, run, time, duration, wait, trajectories, tokens."""
    return [
        batch.number,
        batch.run[:_NAME_CHARS],
        batch.time,
        max(0.0, batch.stop - batch.start),
        None if batch.waited is None else max(0.0, batch.stop - batch.waited),
        len(batch.rows),
        sum(row.tokens for row in batch.rows),
    ]


def batch_payload(batch: BatchTimeline, records: Mapping[str, int | None]) -> dict[str, JSON]:
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
    """Return spans in drawing order: by their start, with the tools of a turn before its calls."""
    return sorted(spans, key=lambda span: (span.start, -span.stop, span.cause == "tool"))


def _by_group(rows: Iterable[TimelineRow]) -> list[TimelineRow]:
    """Return rows group by group, ordered by the start of the group."""
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
