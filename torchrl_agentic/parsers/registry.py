"""The names of the parsers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from torchrl_agentic.callee import keywords_of
from torchrl_agentic.look_alike import derives, lacking
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers.auto import detect
from torchrl_agentic.parsers.base import ToolCallParser, Tools
from torchrl_agentic.parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from torchrl_agentic.parsers.fence import FenceParser
from torchrl_agentic.parsers.glm import GLM45Parser
from torchrl_agentic.parsers.granite import Granite20BParser, GraniteParser
from torchrl_agentic.parsers.harmony import HarmonyParser
from torchrl_agentic.parsers.hermes import HermesParser
from torchrl_agentic.parsers.invoke import DeepSeekV4Parser, DeepSeekV32Parser, MiniMaxM2Parser
from torchrl_agentic.parsers.json_block import JSONToolCallParser
from torchrl_agentic.parsers.kimi import KimiK2Parser
from torchrl_agentic.parsers.llama import Llama3JSONParser
from torchrl_agentic.parsers.mistral import MistralParser
from torchrl_agentic.parsers.phi import Phi4MiniParser
from torchrl_agentic.parsers.pythonic import LFM2Parser, OLMo3Parser, PythonicParser
from torchrl_agentic.parsers.qwen_coder import Qwen3CoderParser, SeedOSSParser
from torchrl_agentic.parsers.react import ReActParser
from torchrl_agentic.parsers.structured import AnthropicToolUseParser, OpenAIToolCallParser
from torchrl_agentic.parsers.tags import TagsParser
from torchrl_agentic.parsers.xml import XMLToolCallParser

PARSERS: dict[str, Callable[..., ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "seed_oss": SeedOSSParser,
    "llama3_json": Llama3JSONParser,
    "pythonic": PythonicParser,
    "olmo3": OLMo3Parser,
    "lfm2": LFM2Parser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
    "deepseek_v4": DeepSeekV4Parser,
    "glm45": GLM45Parser,
    "kimi_k2": KimiK2Parser,
    "harmony": HarmonyParser,
    "minimax_m2": MiniMaxM2Parser,
    "granite": GraniteParser,
    "granite-20b-fc": Granite20BParser,
    "phi4_mini": Phi4MiniParser,
    "openai": OpenAIToolCallParser,
    "anthropic": AnthropicToolUseParser,
    "xml": XMLToolCallParser,
    "json": JSONToolCallParser,
    "fence": FenceParser,
    "tags": TagsParser,
    "react": ReActParser,
}
"""Registered name → what makes the parser. Other packages add entry points "torchrl_agentic.parsers"."""

ALIASES = {
    "qwen2.5": "hermes", "qwen25": "hermes", "qwen3": "hermes", "qwen3_json": "hermes", "granite4": "hermes",
    "qwen3_xml": "qwen3_coder", "qwen3.5": "qwen3_coder", "seed": "seed_oss", "llama3": "llama3_json",
    "llama4_pythonic": "pythonic", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4", "glm": "glm45", "glm47": "glm45",
    "kimi": "kimi_k2",
    "gpt-oss": "harmony", "minimax": "minimax_m2", "minimax-m2": "minimax_m2", "phi4_mini_json": "phi4_mini",
    "retool": "fence", "search_r1": "tags", "json_block": "json",
}  # fmt: skip
"""Other names → registered ones: those of vLLM, SGLang, verl and TorchRL, and of models."""

_ENGINES = {"vllm": "VLLMParser", "sglang": "SGLangParser", "transformers": "TransformersParser"}
_MEANT = {"qwen": "hermes", "llama": "llama3_json", "deepseek": "deepseek_v31"}


def get_parser(parser: Any, *, tokenizer: Any = None, **options: Any) -> ToolCallParser:
    """Give the parser that is meant.

    parser: an object; a registered name or an entry point's; "auto", for the one that reads what the
    tokenizer's chat template writes; "vllm:name", "sglang:name" or "transformers:" for theirs; or
    "module:attribute". An object need not be a `ToolCallParser`; it needs `parse`, `render_call` and
    `render_result`. tokenizer: of the model, for "auto", vLLM and transformers; a parser that is made here
    escapes its control tokens in results (`ToolCallParser.with_tokenizer`). options: of the parser's class;
    with "auto" what the template is told, such as `enable_thinking`.

    Raises:
        ValueError: no parser has that name; the message lists the known ones and the nearest. Or the chat
            template writes calls that none of ours reads.
        TypeError: it is no parser, or a tokenizer is needed.
    """
    found = _found(parser, tokenizer, options)
    if isinstance(parser, str) and hasattr(tokenizer, "added_tokens_decoder"):
        return found.with_tokenizer(tokenizer)
    return found


def _found(parser: Any, tokenizer: Any, options: Mapping[str, Any]) -> ToolCallParser:
    """Give the parser that is meant, whatever the tokenizer."""
    if derives(parser, ToolCallParser):
        return parser if len(_keywords(parser.parse)) == 2 else _adapted(parser)
    if not isinstance(parser, str):
        return _adapted(parser)
    name = ALIASES.get(parser, parser)
    if name in PARSERS:
        return PARSERS[name](**options)
    if name == "auto":
        if tokenizer is None:
            raise TypeError("parser 'auto' needs a tokenizer: get_parser('auto', tokenizer=tokenizer)")
        return detect(tokenizer, PARSERS, **options)
    plugins = {entry.name: entry for entry in entry_points(group="torchrl_agentic.parsers")}
    if parser in plugins:
        return get_parser(_instance(plugins[parser].load()))
    if ":" in parser:
        module, _, attribute = parser.partition(":")
        if module in _ENGINES:
            return _engine_parser(module, attribute, tokenizer, options)
        try:
            return get_parser(_instance(getattr(importlib.import_module(module), attribute)))
        except (ImportError, AttributeError) as error:
            raise ValueError(f"parser {parser!r} cannot be imported: {error}") from error
    known = [*PARSERS, *plugins, "auto"]
    near = (
        [_MEANT[parser]] if parser in _MEANT else difflib.get_close_matches(parser, [*known, *ALIASES], n=1)
    )
    meant = f"; did you mean {near[0]!r}?" if near else "."
    engines = ", ".join(f"'{engine}:name'" for engine in _ENGINES)
    raise ValueError(
        f"no parser is named {parser!r}{meant} Known: {', '.join(known)}, {engines}, or 'module:attribute'"
    )


def _engine_parser(engine: str, format: str, tokenizer: Any, options: Mapping[str, Any]) -> ToolCallParser:
    module = importlib.import_module(f"torchrl_agentic.parsers.adapters.{engine}")
    name = ALIASES.get(format, format)
    native = PARSERS[name]() if name in PARSERS else None
    return getattr(module, _ENGINES[engine])(format, tokenizer=tokenizer, native=native, **options)


def _instance(found: Any) -> Any:
    return found() if isinstance(found, type) else found


class _Adapted(ToolCallParser):
    """A parser that is no `ToolCallParser`, or knows nothing of tools and turns, behind the interface."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.known = _keywords(target.parse)

    def parse(self, response: Any, *, tools: Tools | None = None, turn: int = 0) -> Any:
        """Hand it on, with what the other knows of."""
        given = {"tools": tools, "turn": turn}
        return self.target.parse(response, **{name: given[name] for name in self.known})

    def render_call(self, call: Any) -> Any:
        """Hand it on."""
        return self.target.render_call(call)

    def render_result(self, call_id: str, result: ToolResult) -> Any:
        """Hand it on."""
        return self.target.render_result(call_id, result)

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> Any:
        """Hand it on, if the other knows of it."""
        render = getattr(self.target, "render", super().render)
        return render(calls, results)


def _keywords(parse: Callable[..., Any]) -> tuple[str, ...]:
    """Which of our keyword arguments a `parse` takes."""
    taken = keywords_of(parse)
    return tuple(name for name in ("tools", "turn") if name in taken)


def _adapted(parser: Any) -> ToolCallParser:
    missing = lacking(parser, ToolCallParser)
    if isinstance(parser, type) or missing:
        hint = f"write {parser.__name__}()" if isinstance(parser, type) else f"it lacks {', '.join(missing)}"
        raise TypeError(f"a parser is an object or a registered name; got {parser!r}: {hint}")
    return _Adapted(parser)
