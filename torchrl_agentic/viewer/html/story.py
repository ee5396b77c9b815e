"""What happened in a trajectory, in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torchrl_agentic.messages import JSON, ParsedCall, Status, ToolResult, Turn
from torchrl_agentic.records import TrajectoryRecord
from torchrl_agentic.viewer.html.said import said_text
from torchrl_agentic.viewer.html.words import REASON_WORDS, STATUS_WORDS

_MOST_CALLS = 12
_QUOTED_CHARS, _QUOTED_LINES = 160, 2
_LONGEST_ANSWER = 10_000


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that happened.

    call: its number, counted through the trajectory from 0; the text then follows the words "Call 1". quote:
    the beginning and the end of its result.
    """

    tone: Literal["good", "bad", "plain"]
    text: str
    call: int | None = None
    quote: str = ""


def story(record: TrajectoryRecord) -> list[Line]:
    """Tell how a trajectory ended, whether its answer is the right one, and which calls failed."""
    return [*_ending(record), *_answer(record), *_cut_off(record.turns), *_calls(record)]


def final_answer(record: TrajectoryRecord) -> str:
    """Give what the model said last, without its thoughts and calls."""
    return said_text(record.turns[-1]).strip() if record.turns else ""


def _ending(record: TrajectoryRecord) -> Iterator[Line]:
    reason, turns = record.termination_reason, _count(len(record.turns), "turn")
    if not reason:
        yield Line("plain", f"It has {turns}. The dump does not say why it ended.")
    elif reason in REASON_WORDS:
        tone = "bad" if reason in ("max_turns", "truncated", "reset", "closed") else "plain"
        yield Line(tone, f"It ended after {turns}, because {REASON_WORDS[reason]}.")
    else:
        yield Line("plain", f"It ended after {turns}. The reason given is: {reason}")


def _answer(record: TrajectoryRecord) -> Iterator[Line]:
    found = contains(final_answer(record), record.gts)
    if found is not None:
        tone, verb = ("good", "stands") if found else ("bad", "does not stand")
        yield Line(tone, f"The right answer {verb} in the last message of the model.")


def contains(text: str, wanted: JSON) -> bool | None:
    """Whether an answer stands in a text, by itself; None: it is no text or number that one could look for.

    Case, white space and the commas of long numbers do not count.
    """
    if isinstance(wanted, bool) or not isinstance(wanted, str | int | float):
        return None
    if not 0 < len(str(wanted).strip()) <= _LONGEST_ANSWER:
        return None
    pattern = rf"(?<!\w)(?<!\d\.){re.escape(_normal(str(wanted)))}(?!\w)(?!\.\d)"
    return re.search(pattern, _normal(text)) is not None


def _normal(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", " ".join(text.casefold().split()))


def _cut_off(turns: Sequence[Turn]) -> Iterator[Line]:
    for turn in turns:
        if not turn.message.is_complete:
            yield Line(
                "bad",
                f"The message of the model in turn {turn.index + 1} was cut off before its end. "
                "Calls in such a message are not run.",
            )


def _calls(record: TrajectoryRecord) -> Iterator[Line]:
    calls = list(record.calls)
    failed = [(n, *call) for n, call in enumerate(calls) if call[2].status is not Status.OK]
    if not calls:
        yield Line("plain", "The model called no tool.")
    elif not failed:
        yield Line("good", f"It made {_count(len(calls), 'call')}, and the tools answered all of them.")
    else:
        yield Line("bad", f"It made {_count(len(calls), 'call')}, of which {len(failed)} failed:")
    for number, turn, call, result in failed[:_MOST_CALLS]:
        mended = any(c.tool == call.tool and r.status is Status.OK for _, c, r in calls[number + 1 :])
        yield _failed(number, turn, call, result, mended=mended)
    if len(failed) > _MOST_CALLS:
        yield Line("bad", f"… and {len(failed) - _MOST_CALLS} more.")


def _failed(number: int, turn: Turn, call: ParsedCall, result: ToolResult, *, mended: bool) -> Line:
    assert result.status is not None
    short, long = STATUS_WORDS[result.status]
    name = f" of {call.tool}" if call.tool else ""
    text = f"{name}, in turn {turn.index + 1}: {short}. {long}"
    if mended and call.tool:
        text += " A later call of this tool was answered."
    return Line("bad", text, number, _quoted(result.text))


def _quoted(text: str) -> str:
    """Give the first and the last lines: tools say what went wrong in the first, programs in the last."""
    lines = [line[:_QUOTED_CHARS] for line in text.strip().splitlines() if line.strip()]
    if len(lines) > 2 * _QUOTED_LINES + 1:
        lines[_QUOTED_LINES:-_QUOTED_LINES] = ["…"]
    return "\n".join(lines)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
