"""One row's turn: the message of the model, its calls, and the messages that carry their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.dispatch import Dispatcher, Session
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.dispatch.rendering import render
from torchrl_agentic.messages import (
    JSON,
    DispatchResult,
    Message,
    ParsedCall,
    ParseResult,
    ToolResult,
    Turn,
)
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.transforms import history as border


@dataclass(slots=True)
class RowTurn:
    """One row in one step.

    Attributes:
        row: Index in the flattened batch.
        session: Session of the trajectory.
        message: Last message of the conversation.
        parsed: Calls of the message, and its text without them.
        calls: Calls with ids that are unique in the trajectory.
        results: One result per call.
        rendered: Messages that carry the results.
    """

    row: int
    session: Session
    message: Message
    parsed: ParseResult
    calls: tuple[ParsedCall, ...] = ()
    results: Sequence[ToolResult] = ()
    rendered: Sequence[Mapping[str, JSON]] = ()

    @property
    def is_cut(self) -> bool:
        """True if the message was cut off by a bound, so that its calls do not run."""
        return self.message.role == "assistant" and self.message.finish == "length"


def run_turns(dispatcher: Dispatcher, turns: Sequence[RowTurn], states: Sequence[Any]) -> None:
    """Run the calls of several rows concurrently, and store calls and results in their turns.

    Args:
        dispatcher: Dispatcher of the sessions.
        turns: Turns with at least one call each.
        states: View of the row for each turn, for tools with `wants_state`.
    """
    for turn in turns:
        turn.calls = turn.session.begin_turn(turn.parsed.calls)

    batch = [(turn.session, turn.calls, state) for turn, state in zip(turns, states, strict=True)]
    for turn, results in zip(turns, run(dispatcher.run(batch)), strict=True):
        turn.results = results


def render_turn(
    parser: ToolCallParser, turn: RowTurn, tool_role: str, *, media: bool
) -> Sequence[Mapping[str, JSON]]:
    """Return the messages that carry the results of a turn; see `render`.

    Args:
        parser: The parser.
        turn: The turn.
        tool_role: Role of messages that the parser gives the role "tool".
        media: Whether images and videos become parts of the content.
    """
    where = turn.session.trajectory
    return render(parser, turn.calls, turn.results, trajectory=where, tool_role=tool_role, media=media)


def as_record(turn: RowTurn, conversation: border.Conversation, recorded: int) -> Turn:
    """Return the record of a turn.

    Args:
        turn: The turn.
        conversation: The conversation after the turn, [L].
        recorded: Number of its messages that earlier records contain.
    """
    before = len(conversation) - len(turn.rendered) - 1
    return Turn(
        turn.session.trajectory,
        turn.session.turn - 1,
        turn.message,
        DispatchResult(turn.parsed.text, turn.calls, tuple(turn.results)),
        tuple(Message(m["role"], m["content"], tool_call_id=m.get("tool_call_id")) for m in turn.rendered),
        tuple(message.read() for message in conversation.messages[recorded:before]),
        turn.parsed.notes,
        turn.row,
    )
