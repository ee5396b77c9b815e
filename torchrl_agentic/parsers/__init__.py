"""Parsers: one file per format, and the names they are known by.

To add one: subclass what comes nearest, such as `JSONBlockParser` or `TextParser`, in a file of its own; add
a line to `registry.PARSERS`; let a test inherit `testing.ParserContract`.
"""

from torchrl_agentic.parsers.auto import Mismatch, check_parser
from torchrl_agentic.parsers.base import LIMITS, Limits, Stream, ToolCallParser
from torchrl_agentic.parsers.control_tokens import control_tokens_of, escape_control_tokens
from torchrl_agentic.parsers.events import CallFailed, CallReady, TextDelta
from torchrl_agentic.parsers.hermes import HermesParser
from torchrl_agentic.parsers.json_block import JSONToolCallParser
from torchrl_agentic.parsers.json_blocks import JSONBlockParser
from torchrl_agentic.parsers.prompt import tool_instructions, with_tools, with_tools_message
from torchrl_agentic.parsers.registry import ALIASES, PARSERS, get_parser
from torchrl_agentic.parsers.structured import AnthropicToolUseParser, OpenAIToolCallParser
from torchrl_agentic.parsers.text import TextParser
from torchrl_agentic.parsers.xml import XMLToolCallParser

__all__ = [
    "ALIASES",
    "LIMITS",
    "PARSERS",
    "AnthropicToolUseParser",
    "CallFailed",
    "CallReady",
    "HermesParser",
    "JSONBlockParser",
    "JSONToolCallParser",
    "Limits",
    "Mismatch",
    "OpenAIToolCallParser",
    "Stream",
    "TextDelta",
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
