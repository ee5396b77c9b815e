"""Summarize a trajectory in sentences for newcomers: its end, its answer and its failed calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchrl_agentic.messages import JSON, ParsedCall, Status, ToolResult, Turn
from torchrl_agentic.records import TrajectoryRecord
from torchrl_agentic.viewer.render_record import plural, thoughts

STATUS_WORDS: Mapping[Status, tuple[str, str]] = {
    Status.OK: ("answered", "The tool ran and returned a result."),
    Status.ERROR: (
        "the tool reported an error",
        "The tool ran and reported an error, such as a failed program or an invalid value.",
    ),
    Status.MALFORMED: (
        "the call could not be read",
        "The model tried to call a tool, but wrote an invalid call, such as broken JSON. No tool ran.",
    ),
    Status.UNKNOWN_TOOL: (
        "there is no such tool",
        "The model called a tool that is not available. No tool ran.",
    ),
    Status.INVALID_ARGS: (
        "the arguments do not fit",
        "An argument was missing, unknown, or of the wrong type. The tool did not run.",
    ),
    Status.TIMEOUT: (
        "it took too long",
        "The tool did not finish within the time limit of the call or the turn, and was stopped.",
    ),
    Status.CANCELLED: (
        "it was cancelled",
        "The call was cancelled before it finished.",
    ),
    Status.SKIPPED: (
        "it was skipped",
        "The call exceeded a budget, such as the number of calls. The tool did not run.",
    ),
    Status.CRASH: (
        "the tool crashed",
        "The tool has a bug. That is not a mistake of the model.",
    ),
    Status.INFRA: (
        "a service was not available",
        "A sandbox was lost, or a service failed. That is not a mistake of the model.",
    ),
}
"""Short and long explanation of each status."""

NOT_RUN = frozenset((Status.MALFORMED, Status.UNKNOWN_TOOL, Status.INVALID_ARGS, Status.SKIPPED))
"""Statuses of calls that did not run a tool."""

REASON_WORDS: Mapping[str, str] = {
    "stop_tool": "the model called the tool that ends the conversation",
    "no_calls": "the model answered without calling a tool, which counts as its final answer",
    "max_turns": "it reached the largest number of turns, perhaps before the task was done",
    "max_new_tokens": "the last answer was cut off at the largest number of tokens of an answer",
    "max_trajectory_tokens": "it reached the largest number of tokens, perhaps before the task was done",
    "user": "the simulated user ended the conversation",
    "user_failed": "the simulated user failed",
    "not_begun": "a tool could not open at its beginning",
    "refused": "the model, or the service that it runs in, refused to answer",
    "terminated": "the environment ended the task",
    "truncated": "the environment cut it off, for example because it became too long",
    "reset": "the environment was reset before the trajectory had ended",
    "closed": "the program closed the environment before the trajectory had ended",
}
"""Why a trajectory ended, in words that follow "because"."""


@dataclass(frozen=True, slots=True)
class MessagePiece:
    """Part of a message.

    Attributes:
        kind: Plain text, reasoning or a call.
        text: The text.
        call: Number of the call within the turn, or None.
    """

    kind: Literal["text", "thought", "call"]
    text: str
    call: int | None = None


def pieces(turn: Turn) -> Iterator[MessagePiece]:
    """Split the message of a turn into its pieces, which leave out only the tags around reasoning.

    Reasoning that is not closed ends with the next call or with the message. Reasoning that the prompt has
    opened starts with the message.
    """
    text, at = turn.message.text, 0
    if turn.message.reasoning:
        yield MessagePiece("thought", turn.message.reasoning)
    for number, call in enumerate(turn.outcome.calls):
        if call.span is None or not at <= call.span[0] < call.span[1] <= len(text):
            continue
        start, stop = call.span
        yield from _said(text[at:start])
        yield MessagePiece("call", text[start:stop], number)
        at = stop
    yield from _said(text[at:])


def said_text(turn: Turn) -> str:
    """Return the message of a turn without reasoning and calls."""
    return "".join(piece.text for piece in pieces(turn) if piece.kind == "text")


def _said(text: str) -> Iterator[MessagePiece]:
    at = 0
    for thought in thoughts(text):
        if at < thought.start:
            yield MessagePiece("text", text[at : thought.start])
        yield MessagePiece("thought", thought.text)
        at = thought.stop
    if at < len(text):
        yield MessagePiece("text", text[at:])


_MOST_CALLS = 12
_QUOTED_CHARS, _QUOTED_LINES = 160, 2
_LONGEST_ANSWER = 10_000


@dataclass(frozen=True, slots=True)
class SummaryLine:
    """A sentence about a trajectory.

    Attributes:
        tone: Whether it reports something good, bad or neither.
        text: The sentence; about a call, the text after the words "Call 1".
        call: Number of the call in the trajectory, from 0, or None.
        quote: Beginning and end of the result of the call.
    """

    tone: Literal["good", "bad", "plain"]
    text: str
    call: int | None = None
    quote: str = ""


def summary_lines(record: TrajectoryRecord) -> list[SummaryLine]:
    """Return how a trajectory ended, whether its answer is correct, which calls failed, and redactions."""
    return [
        *_ending(record),
        *_answer(record),
        *_cut_off(record.turns),
        *_calls(record),
        *_redactions(record.redactions),
    ]


def final_answer(record: TrajectoryRecord) -> str:
    """Return the last message of the model, without reasoning and calls."""
    return said_text(record.turns[-1]).strip() if record.turns else ""


def _ending(record: TrajectoryRecord) -> Iterator[SummaryLine]:
    reason, turns = record.termination_reason, plural(len(record.turns), "turn")
    if not reason:
        yield SummaryLine("plain", f"It has {turns}. Why it ended was not recorded.")
    elif reason in REASON_WORDS:
        tone = "plain" if reason in ("stop_tool", "no_calls", "user", "refused", "terminated") else "bad"
        yield SummaryLine(tone, f"It ended after {turns}, because {REASON_WORDS[reason]}.")
    else:
        yield SummaryLine("plain", f"It ended after {turns}. The recorded reason is: {reason}")


def _redactions(count: int) -> Iterator[SummaryLine]:
    if count:
        yield SummaryLine("plain", f"Secrets were removed from {plural(count, 'place')} as it was recorded.")


def _answer(record: TrajectoryRecord) -> Iterator[SummaryLine]:
    found = contains(final_answer(record), record.gts)
    if found is not None:
        tone, verb = ("good", "contains") if found else ("bad", "does not contain")
        yield SummaryLine(tone, f"The last message of the model {verb} the right answer.")


def contains(text: str, wanted: JSON) -> bool | None:
    """Return whether a text contains an answer as a separate word; None if the answer cannot be searched.

    Case, white space and thousands separators are ignored.

    Args:
        text: The text.
        wanted: The answer.
    """
    if isinstance(wanted, bool) or not isinstance(wanted, str | int | float):
        return None
    if not 0 < len(str(wanted).strip()) <= _LONGEST_ANSWER:
        return None
    pattern = rf"(?<!\w)(?<!\d\.){re.escape(_normal(str(wanted)))}(?!\w)(?!\.\d)"
    return re.search(pattern, _normal(text)) is not None


def _normal(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})", "", " ".join(text.casefold().split()))


def _cut_off(turns: Sequence[Turn]) -> Iterator[SummaryLine]:
    for turn in turns:
        if turn.message.finish == "length":
            yield SummaryLine(
                "bad",
                f"The message of the model in turn {turn.index + 1} was cut off. "
                "Calls in incomplete messages are not run.",
            )


def _calls(record: TrajectoryRecord) -> Iterator[SummaryLine]:
    calls = list(record.calls)
    failed = [(n, *call) for n, call in enumerate(calls) if call[2].status is not Status.OK]
    if not calls:
        yield SummaryLine("plain", "The model called no tool.")
    elif not failed:
        yield SummaryLine("good", f"It made {plural(len(calls), 'tool call')}, and all of them succeeded.")
    else:
        yield SummaryLine("bad", f"It made {plural(len(calls), 'tool call')}, of which {len(failed)} failed:")
    for number, turn, call, result in failed[:_MOST_CALLS]:
        mended = any(c.tool == call.tool and r.status is Status.OK for _, c, r in calls[number + 1 :])
        yield _failed(number, turn, call, result, mended=mended)
    if len(failed) > _MOST_CALLS:
        yield SummaryLine("bad", f"… and {len(failed) - _MOST_CALLS} more.")


def _failed(number: int, turn: Turn, call: ParsedCall, result: ToolResult, *, mended: bool) -> SummaryLine:
    assert result.status is not None
    short, long = STATUS_WORDS[result.status]
    name = f" of {call.tool}" if call.tool else ""
    text = f"{name}, in turn {turn.index + 1}: {short}. {long}"
    if mended and call.tool:
        text += " A later call of this tool succeeded."
    return SummaryLine("bad", text, number, _quoted(result.text))


def _quoted(text: str) -> str:
    """Return the first and the last lines: tools report errors in the first, programs in the last."""
    lines = [line[:_QUOTED_CHARS] for line in text.strip().splitlines() if line.strip()]
    if len(lines) > 2 * _QUOTED_LINES + 1:
        lines[_QUOTED_LINES:-_QUOTED_LINES] = ["…"]
    return "\n".join(lines)
