"""Adapter of vLLM's tool parsers. They change with every release; CONTRIBUTING names the tested one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import Fields
from torchrl_agentic.parsers.adapters.base import EngineParser, Found


class VLLMParser(EngineParser):
    """One of vLLM's tool parsers.

    Args:
        format: Name of the parser in vLLM.
        tokenizer: Tokenizer that has the control tokens of the format.
        **options: Options of `EngineParser`.
    """

    engine = "vllm"

    def __init__(self, format: str, *, tokenizer: Any, **options: Any) -> None:
        super().__init__(format, **options)
        if tokenizer is None:
            raise TypeError(f"vLLM's parsers need a tokenizer: get_parser('vllm:{format}', tokenizer=…)")
        self.tokenizer = tokenizer

    def prepare(self) -> None:
        """Import vLLM and look up the parser."""
        self._kind()

    def _kind(self) -> Any:
        for module in ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"):
            try:
                manager = importlib.import_module(module).ToolParserManager
            except ImportError:
                continue
            try:
                return manager.get_tool_parser(self.format)
            except KeyError as error:
                raise ValueError(f"vLLM has no tool parser {self.format!r}: {error}") from None
        raise MissingExtra("a parser 'vllm:…'", "vllm", "vllm")

    def extract(self, text: str, specs: Sequence[Fields]) -> tuple[str | None, list[Found]]:
        """Run a new instance on a text: most of them are neither thread-safe nor reusable."""
        protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
        tools = [protocol.ChatCompletionToolsParam(**spec) for spec in specs]
        parser = self._made(tools)
        if hasattr(parser, "skip_reasoning_parsing"):
            parser.skip_reasoning_parsing = True  # else reasoning is missing from the content
        found = parser.extract_tool_calls(text, SimpleNamespace(tools=tools, tool_choice="auto"))
        return found.content, [
            Found(call.function.name, call.function.arguments) for call in found.tool_calls
        ]

    def _made(self, tools: list[Any]) -> Any:
        kind, tokenizer = self._kind(), _with_cached_vocabulary(self.tokenizer)
        try:
            return kind(tokenizer, tools)
        except TypeError:  # before 0.11 it took only the tokenizer
            return kind(tokenizer)


def _with_cached_vocabulary(tokenizer: Any) -> Any:
    """Cache the tokenizer's vocabulary: some parsers request it each time, 60 ms for a large one."""
    try:
        return importlib.import_module("vllm.tokenizers.hf").get_cached_tokenizer(tokenizer)
    except (ImportError, AttributeError):
        return tokenizer
