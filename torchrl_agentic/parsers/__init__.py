"""Parsers: one file per format, and the names they are known by.

To add one: write a subclass of `ToolCallParser` (or of `TextParser`, where calls stand in the text) in a file
of its own, add a line to `PARSERS`, and let a test inherit `testing.ParserContract`.
"""

from torchrl_agentic.parsers.base import ToolCallParser
from torchrl_agentic.parsers.hermes import HermesParser
from torchrl_agentic.parsers.json_block import JSONToolCallParser
from torchrl_agentic.parsers.registry import PARSERS, get_parser
from torchrl_agentic.parsers.structured import AnthropicToolUseParser, OpenAIToolCallParser
from torchrl_agentic.parsers.text import TextParser
from torchrl_agentic.parsers.xml import XMLToolCallParser

__all__ = [
    "PARSERS",
    "AnthropicToolUseParser",
    "HermesParser",
    "JSONToolCallParser",
    "OpenAIToolCallParser",
    "TextParser",
    "ToolCallParser",
    "XMLToolCallParser",
    "get_parser",
]
