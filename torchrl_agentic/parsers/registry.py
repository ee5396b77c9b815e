"""The names of the parsers."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers.auto import detect
from torchrl_agentic.parsers.base import ToolCallParser, Tools
from torchrl_agentic.parsers.formats.apertus import ApertusParser
from torchrl_agentic.parsers.formats.api_messages import AnthropicToolUseParser, OpenAIToolCallParser
from torchrl_agentic.parsers.formats.apriel import AprielParser
from torchrl_agentic.parsers.formats.cohere import CohereParser, CommandRParser
from torchrl_agentic.parsers.formats.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from torchrl_agentic.parsers.formats.dots import DotsParser
from torchrl_agentic.parsers.formats.fenced_code import FenceParser
from torchrl_agentic.parsers.formats.gemma import FunctionGemmaParser, Gemma4Parser
from torchrl_agentic.parsers.formats.gigachat import GigaChat3Parser, GigaChat35Parser
from torchrl_agentic.parsers.formats.glm import GLM45Parser
from torchrl_agentic.parsers.formats.granite import Granite20BParser, GraniteParser
from torchrl_agentic.parsers.formats.harmony import HarmonyParser
from torchrl_agentic.parsers.formats.hermes import HermesParser
from torchrl_agentic.parsers.formats.hunyuan_a13b import HunyuanA13BParser
from torchrl_agentic.parsers.formats.hy import HyV3Parser, HyV4Parser
from torchrl_agentic.parsers.formats.inkling import InklingParser
from torchrl_agentic.parsers.formats.internlm import InternLMParser
from torchrl_agentic.parsers.formats.invoke import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    DeepSeekV41Parser,
    MiniMaxM2Parser,
)
from torchrl_agentic.parsers.formats.jamba import JambaParser
from torchrl_agentic.parsers.formats.k2_horizon import K2HorizonParser
from torchrl_agentic.parsers.formats.kimi import KimiK2Parser
from torchrl_agentic.parsers.formats.kimi_k3 import KimiK3Parser
from torchrl_agentic.parsers.formats.lfm2 import LFM2Parser
from torchrl_agentic.parsers.formats.llama import Llama3JSONParser
from torchrl_agentic.parsers.formats.longcat import LongCatParser
from torchrl_agentic.parsers.formats.minicpm import MiniCPM5Parser
from torchrl_agentic.parsers.formats.minimax_m1 import MiniMaxM1Parser
from torchrl_agentic.parsers.formats.minimax_m3 import MiniMaxM3Parser
from torchrl_agentic.parsers.formats.mistral import MistralParser
from torchrl_agentic.parsers.formats.nemotron import NemotronNanoV2Parser
from torchrl_agentic.parsers.formats.phi import Phi4MiniParser
from torchrl_agentic.parsers.formats.plamo import Plamo3Parser
from torchrl_agentic.parsers.formats.pythonic import OLMo3Parser, PythonicParser
from torchrl_agentic.parsers.formats.qwen_coder import MiMoParser, Qwen3CoderParser, SeedOSSParser
from torchrl_agentic.parsers.formats.react import ReActParser
from torchrl_agentic.parsers.formats.step import Step3Parser
from torchrl_agentic.parsers.formats.tags import TagsParser
from torchrl_agentic.parsers.formats.torchrl_json import JSONToolCallParser
from torchrl_agentic.parsers.formats.xlam import XLAMParser
from torchrl_agentic.parsers.formats.xml import XMLToolCallParser
from torchrl_agentic.text import nearest
from torchrl_agentic.tools.signatures import keywords_of

if TYPE_CHECKING:
    from torchrl_agentic.parsers.adapters.base import EngineParser

FORMATS: tuple[type[ToolCallParser], ...] = (
    HermesParser,
    Qwen3CoderParser,
    MiMoParser,
    SeedOSSParser,
    Llama3JSONParser,
    PythonicParser,
    OLMo3Parser,
    LFM2Parser,
    MistralParser,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    DeepSeekV32Parser,
    DeepSeekV4Parser,
    DeepSeekV41Parser,
    GLM45Parser,
    HyV4Parser,
    HyV3Parser,
    KimiK2Parser,
    KimiK3Parser,
    HarmonyParser,
    MiniMaxM2Parser,
    Gemma4Parser,
    FunctionGemmaParser,
    InklingParser,
    MiniMaxM3Parser,
    CohereParser,
    CommandRParser,
    MiniCPM5Parser,
    Step3Parser,
    Plamo3Parser,
    DotsParser,
    K2HorizonParser,
    GraniteParser,
    Granite20BParser,
    Phi4MiniParser,
    JambaParser,
    AprielParser,
    HunyuanA13BParser,
    NemotronNanoV2Parser,
    XLAMParser,
    LongCatParser,
    InternLMParser,
    GigaChat3Parser,
    GigaChat35Parser,
    ApertusParser,
    MiniMaxM1Parser,
    OpenAIToolCallParser,
    AnthropicToolUseParser,
    XMLToolCallParser,
    JSONToolCallParser,
    FenceParser,
    TagsParser,
    ReActParser,
)
"""The formats that come with the package, in the order of the table in the README."""

PARSERS: dict[str, Callable[..., ToolCallParser]] = {parser.name: parser for parser in FORMATS}
"""Registered name → what makes the parser. Other packages add entry points "torchrl_agentic.parsers"."""

ALIASES = {alias: parser.name for parser in FORMATS for alias in vars(parser).get("aliases", ())}
"""Other names → registered ones: those of vLLM, SGLang, verl and TorchRL, and of models."""

_ENGINES = {"vllm": "VLLMParser", "sglang": "SGLangParser", "transformers": "TransformersParser"}
_ENGINE_FORMATS = {
    "hf": "transformers:", "response_template": "transformers:",
    "muse_glimmer": "vllm:muse_glimmer", "muse": "vllm:muse", "musespark1x": "vllm:musespark1x",
    "beam": "vllm:beam", "iquest_q1": "sglang:iquest_q1",
}  # fmt: skip
"""Names of vLLM 0.33 and SGLang 0.5 for formats that only these engines read → the adapter."""

_VLLM_NAMES = {"openai": "harmony"}
"""Names that mean another format in vLLM than here."""

_FAMILIES = {"llama": "llama3_json", "deepseek": "deepseek_v31"}


def get_parser(parser: Any, *, tokenizer: Any = None, **options: Any) -> ToolCallParser:
    """Return a parser.

    Args:
        parser: An object; a registered name or an entry point's; "auto", for the one that reads what the
            tokenizer's chat template writes; "vllm:name", "sglang:name" or "transformers:" for theirs; or
            "module:attribute". An object need not be a `ToolCallParser`; it needs `parse`, `render_call` and
            `render_result`.
        tokenizer: The model's, for "auto", vLLM and transformers. A parser that is made here escapes its
            control tokens in results, and learns whether its chat template opens a thought
            (`ToolCallParser.with_tokenizer`).
        **options: Options of the parser's class; with "auto" those of the chat template, such as
            `enable_thinking`.

    Raises:
        ValueError: no parser has that name; the message lists the known ones and the nearest. Or the chat
            template writes calls that none of ours reads.
        TypeError: it is no parser, or a tokenizer is needed.
    """
    found = _found(parser, tokenizer, options)
    if isinstance(parser, str) and hasattr(tokenizer, "added_tokens_decoder"):
        return found.with_tokenizer(tokenizer, **(options if parser == "auto" else {}))
    return found


def _found(parser: Any, tokenizer: Any, options: Mapping[str, Any]) -> ToolCallParser:
    """Return a parser, not yet set up for the tokenizer."""
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
    if parser in _ENGINE_FORMATS:
        return _from_engine(parser, tokenizer, options)
    known = [*PARSERS, *plugins, "auto"]
    near = _nearest(parser, [*known, *ALIASES])
    meant = f"; did you mean {near!r}?" if near else "."
    engines = ", ".join(f"'{engine}:name'" for engine in _ENGINES)
    raise ValueError(
        f"no parser is named {parser!r}{meant} Known: {', '.join(known)}, {engines}, or 'module:attribute'"
    )


def _nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that was probably meant: a typing error away, never another version's."""
    if name in _FAMILIES:
        return _FAMILIES[name]
    digits = re.findall(r"\d+", name)
    same_version = [other for other in known if re.findall(r"\d+", other) == digits]
    return nearest(name, same_version, cutoff=0.75)


def _from_engine(name: str, tokenizer: Any, options: Mapping[str, Any]) -> ToolCallParser:
    """Return the adapter of a format that only an engine reads, and warn of it.

    Raises:
        MissingExtra: The engine is not installed.
    """
    adapter = _ENGINE_FORMATS[name]
    engine, _, format = adapter.partition(":")
    parser = _engine_parser(engine, format, tokenizer, options)
    parser.prepare()
    message = f"no parser of torchrl_agentic reads the format {name!r}; {adapter!r} is used, {engine}'s own"
    warnings.warn(message, stacklevel=4)
    return parser


def _engine_parser(engine: str, format: str, tokenizer: Any, options: Mapping[str, Any]) -> EngineParser:
    module = importlib.import_module(f"torchrl_agentic.parsers.adapters.{engine}")
    name = _VLLM_NAMES.get(format, format) if engine == "vllm" else format
    name = ALIASES.get(name, name)
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


def formats_table() -> str:
    """Return the table of formats in Markdown, one row per format; the README holds it."""
    rows = ["| parser | also known as | models | a call |", "| --- | --- | --- | --- |"]
    for parser in FORMATS:
        aliases = " ".join(f"`{alias}`" for alias in vars(parser).get("aliases", ()))
        quote = "```` " if "```" in parser.example else "`"
        example = parser.example.replace("|", r"\|")
        rows.append(
            f"| `{parser.name}` | {aliases} | {parser.models} | {quote}{example}{quote[::-1]} |".replace(
                "|  |", "| |"
            )
        )
    return "\n".join(rows)
