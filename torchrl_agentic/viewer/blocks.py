"""A trajectory as blocks, the pieces that a page is made of: messages, reasoning, calls, results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchrl_agentic.messages import JSON, Message, ParsedCall, ToolResult, Turn
from torchrl_agentic.records import BadLine, TrajectoryRecord
from torchrl_agentic.records.calls import UNREADABLE
from torchrl_agentic.viewer.thoughts import thoughts
from torchrl_agentic.viewer.wrap import Paint, Piece

MASK = r"<\|image_pad\|>|<\|imgpad\|>"
"""What is shown as a star: what a picture is in a prompt, hundreds of times in a row."""
ROLES = ("system", "user", "assistant", "tool", "input", "output")


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a page: a title on a line of its own, and a text below it.

    style: of the text, and of the bar beside it. paints: parts of the text in other styles. is_folded: only
    the title is shown until it is unfolded. turn: to which it belongs; -1: to none.
    """

    title: tuple[Piece, ...] = ()
    text: str = ""
    style: str = ""
    paints: tuple[Paint, ...] = ()
    is_folded: bool = False
    turn: int = -1


def conversation(record: TrajectoryRecord, mask: re.Pattern[str]) -> list[Block]:
    """Show what was said, called and answered, turn by turn."""
    blocks = [_head(record)]
    for place, turn in enumerate(record.turns):
        reward = record.rewards[place] if place < len(record.rewards) else None
        found = [Block(_turn_title(turn, reward)), *_of_turn(turn)]
        blocks.extend(replace(block, turn=place) for block in found)
    return [masked(block, mask) for block in blocks]


def masked(block: Block, mask: re.Pattern[str]) -> Block:
    """Show each match of the mask as a star."""
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


def _head(record: TrajectoryRecord) -> Block:
    summary = record.summary
    errors = [f"{count} {status}" for status, count in summary.statuses.items() if status != "ok"]
    calls = _plural(summary.n_calls, "call") + (f" ({', '.join(errors)})" if errors else "")
    facts = [
        f"step {record.step}",
        f"score {number(record.score)}",
        record.termination_reason or "no reason of its end is known",
        _plural(summary.n_turns, "turn"),
        calls,
        record.request_id,
    ]
    return Block(((record.trajectory or "trajectory", "name"), (" · " + " · ".join(facts), "faint")))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _turn_title(turn: Turn, reward: float | None) -> tuple[Piece, ...]:
    worth = f" · reward {number(reward)}" if reward is not None else ""
    notes = f" · {', '.join(turn.notes)}" if turn.notes else ""
    return ((f"── turn {turn.index}{worth}{notes} ", "rule"),)


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
    """Show a message, its reasoning folded; where its calls stand in it they are faint."""
    role, text = message.role, message.text
    style = role if role in ROLES else "other"
    cut = "" if message.is_complete else " · cut off"
    to = f" · answers {message.tool_call_id}" if message.tool_call_id is not None else ""
    title = ((f"{role}{cut}{to}", f"{style} title"),)
    spans = [(*call.span, "faint") for call in calls if call.span is not None]
    begin = 0
    for thought in thoughts(text) if role in ("assistant", "output") else ():
        yield from _said(text, title, style, spans, begin, thought.start)
        if not thought.is_closed:  # it ends with the next call
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
    """Show a call, then its result."""
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
    """Write arguments so that code among them is code, and paint their names."""
    text = ""
    paints: list[Paint] = []
    for name, value in args.items():
        text += "\n" if text else ""
        paints.append((len(text), len(text) + len(name), "key"))
        said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text += f"{name}:{chr(10) if chr(10) in said else ' '}{said}"
    return text, tuple(paints)


def bad_line(line: BadLine, beginning: str) -> list[Block]:
    """Show a line that cannot be read."""
    title = ((f"Line {line.number} of the file cannot be read.", "error title"),)
    return [Block(title, line.reason, "error"), Block((("It begins so:", "faint"),), beginning, "faint")]
