"""Render a record as blocks, each with a title and a text, and find the reasoning inside of messages."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchrl_agentic.messages import JSON, Message, ParsedCall, ToolResult, Turn
from torchrl_agentic.records import BadLine, Origin, TrajectoryRecord, plain_text
from torchrl_agentic.records.call_stats import UNREADABLE
from torchrl_agentic.tokens.ledger import BOUNDARY, PROMPT, SAMPLED, TokenSpan
from torchrl_agentic.viewer.text_wrap import Paint, Piece

_OPENER = re.compile(r"<(?:(?:seed:)?think(?:ing)?|reasoning)>|\[THINK\]")
_CLOSER = re.compile(r"</(?:(?:seed:)?think(?:ing)?|reasoning)>|\[/THINK\]")


class Thought(NamedTuple):
    """Reasoning inside of a message.

    Attributes:
        start: Index of its first character, tags included.
        stop: Index after its last character, tags included.
        text: The reasoning, without tags.
        is_closed: Whether it has a closing tag.
    """

    start: int
    stop: int
    text: str
    is_closed: bool


def thoughts(text: str) -> Iterator[Thought]:
    """Yield the texts between reasoning tags; a tag that is not closed ends with the message.

    If the prompt has opened the tag, the message only closes it, and its reasoning starts at its beginning.
    """
    closer, opener = _CLOSER.search(text), _OPENER.search(text)
    if closer is not None and (opener is None or closer.start() < opener.start()):
        yield Thought(0, closer.end(), text[: closer.start()], is_closed=True)
        opener = _OPENER.search(text, closer.end())
    while opener is not None:
        (start, begin), tag = opener.span(), opener[0]
        end = text.find(f"{tag[0]}/{tag[1:]}", begin)
        if end < 0:
            yield Thought(start, len(text), text[begin:], is_closed=False)
            return
        stop = end + len(tag) + 1
        yield Thought(start, stop, text[begin:end], is_closed=True)
        opener = _OPENER.search(text, stop)


MASK = r"<\|image_pad\|>|<\|imgpad\|>"
"""Regular expression of text that is shown as a star: image placeholders, repeated hundreds of times."""
ROLES = ("system", "user", "assistant", "tool", "input", "output")


@dataclass(frozen=True, slots=True)
class Block:
    """Part of a page: a title on its own line, and a text below it.

    Attributes:
        title: The title, in styled pieces.
        text: The text.
        style: Style of the text, and of the bar beside it.
        paints: Other styles for parts of the text.
        is_folded: Whether only the title is shown until it is unfolded.
        turn: Index of its turn, or -1.
    """

    title: tuple[Piece, ...] = ()
    text: str = ""
    style: str = ""
    paints: tuple[Paint, ...] = ()
    is_folded: bool = False
    turn: int = -1


def conversation(
    record: TrajectoryRecord, mask: re.Pattern[str], advantage: float | None = None
) -> list[Block]:
    """Return the blocks of a conversation: messages, calls and results, turn by turn.

    Args:
        record: The trajectory.
        mask: Regular expression of text that is shown as a star.
        advantage: Its advantage in its batch; None if unknown.
    """
    blocks = [_head(record, advantage)]
    for place, turn in enumerate(record.turns):
        reward = record.rewards[place] if place < len(record.rewards) else None
        found = [Block(_turn_title(turn, reward)), *_of_turn(turn)]
        blocks.extend(replace(block, turn=place) for block in found)
    return [masked(block, mask) for block in blocks]


def masked(block: Block, mask: re.Pattern[str]) -> Block:
    """Replace the text that matches a mask with a star.

    Args:
        block: The block.
        mask: Regular expression.
    """
    matches = [found.span() for found in mask.finditer(block.text) if found.group()]
    if not matches:
        return block

    def moved(edge: int) -> int:
        return edge - sum(max(0, min(stop, edge) - start - 1) for start, stop in matches if start < edge)

    paints = tuple((moved(start), moved(stop), style) for start, stop, style in block.paints)
    text = mask.sub(lambda found: "*" if found.group() else "", block.text)
    return replace(block, text=text, paints=paints)


def number(value: float | None) -> str:
    """Write a score."""
    return "–" if value is None else f"{value:.4g}"


def seconds(value: float) -> str:
    """Write a duration."""
    return f"{value:.2f} s" if abs(value) >= 1 else f"{1000 * value:.1f} ms"


def _head(record: TrajectoryRecord, advantage: float | None) -> Block:
    summary = record.summary
    errors = [f"{count} {status}" for status, count in summary.statuses.items() if status != "ok"]
    calls = plural(summary.n_calls, "call") + (f" ({', '.join(errors)})" if errors else "")
    facts = [
        f"step {record.step}",
        f"score {number(record.score)}",
        *([] if advantage is None else [f"advantage {advantage:+.3g}"]),
        record.termination_reason or "unknown termination reason",
        plural(summary.n_turns, "turn"),
        calls,
        *([plural(record.redactions, "redaction")] if record.redactions else []),
        record.request_id,
        *([f"run {record.run}"] if record.run else []),
    ]
    return Block(((record.trajectory or "trajectory", "name"), (" · " + " · ".join(facts), "faint")))


def plural(count: int, noun: str) -> str:
    """Write a count with its noun.

    Args:
        count: The count.
        noun: The noun in singular.
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _turn_title(turn: Turn, reward: float | None) -> tuple[Piece, ...]:
    reward_text = f" · reward {number(reward)}" if reward is not None else ""
    notes = f" · {', '.join(turn.notes)}" if turn.notes else ""
    return ((f"── turn {turn.index}{reward_text}{notes} ", "rule"),)


def _of_turn(turn: Turn) -> Iterator[Block]:
    outcome = turn.outcome
    for message in turn.context:
        yield from _message(message, ())
    yield from _message(turn.message, outcome.calls)
    answers = {call.call_id: result.text for call, result in zip(outcome.calls, outcome.results, strict=True)}
    for call, result in zip(outcome.calls, outcome.results, strict=True):
        yield from _call(call, result)
    for message in turn.messages:
        if message.tool_call_id is None or answers.get(message.tool_call_id) != message.text:
            yield from _message(message, ())


def _message(message: Message, calls: Sequence[ParsedCall]) -> Iterator[Block]:
    """Yield the blocks of a message, with folded reasoning and faint calls."""
    role, text = message.role, message.text
    style = role if role in ROLES else "other"
    cut = " · cut off" if message.finish == "length" else ""
    to = f" · answers {message.tool_call_id}" if message.tool_call_id is not None else ""
    title = ((f"{role}{cut}{to}", f"{style} title"),)
    spans = [(*call.span, "faint") for call in calls if call.span is not None]
    begin = 0
    if message.reasoning:
        label = ((f"{role} thinks · {len(message.reasoning):,} characters", "think title"),)
        yield Block(label, message.reasoning, "think", is_folded=True)
    if message.refusal:
        yield Block(((f"{role} refuses", "error title"),), message.refusal, "error")
    for thought in thoughts(text) if role in ("assistant", "output") else ():
        yield from _said(text, title, style, spans, begin, thought.start)
        if not thought.is_closed:  # reasoning without an end stops at the next call
            starts = [start for start, _, _ in spans if start > thought.start]
            thought = thought._replace(stop=min([thought.stop, *starts]))
        whole = text[thought.start : thought.stop]
        closed = "" if thought.is_closed else ", not closed"
        label = ((f"{role} thinks · {len(whole):,} characters{closed}", "think title"),)
        yield Block(label, whole, "think", is_folded=True)
        begin = thought.stop
    yield from _said(text, title, style, spans, begin, len(text))
    if begin == 0 and not text:
        yield Block(title)


def _said(
    text: str, title: tuple[Piece, ...], style: str, spans: Sequence[Paint], start: int, stop: int
) -> Iterator[Block]:
    start += len(text[start:stop]) - len(text[start:stop].lstrip("\n")) if start else 0
    if text[start:stop].strip():
        paints = [
            (max(begin, start) - start, min(end, stop) - start, name)
            for begin, end, name in spans
            if begin < stop and end > start
        ]
        yield Block(title, text[start:stop], style, tuple(paints))


def _call(call: ParsedCall, result: ToolResult) -> Iterator[Block]:
    """Yield the blocks of a call and of its result."""
    status = str(result.status)
    style = "error" if result.is_error else "call"
    timing = result.timing
    facts = [
        *([] if timing is None else [f"queued {seconds(timing.queue_s)}", f"ran {seconds(timing.run_s)}"]),
        call.call_id,
        *([] if result.reward is None else [f"reward {number(result.reward)}"]),
        *([] if call.error is None else [call.error.code]),
        *(["stops"] if result.stop else []),
        *call.notes,
        *result.notes,
    ]
    mark = "✗" if result.is_error else "✓"
    title: tuple[Piece, ...] = (
        (f"{mark} {call.tool or UNREADABLE}", f"{style} title"),
        (f" · {status}", f"{style} title"),
        (" · " + " · ".join(facts), "faint"),
    )
    arguments, paints = _arguments(call.args)
    why = "" if call.error is None or call.error.message in result.text else call.error.message
    yield Block(title, "\n".join(part for part in (arguments, why) if part), style, paints)
    metrics = "" if not result.metrics else f" · {json.dumps(result.metrics, ensure_ascii=False)}"
    yield Block((("result" + metrics, "faint"),), result.text, "error" if result.is_error else "result")


def _arguments(args: Mapping[str, JSON]) -> tuple[str, tuple[Paint, ...]]:
    """Return arguments as text in which code stays readable, with their names painted."""
    text = ""
    paints: list[Paint] = []
    for name, value in args.items():
        text += "\n" if text else ""
        paints.append((len(text), len(text) + len(name), "key"))
        said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text += f"{name}:{chr(10) if chr(10) in said else ' '}{said}"
    return text, tuple(paints)


def bad_line(line: BadLine, beginning: str) -> list[Block]:
    """Return the blocks of a line that cannot be read.

    Args:
        line: The line.
        beginning: Its first characters.
    """
    title = ((f"Line {line.number} of the file cannot be read.", "error title"),)
    return [
        Block(title, line.reason, "error"),
        Block((("The line begins with:", "faint"),), beginning, "faint"),
    ]


def fields_of(record: TrajectoryRecord) -> dict[str, JSON]:
    """Return the fields by name, with the extras; input and output as in verl's dumps."""
    summary = record.summary
    begin = len(record.prompt)
    messages = tuple(record.messages)
    started = record.started
    return {
        "request_id": record.request_id,
        "trajectory": record.trajectory,
        "run": record.run or None,
        "step": record.step,
        "row": record.row,
        "group": summary.group,
        **_origin(record.origin),
        "score": record.score,
        "rewards": list(record.rewards),
        "termination_reason": record.termination_reason,
        "started": None if started is None else _time(started),
        "statuses": dict(summary.statuses),
        "tools": dict(summary.tools),
        "redactions": record.redactions,
        "gts": record.gts,
        **record.extras,
        "input": plain_text(messages[:begin]),
        "output": plain_text(messages[begin:]),
        "versions": dict(record.versions),
    }


def _origin(origin: Origin) -> dict[str, JSON]:
    """Return the known fields of the origin of a trajectory."""
    known = {
        "task": origin.task or None,
        "group in collector": origin.group,
        "index in group": origin.index,
        "policy_versions": list(origin.policy_versions) or None,
        "seconds": origin.seconds,
    }
    return {name: value for name, value in known.items() if value is not None}


def table(record: TrajectoryRecord, mask: re.Pattern[str], chosen: str | None = None) -> list[Block]:
    """Return the blocks of all fields.

    Args:
        record: The trajectory.
        mask: Regular expression of text that is shown as a star.
        chosen: Name of the only field to show; None for all.
    """
    found = fields_of(record)
    return [
        masked(field(name, value), mask) for name, value in found.items() if chosen is None or name == chosen
    ] or [Block(((f"This trajectory has no {chosen}.", "faint"),))]


def beginning(fields: Mapping[str, JSON], size: int) -> list[Block]:
    """Return the blocks of a trajectory of which only the first bytes were read.

    Args:
        fields: The known fields.
        size: Size of the whole trajectory, in bytes.
    """
    text = f"This trajectory has {size / 1e6:,.1f} MB. This is its beginning; L loads all of it."
    return [Block((), text, "error"), *(field(name, value) for name, value in fields.items())]


def field(name: str, value: JSON) -> Block:
    """Return the block of a field: its name and value, on one line if there is room.

    Args:
        name: Name of the field.
        value: Its value.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= 60 and "\n" not in text:
        return Block((), f"{name:<18} {text}", "value", ((0, len(name), "key"),))
    if not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False, indent=1, default=str)
    return Block(((name, "key"),), text, "value")


def _time(started: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(started, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f UTC")
    except (ValueError, OverflowError, OSError):
        return str(started)


def tokens(record: TrajectoryRecord, mask: re.Pattern[str]) -> list[Block]:
    """Return a block for each run of tokens from one source, with its text, or else its ids.

    Args:
        record: The trajectory.
        mask: Regular expression of text that is shown as a star.
    """
    kept = record.tokens
    if kept is None:
        return [Block((("The tokens of this trajectory were not recorded.", "faint"),))]
    ledger = kept.ledger
    sampled = sum(ledger.mask)
    share = f"{sampled / len(ledger):.0%}" if len(ledger) else "–"
    head = Block(
        (
            (f"{len(ledger):,} tokens, {sampled:,} of them sampled ({share}) · ", "name"),
            (" sampled ", "token sampled"),
            (" prompt ", "token prompt"),
            (" boundary ", "token boundary"),
            (" call ", "token call"),
        )
    )
    names = [call.tool for _, call, _ in record.calls]
    ids, log_probs = ledger.ids, ledger.log_probs
    spans = list(ledger.spans())
    known = len(kept.texts) == len(spans)
    blocks = [head]
    for place, span in enumerate(spans):
        text = kept.texts[place] if known else " ".join(map(str, ids[span.start : span.stop]))
        tool = f" ({names[span.source]})" if 0 <= span.source < len(names) else ""
        size = span.stop - span.start
        title = f"{span.name}{tool} · {size:,} token{'s' if size > 1 else ''} [{span.start}, {span.stop})"
        mask_bit = f" · mask {int(span.source == SAMPLED)}"
        said = title + mask_bit + _likelihood(log_probs[span.start : span.stop])
        blocks.append(Block(((said, f"{_style(span)} title"),), text, _style(span)))
    return [masked(block, mask) for block in blocks]


def _likelihood(log_probs: Sequence[float]) -> str:
    known = [value for value in log_probs if not math.isnan(value)]
    if not known:
        return ""
    return f" · log-prob mean {sum(known) / len(known):.3f}, min {min(known):.3f}"


def _style(span: TokenSpan) -> str:
    return {SAMPLED: "token sampled", PROMPT: "token prompt", BOUNDARY: "token boundary"}.get(
        span.source, "token call"
    )
