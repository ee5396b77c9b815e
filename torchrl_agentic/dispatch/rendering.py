"""Write the results of a turn as messages of the conversation, in the format of the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.base import escaped_call, with_tool_names

logger = logging.getLogger(__name__)


def render(
    parser: ToolCallParser,
    calls: Sequence[ParsedCall],
    results: Sequence[ToolResult],
    *,
    trajectory: str,
    tool_role: str = "tool",
    media: bool = False,
) -> Sequence[Mapping[str, JSON]]:
    """Return the messages that carry the results of a turn.

    Args:
        parser: The parser.
        calls: Calls of the turn, with ids that are unique in the trajectory.
        results: One result per call.
        trajectory: Name of the trajectory, for log lines.
        tool_role: Role of messages that the parser gives the role "tool".
        media: Whether images and videos become parts of the content although the parser writes text.
    """
    rendered: Sequence[Mapping[str, JSON]] | None = None
    if media:
        from torchrl_agentic.tokens.media import filled, slotted  # it opens images

        texts, slots = slotted(results)
        if slots:
            rendered = filled(_messages(parser, calls, texts, trajectory), slots)
            if rendered is not None:
                rendered = [_with_escaped_parts(message, parser) for message in rendered]
    if rendered is None:
        rendered = _messages(parser, calls, results, trajectory)
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
    parser: ToolCallParser, calls: Sequence[ParsedCall], results: Sequence[ToolResult], trajectory: str
) -> Sequence[Mapping[str, JSON]]:
    """Render results by the parser; if it raises, as plain messages of the role "tool"."""
    try:
        rendered = parser.render(calls, results)
        if any(not isinstance(message["role"], str) or "content" not in message for message in rendered):
            raise TypeError("a message has a role and a content")
    except Exception:
        logger.exception("parser %r cannot render (trajectory %s)", parser, trajectory)
        escape = parser.control_escaper.escape
        named = [escaped_call(call, escape) for call in calls]
        rendered = with_tool_names(
            [
                {"role": "tool", "content": escape(result.text), "tool_call_id": call.call_id}
                for call, result in zip(named, results, strict=True)
            ],
            named,
        )
    return rendered
