"""One row's turn: read the message of the model, run its calls, write the results as messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torchrl_agentic.dispatch import Dispatcher, Session
from torchrl_agentic.dispatch.event_loop import run
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

logger = logging.getLogger(__name__)


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


def run_turns(dispatcher: Dispatcher, turns: Sequence[RowTurn], states: Sequence[Any]) -> None:
    """Run the calls of several rows concurrently, and store calls and results in their turns.

    Sessions in which a tool asked for the end of the trajectory are closed before this returns.

    Args:
        dispatcher: Dispatcher of the sessions.
        turns: Turns with at least one call each.
        states: View of the row for each turn, for tools with `wants_state`.
    """
    for turn in turns:
        turn.calls = turn.session.begin_turn(turn.parsed.calls)

    async def run_all() -> list[list[ToolResult]]:
        batch = [(turn.session, turn.calls, state) for turn, state in zip(turns, states, strict=True)]
        results = await dispatcher.run(batch)
        over = [
            turn.session
            for turn, found in zip(turns, results, strict=True)
            if any(result.stop for result in found)
        ]
        await asyncio.gather(*(session.close() for session in over))
        return results

    for turn, results in zip(turns, run(run_all()), strict=True):
        turn.results = results


def render(
    parser: ToolCallParser, turn: RowTurn, tool_role: str, *, media: bool = False
) -> Sequence[Mapping[str, JSON]]:
    """Return the messages that carry the results of a turn.

    Args:
        parser: The parser.
        turn: The turn.
        tool_role: Role of messages that the parser gives the role "tool".
        media: Whether images and videos become parts of the content although the parser writes text.
    """
    rendered: Sequence[Mapping[str, JSON]] | None = None
    if media:
        from torchrl_agentic.tokens.media import filled, slotted  # it opens images

        results, slots = slotted(turn.results)
        if slots:
            rendered = filled(_messages(parser, turn, results), slots)
            if rendered is not None:
                rendered = [_with_escaped_parts(message, parser) for message in rendered]
    if rendered is None:
        rendered = _messages(parser, turn, turn.results)
    if tool_role == "tool":
        return rendered
    return [{**message, "role": tool_role} if message["role"] == "tool" else message for message in rendered]


def _with_escaped_parts(message: Mapping[str, JSON], parser: ToolCallParser) -> Mapping[str, JSON]:
    """Escape control tokens that would appear if a template drops the images between two texts."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    parts = cast("list[Mapping[str, JSON]]", content)
    from torchrl_agentic.tokens.encoding import escaped_parts  # only media needs it

    return {**message, "content": escaped_parts(parts, parser.control_escaper)}


def _messages(
    parser: ToolCallParser, turn: RowTurn, results: Sequence[ToolResult]
) -> Sequence[Mapping[str, JSON]]:
    """Render results by the parser; if it raises, as plain messages of the role "tool"."""
    try:
        rendered = parser.render(turn.calls, results)
        if any(not isinstance(message["role"], str) or "content" not in message for message in rendered):
            raise TypeError("a message has a role and a content")
    except Exception:
        logger.exception("parser %r cannot render (trajectory %s)", parser, turn.session.trajectory)
        escape = parser.control_escaper.escape
        rendered = [
            {"role": "tool", "content": escape(result.text), "tool_call_id": escape(call.call_id)}
            for call, result in zip(turn.calls, results, strict=True)
        ]
    return rendered


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
