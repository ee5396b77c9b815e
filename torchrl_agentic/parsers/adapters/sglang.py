"""Adapter of SGLang's function call detectors."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import Fields, fields_of
from torchrl_agentic.parsers.adapters.base import EngineParser, Found


class SGLangParser(EngineParser):
    """One of SGLang's detectors. They need the tools, and drop calls of tools that are not among them.

    Args:
        format: Name of the detector in SGLang.
        tokenizer: Unused; accepted like by the other adapters.
        **options: Options of `EngineParser`.
    """

    engine = "sglang"

    def __init__(self, format: str, *, tokenizer: Any = None, **options: Any) -> None:
        super().__init__(format, **options)
        del tokenizer

    def prepare(self) -> None:
        """Import SGLang and look up the detector."""
        known = self._parser().ToolCallParserEnum
        if self.format not in known:
            raise ValueError(f"SGLang has no tool parser {self.format!r}; it has {', '.join(known)}")

    def _parser(self) -> Any:
        try:
            return importlib.import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser
        except ImportError as error:
            raise MissingExtra("a parser 'sglang:…'", "sglang", "sglang") from error

    def extract(self, text: str, specs: Sequence[Fields]) -> tuple[str | None, list[Found]]:
        """Run a new detector on a text."""
        protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
        tools = [
            protocol.Tool(type="function", function=protocol.Function(**(fields_of(spec["function"]) or {})))
            for spec in specs
        ]
        content, calls = self._parser()(tools=tools, tool_call_parser=self.format).parse_non_stream(text)
        return content, [Found(call.name, call.parameters) for call in calls]
