"""One row's turn: from what the model wrote to the messages that answer it, apart from running the calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrl_agentic.dispatch import Session
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
from torchrl_agentic.tokens.encoding import escaped_parts
from torchrl_agentic.tokens.media import filled, slotted
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
"""What may stand at the end of a message where an engine keeps the end-of-sequence token in the text."""


@dataclass(slots=True)
class RowTurn:
    """What becomes of one row in one step."""

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
    """Read the last message, and mend what the policy wrote: the messages from `known` to `written`.

    Turns of others that the model invented after its own are cut off; what transforms before us appended
    stays. So are end-of-sequence strings: the next prompt would have them twice.
    """
    messages = border.messages(conversation)
    if written > known + 1 and border.read_message(messages[known]).role == "assistant":
        messages = [*messages[: known + 1], *messages[written:]]
        conversation = border.conversation(messages)
    message = border.read_message(messages[-1])
    if isinstance(message.content, str):
        plain = without_eos(message.content, eos_strings)
        if plain is not message.content:
            message = replace(message, content=plain)
            conversation = border.conversation([*messages[:-1], border.with_content(messages[-1], plain)])
    return conversation, message


def without_eos(text: str, eos_strings: Sequence[str]) -> str:
    """Cut end-of-sequence strings, and white space between and after them, off the end of a text."""
    while True:
        trimmed = text.rstrip()
        ending = next((eos for eos in eos_strings if trimmed.endswith(eos)), None)
        if ending is None:
            return text
        text = trimmed.removesuffix(ending)


def parse(parser: ToolCallParser, message: Message, session: Session) -> ParseResult:
    """Read the calls of a message; one that was cut off has none. A parser that crashes costs one error."""
    if message.role != "assistant" or not message.is_complete:
        return ParseResult(message.text, (), message.text)
    response: Any = message.content
    if message.tool_calls or not isinstance(response, str):
        response = {"role": "assistant", "content": response, "tool_calls": list(message.tool_calls)}
    try:
        found = parser.parse(response, tools=session.dispatcher.schemas, turn=session.turn)
        if isinstance(found, ParseResult):
            return found
        return ParseResult(str(found.text), tuple(found.calls), response)
    except Exception as error:
        logger.exception("parser %r crashed (trajectory %s)", parser, session.trajectory)
        reason = CallError("parser_crash", f"the message could not be read ({type(error).__name__})")
        call = ParsedCall("", {}, f"call_{session.turn}_0", error=reason)
        return ParseResult(message.text, (call,), "")


def render(
    parser: ToolCallParser, turn: RowTurn, tool_role: str, *, media: bool = False
) -> Sequence[Mapping[str, JSON]]:
    """Write the results as messages. media: with their images and videos, where the parser writes text."""
    rendered: Sequence[Mapping[str, JSON]] | None = None
    if media:
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
    """Escape what would be a control token where a template leaves out the images between two texts."""
    content = message["content"]
    if not isinstance(content, list):
        return message
    return {**message, "content": escaped_parts(content, parser.control_escaper)}


def _messages(
    parser: ToolCallParser, turn: RowTurn, results: Sequence[ToolResult]
) -> Sequence[Mapping[str, JSON]]:
    """Write results as messages; where the parser cannot, as plain ones of the tool's role."""
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
    """Make the record of a turn; `recorded` messages of the conversation are in earlier ones."""
    before = border.length(conversation) - len(turn.rendered) - 1
    return Turn(
        turn.session.trajectory,
        turn.session.turn - 1,
        turn.message,
        DispatchResult(turn.parsed.text, turn.calls, tuple(turn.results)),
        tuple(Message(m["role"], m["content"], tool_call_id=m.get("tool_call_id")) for m in turn.rendered),
        tuple(map(border.read_message, border.messages(conversation)[recorded:before])),
        turn.parsed.notes,
        turn.row,
    )
