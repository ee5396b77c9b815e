"""The names of the parsers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from torchrl_agentic.parsers.base import ToolCallParser
from torchrl_agentic.parsers.hermes import HermesParser
from torchrl_agentic.parsers.json_block import JSONToolCallParser
from torchrl_agentic.parsers.structured import AnthropicToolUseParser, OpenAIToolCallParser
from torchrl_agentic.parsers.xml import XMLToolCallParser

PARSERS: dict[str, Callable[[], ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen2.5": HermesParser,
    "qwen25": HermesParser,
    "qwen3": HermesParser,
    "xml": XMLToolCallParser,
    "json": JSONToolCallParser,
    "json_block": JSONToolCallParser,
    "openai": OpenAIToolCallParser,
    "anthropic": AnthropicToolUseParser,
}
"""Registered name → what makes the parser. Other packages add entry points "torchrl_agentic.parsers"."""


def get_parser(parser: Any) -> ToolCallParser:
    """Give the parser that is meant: an object, a registered name, an entry point's, or "module:attribute".

    An object need not be a `ToolCallParser`; it needs `parse`, `render_call` and `render_result`.

    Raises:
        ValueError: no parser has that name; the message lists the known ones and the nearest.
        TypeError: it is no parser.
    """
    if isinstance(parser, ToolCallParser):
        return parser
    if not isinstance(parser, str):
        return _adapted(parser)
    if parser in PARSERS:
        return PARSERS[parser]()
    plugins = {entry.name: entry for entry in entry_points(group="torchrl_agentic.parsers")}
    if parser in plugins:
        return get_parser(_instance(plugins[parser].load()))
    if ":" in parser:
        module, _, attribute = parser.partition(":")
        try:
            return get_parser(_instance(getattr(importlib.import_module(module), attribute)))
        except (ImportError, AttributeError) as error:
            raise ValueError(f"parser {parser!r} cannot be imported: {error}") from error
    known = [*PARSERS, *plugins]
    near = difflib.get_close_matches(parser, known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no parser is named {parser!r}{meant} Known: {', '.join(known)}, or 'module:attribute'")


def _instance(found: Any) -> Any:
    return found() if isinstance(found, type) else found


class _Adapted(ToolCallParser):
    """A parser that is no `ToolCallParser`, behind its interface."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.render_call = target.render_call
        self.render_result = target.render_result
        if hasattr(target, "render"):
            self.render = target.render

    def parse(self, response: Any, *, turn: int = 0) -> Any:
        """Hand it on; such a parser knows nothing of turns."""
        return self.target.parse(response)

    def render_call(self, call: Any) -> str:  # pyright: ignore[reportRedeclaration]  replaced in __init__
        """Hand it on."""
        raise NotImplementedError


def _adapted(parser: Any) -> ToolCallParser:
    missing = [
        name
        for name in ("parse", "render_call", "render_result")
        if not callable(getattr(parser, name, None))
    ]
    if isinstance(parser, type) or missing:
        hint = f"write {parser.__name__}()" if isinstance(parser, type) else f"it lacks {', '.join(missing)}"
        raise TypeError(f"a parser is an object or a registered name; got {parser!r}: {hint}")
    return _Adapted(parser)
