"""Parsers of tool calls: one file per model family in `formats/`; `registry` maps names to parsers.

To add a parser, subclass `JSONBlockParser`, `TextParser` or another base from `engine/` in `formats/` and
give it a `format`, the description of its markers; add its name to the table in `registry`, and write a test
class that inherits `testing.ParserContract`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.parsers.auto import Mismatch, check_parser
    from torchrl_agentic.parsers.base import LIMITS, Limits, ToolCallParser, escape_control_tokens
    from torchrl_agentic.parsers.control_tokens import control_tokens_of
    from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat
    from torchrl_agentic.parsers.engine.text_format import TextFormat
    from torchrl_agentic.parsers.engine.text_parser import TextParser
    from torchrl_agentic.parsers.formats.api_messages import AnthropicToolUseParser, OpenAIToolCallParser
    from torchrl_agentic.parsers.formats.hermes import HermesParser
    from torchrl_agentic.parsers.formats.torchrl_json import JSONToolCallParser
    from torchrl_agentic.parsers.formats.xml import XMLToolCallParser
    from torchrl_agentic.parsers.prompt import tool_instructions, with_tools, with_tools_message
    from torchrl_agentic.parsers.registry import ALIASES, PARSERS, get_parser
    from torchrl_agentic.parsers.streaming import CallFailed, CallReady, Stream, TextDelta

__all__ = [
    "ALIASES",
    "LIMITS",
    "PARSERS",
    "AnthropicToolUseParser",
    "CallFailed",
    "CallReady",
    "HermesParser",
    "JSONBlockParser",
    "JSONFormat",
    "JSONToolCallParser",
    "Limits",
    "Mismatch",
    "OpenAIToolCallParser",
    "Stream",
    "TextDelta",
    "TextFormat",
    "TextParser",
    "ToolCallParser",
    "XMLToolCallParser",
    "check_parser",
    "control_tokens_of",
    "escape_control_tokens",
    "get_parser",
    "tool_instructions",
    "with_tools",
    "with_tools_message",
]

__getattr__ = load_lazily(
    __name__,
    {
        "auto": (
            "Mismatch",
            "check_parser",
        ),
        "base": (
            "LIMITS",
            "Limits",
            "ToolCallParser",
            "escape_control_tokens",
        ),
        "control_tokens": ("control_tokens_of",),
        "engine.json_blocks": ("JSONBlockParser", "JSONFormat"),
        "engine.text_format": ("TextFormat",),
        "engine.text_parser": ("TextParser",),
        "formats.api_messages": (
            "AnthropicToolUseParser",
            "OpenAIToolCallParser",
        ),
        "formats.hermes": ("HermesParser",),
        "formats.torchrl_json": ("JSONToolCallParser",),
        "formats.xml": ("XMLToolCallParser",),
        "prompt": (
            "tool_instructions",
            "with_tools",
            "with_tools_message",
        ),
        "registry": (
            "ALIASES",
            "PARSERS",
            "get_parser",
        ),
        "streaming": (
            "CallFailed",
            "CallReady",
            "Stream",
            "TextDelta",
        ),
    },
)
