"""Attempts to call, as they are read: what was found, why it cannot be read, and the ids they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrl_agentic.messages import JSON, CallError, ParsedCall, claim_id
from torchrl_agentic.text import one_line

REASON = 160
EXCERPT = 40
"""How many characters of the model's text an error message quotes."""


@dataclass(slots=True)
class PartialCall:
    """What a format found at one place of a message, before it has an id; still being written."""

    tool: str = ""
    args: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    error: CallError | None = None
    call_id: str | None = None
    tag: str | None = None
    span: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()


class CallParseError(ValueError):
    """An attempt cannot be read.

    at: where in the text it broke, in characters. end: where the attempt ends, if that is known. tool,
    call_id: as far as they could be read.
    """

    def __init__(
        self,
        code: str,
        reason: str,
        at: int | None = None,
        *,
        end: int | None = None,
        tool: str = "",
        call_id: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.at = at
        self.end = end
        self.tool = tool
        self.call_id = call_id


class CallIds:
    """The ids of one message's calls: the model's own, or `call_{turn}_{index}`, no two the same."""

    __slots__ = ("_taken", "_turn")

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._taken: dict[str, int] = {}

    def call(self, attempt: PartialCall, index: int) -> ParsedCall:
        """Give an attempt, the `index`th of its message, its id."""
        wanted = attempt.call_id or f"call_{self._turn}_{index}"
        call_id, notes = claim_id(wanted, self._taken), attempt.notes
        if call_id != wanted:
            notes = (*notes, "duplicate_id")
        return ParsedCall(
            attempt.tool,
            attempt.args,
            call_id,
            attempt.tag,
            attempt.error,
            index=index,
            span=attempt.span,
            notes=notes,
        )


def assign_ids(attempts: Sequence[PartialCall], turn: int) -> tuple[ParsedCall, ...]:
    """Give the attempts of a message their ids."""
    numbering = CallIds(turn)
    return tuple(numbering.call(attempt, index) for index, attempt in enumerate(attempts))


def call_error(index: int, error: CallParseError, text: str, shape: str, end: int | None = None) -> CallError:
    """Tell the model what was read, where it broke, and what a right call looks like.

    end: where the attempt ends in the text; nothing behind it is quoted.
    """
    where = ""
    if error.at is not None:
        where = f" at character {error.at}"
        stop = error.at + EXCERPT if end is None else min(end, error.at + EXCERPT)
        if excerpt := text[error.at : stop]:
            where += f", near {_quoted(excerpt)}"
    reason = one_line(str(error), REASON)
    return CallError(error.code, f"call {index + 1} was not run: {reason}{where}. Send it again as {shape}")


def _quoted(excerpt: str) -> str:
    return f'"{one_line(excerpt, 2 * EXCERPT - 2)}"'


def over_limit_error(index: int, limit: int) -> CallError:
    """Tell the model that it wrote too many calls."""
    return CallError("over_limit", f"call {index + 1} was not run: at most {limit} calls per message")


def in_reasoning_error(index: int) -> CallError:
    """Tell the model that it called a tool while it was thinking."""
    reason = "it stands in your reasoning. Send it again behind it"
    return CallError("call_in_reasoning", f"call {index + 1} was not run: {reason}")
