"""One row's turn: read the message of the model, run its calls, write the results as messages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torchrl_agentic.dispatch import Dispatcher, Session
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.messages import (
    JSON,
    CallError,
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

EOS_STRINGS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
)
"""Strings that are cut off the end of a message: engines may leave the end-of-sequence token in the text."""


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


def read_turn(
    conversation: border.Conversation, known: int, written: int, eos_strings: Sequence[str]
) -> tuple[border.Conversation, Message]:
    """Read the last message, and repair the messages that the policy wrote.

    Turns of other roles that the model invented after its own are removed, and end-of-sequence strings are
    cut off, because the next prompt would contain them twice. Messages that other transforms appended stay.

    Args:
        conversation: The conversation after the policy, [L].
        known: Number of messages in the prompt of the policy.
        written: Number of messages after the policy, before other transforms.
        eos_strings: Strings to cut off.

    Returns:
        The repaired conversation, and its last message.
    """
    messages = conversation.messages
    if written > known + 1 and messages[known].read().role == "assistant":
        messages = [*messages[: known + 1], *messages[written:]]
        conversation = border.Conversation.of(messages)
    message = messages[-1].read()
    if isinstance(message.content, str):
        plain = without_eos(message.content, eos_strings)
        if plain is not message.content:
            message = replace(message, content=plain)
            conversation = conversation.replaced(-1, {**messages[-1], "content": plain})
    return conversation, message


def without_eos(text: str, eos_strings: Sequence[str]) -> str:
    """Return a text without end-of-sequence strings, and white space around them, at its end.

    Args:
        text: Text of a message.
        eos_strings: Strings to cut off.
    """
    while True:
        trimmed = text.rstrip()
        ending = next((eos for eos in eos_strings if trimmed.endswith(eos)), None)
        if ending is None:
            return text
        text = trimmed.removesuffix(ending)


def parse(parser: ToolCallParser, message: Message, session: Session) -> ParseResult:
    """Read the calls of a message. An incomplete message has none; a parser that raises costs one error.

    Args:
        parser: The parser.
        message: A message of any role; only the assistant's can contain calls.
        session: Session of the trajectory, for the schemas of its tools and for log lines.
    """
    if message.role != "assistant" or not message.is_complete:
        return ParseResult(message.text, (), message.text)
    response: Any = message.content
    if message.tool_calls or not isinstance(response, str):
        response = {"role": "assistant", "content": response, "tool_calls": list(message.tool_calls)}
    try:
        # An adapted parser may return a result of its own class.
        found: Any = parser.parse(response, tools=session.dispatcher.schemas, turn=session.turn)
        if isinstance(found, ParseResult):
            return found
        return ParseResult(str(found.text), tuple(found.calls), response)
    except Exception as error:
        logger.exception("parser %r crashed (trajectory %s)", parser, session.trajectory)
        reason = CallError("parser_crash", f"the message could not be read ({type(error).__name__})")
        call = ParsedCall("", {}, f"call_{session.turn}_0", error=reason)
        return ParseResult(message.text, (call,), "")


def run_turns(dispatcher: Dispatcher, turns: Sequence[RowTurn], states: Sequence[Any]) -> None:
    """Run the calls of several rows concurrently, and store calls and results in their turns.

    Sessions in which a tool asked for the end of the trajectory are closed before this returns.

    Args:
        dispatcher: Dispatcher of the sessions.
        turns: Turns with at least one call each.
        states: View of the row for each turn, for tools with `wants_state`.
    """
    for turn in turns:
        turn.calls = turn.session.unique(turn.parsed.calls)

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
        media: Whether images and videos become parts of the content, if the parser writes text.
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
