"""Calls while they are being read, the errors of malformed ones, and the ids they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrl_agentic.messages import JSON, CallError, ParsedCall, claim_id
from torchrl_agentic.text import one_line

REASON = 160
EXCERPT = 40
"""Maximum lengths of the reason and of the quoted text in an error message, in characters."""


@dataclass(slots=True)
class PartialCall:
    """A call, malformed or not, before it has an id; fields are filled in while it is read.

    Attributes:
        tool: Name of the tool, "" if it could not be read.
        args: Arguments of the call.
        error: Why the call cannot run, or None.
        call_id: Id that the model wrote, or None.
        tag: Tag that the model wrote, in formats with tags.
        span: Start and end in the text of the message, in characters.
        notes: Deviations from the format that were accepted.
    """

    tool: str = ""
    args: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    error: CallError | None = None
    call_id: str | None = None
    tag: str | None = None
    span: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()

    def parsed(self, index: int) -> ParsedCall:
        """Return the finished call, once it has an id.

        Args:
            index: Its index in the message.
        """
        assert self.call_id is not None
        return ParsedCall(
            self.tool,
            self.args,
            self.call_id,
            self.tag,
            self.error,
            index=index,
            span=self.span,
            notes=self.notes,
        )


class CallParseError(ValueError):
    """A call is malformed.

    Args:
        code: Code for `CallError.code`.
        reason: Reason, for the model to read.
        at: Index in the text where reading failed, in characters; None if unknown.
        end: Index where the malformed call ends; None to search for it.
        tool: Name of the tool if it was read.
        call_id: Id of the call if it was read.
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
    """Ids of one message's calls: the model's own or `call_{turn}_{index}`, without duplicates.

    Args:
        turn: Number of the turn.
    """

    __slots__ = ("_taken", "_turn")

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._taken: dict[str, int] = {}

    def assign(self, attempt: PartialCall, index: int) -> None:
        """Set the id of a call.

        Args:
            attempt: The call that was read; a duplicate id is replaced and noted.
            index: Its index in the message.
        """
        wanted = attempt.call_id or f"call_{self._turn}_{index}"
        attempt.call_id = claim_id(wanted, self._taken)
        if attempt.call_id != wanted:
            attempt.notes = (*attempt.notes, "duplicate_id")


def assign_ids(attempts: Sequence[PartialCall], turn: int) -> tuple[ParsedCall, ...]:
    """Return the calls of a message with their ids.

    Args:
        attempts: Calls in the order written.
        turn: Number of the turn, for ids of calls that have none.
    """
    ids = CallIds(turn)
    for index, attempt in enumerate(attempts):
        ids.assign(attempt, index)
    return tuple(attempt.parsed(index) for index, attempt in enumerate(attempts))


def call_error(index: int, error: CallParseError, text: str, shape: str, end: int | None = None) -> CallError:
    """Return the error message for the model: the reason, the place, and a correct call as example.

    Args:
        index: Index of the call in its message.
        error: What is wrong.
        text: Text of the message, to quote the place from.
        shape: A correct call of the format.
        end: Index where the malformed call ends; text after it is not quoted.
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
    """Return the error of a call beyond the limit on calls per message.

    Args:
        index: Index of the call in its message.
        limit: The limit.
    """
    return CallError("over_limit", f"call {index + 1} was not run: at most {limit} calls per message")


def in_reasoning_error(index: int) -> CallError:
    """Return the error of a call that the model wrote inside its reasoning."""
    reason = "it is inside your reasoning. Send it again after your reasoning"
    return CallError("call_in_reasoning", f"call {index + 1} was not run: {reason}")
