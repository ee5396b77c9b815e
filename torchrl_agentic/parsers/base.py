"""What every parser is: from one message to its calls, and from results back to messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchrl_agentic.messages import JSON, CallError, ParsedCall, ParseResult, ToolResult, claim_id, encodable

MAX_CALLS = 256
"""How many calls of one message are read; the others are error entries. Reading an error costs time too."""
EXCERPT = 40
"""How many characters of the model's text an error message quotes."""


class ToolCallParser(ABC):
    """The format in which a family of models calls tools. It has no state; one object serves everybody.

    name: how it is registered. stop: strings after which a model that waits for results must stop.

    Promises, which `testing.ParserContract` checks: `parse` never raises on what a model writes, gives one
    entry per attempt in the order written, loses no byte (`text` and the spans of the calls make up `raw`),
    and gives the same ids for the same text. `parse(render_call(call))` gives the call back. A message may be
    a mapping, whose content is text, None or a list of parts (`messages.content_text` reads all three). Of
    more than `MAX_CALLS` calls the others are error entries with the code "over_limit".

    `parsers.text.TextParser` does most of it for formats with an opener: subclass that one if you can.
    """

    name: ClassVar[str] = ""
    stop: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parse(self, response: str | Mapping[str, JSON], *, turn: int = 0) -> ParseResult:
        """Read one assistant message: its text, or a mapping as API servers and chat histories have it.

        turn: goes into the ids of calls that bring none, `call_{turn}_{index}`.
        """

    @abstractmethod
    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the model would, for few-shot prompts, scripted policies and tests."""

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a message: role, content, and whatever else the family needs."""
        return {"role": "tool", "content": result.text, "tool_call_id": call_id}

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write all results of a turn, in the order of the calls.

        Overridden where one message holds them all.
        """
        return [self.render_result(call.call_id, result) for call, result in zip(calls, results, strict=True)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(type(self))


@dataclass(slots=True)
class Attempt:
    """What a format found at one place of a message, before it has an id; still being written."""

    tool: str = ""
    args: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    error: CallError | None = None
    call_id: str | None = None
    tag: str | None = None
    span: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()


class Unreadable(ValueError):
    """An attempt cannot be read. at: where in the text it broke, in characters."""

    def __init__(self, code: str, reason: str, at: int | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.at = at


def number(attempts: Sequence[Attempt], turn: int) -> tuple[ParsedCall, ...]:
    """Give the attempts of a message ids: the model's own, or `call_{turn}_{index}`, no two the same."""
    taken: set[str] = set()
    calls: list[ParsedCall] = []
    for index, attempt in enumerate(attempts):
        wanted = attempt.call_id or f"call_{turn}_{index}"
        call_id = claim_id(wanted, taken)
        notes = attempt.notes if call_id == wanted else (*attempt.notes, "duplicate_id")
        error, span = attempt.error, attempt.span
        call = ParsedCall(
            attempt.tool, attempt.args, call_id, attempt.tag, error, index=index, span=span, notes=notes
        )
        calls.append(call)
    return tuple(calls)


def explain(index: int, error: Unreadable, text: str, shape: str) -> CallError:
    """Tell the model what was read, where it broke, and what a right call looks like."""
    where = ""
    if error.at is not None:
        where = f" at character {error.at}"
        if excerpt := text[error.at : error.at + EXCERPT]:
            where += f", near {encodable(excerpt)!r}"
    return CallError(error.code, f"call {index + 1} was not run: {error}{where}. Send it again as {shape}")


def over_limit(index: int) -> CallError:
    """Tell the model that it wrote too many calls."""
    return CallError("over_limit", f"call {index + 1} was not run: at most {MAX_CALLS} calls per message")
