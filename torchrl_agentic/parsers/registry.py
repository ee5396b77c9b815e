"""Find a parser by name."""

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
"""The formats that come with the package, in the order of the table in `docs/howto/formats.md`."""

PARSERS: dict[str, Callable[..., ToolCallParser]] = {parser.name: parser for parser in FORMATS}
"""Factories of parsers by registered name. Other packages add entry points "torchrl_agentic.parsers"."""

ALIASES = {alias: parser.name for parser in FORMATS for alias in vars(parser).get("aliases", ())}
"""Registered names by alias: names of vLLM, SGLang, verl and TorchRL, and of models."""

_ENGINES = {"vllm": "VLLMParser", "sglang": "SGLangParser", "transformers": "TransformersParser"}
_ENGINE_FORMATS = {
    "hf": "transformers:", "response_template": "transformers:",
    "muse_glimmer": "vllm:muse_glimmer", "muse": "vllm:muse", "musespark1x": "vllm:musespark1x",
    "beam": "vllm:beam", "iquest_q1": "sglang:iquest_q1",
}  # fmt: skip
"""Adapters by name in vLLM 0.33 or SGLang 0.5, for formats that only these engines read."""

_VLLM_NAMES = {"openai": "harmony"}
"""Registered names by name in vLLM, where the same name is another format here."""

_FAMILIES = {"llama": "llama3_json", "deepseek": "deepseek_v31"}


def get_parser(parser: Any, *, tokenizer: Any = None, **options: Any) -> ToolCallParser:
    """Return a parser.

    Args:
        parser: A parser object; a registered name, an alias or the name of an entry point; "auto" to detect
            the format from the tokenizer's chat template; "vllm:name", "sglang:name" or "transformers:" for a
            parser of that package; or "module:attribute". An object of another class needs the methods
            `parse`, `render_call` and `render_result`.
        tokenizer: The model's tokenizer, required by "auto", vLLM and transformers. A parser that is created
            here escapes its control tokens in results, and learns whether its chat template opens the
            reasoning (`ToolCallParser.with_tokenizer`).
        **options: Options of the parser's class; with "auto" those of the chat template, such as
            `enable_thinking`.

    Raises:
        ValueError: If the name is unknown (the message lists the known names and the nearest), or if no
            parser reads the calls of the chat template.
        TypeError: If the object is not a parser, or a required tokenizer is missing.
    """
    found = _found(parser, tokenizer, options)
    if isinstance(parser, str) and hasattr(tokenizer, "added_tokens_decoder"):
        return found.with_tokenizer(tokenizer, **(options if parser == "auto" else {}))
    return found


def _found(parser: Any, tokenizer: Any, options: Mapping[str, Any]) -> ToolCallParser:
    """Return a parser that is not yet configured for the tokenizer."""
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
    """Return the known name that was probably meant, never one with another version number."""
    if name in _FAMILIES:
        return _FAMILIES[name]
    digits = re.findall(r"\d+", name)
    same_version = [other for other in known if re.findall(r"\d+", other) == digits]
    return nearest(name, same_version, cutoff=0.75)


def _from_engine(name: str, tokenizer: Any, options: Mapping[str, Any]) -> ToolCallParser:
    """Return the adapter of a format that only an engine reads, with a warning.

    Raises:
        MissingExtra: If the engine is not installed.
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
    """Adapter of an object of another class, or one whose `parse` lacks `tools` or `turn`."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.known = _keywords(target.parse)

    def parse(self, response: Any, *, tools: Tools | None = None, turn: int = 0) -> Any:
        """Call the object's `parse` with the keywords that it takes."""
        given = {"tools": tools, "turn": turn}
        return self.target.parse(response, **{name: given[name] for name in self.known})

    def render_call(self, call: Any) -> Any:
        """Call the object's `render_call`."""
        return self.target.render_call(call)

    def render_result(self, call_id: str, result: ToolResult) -> Any:
        """Call the object's `render_result`."""
        return self.target.render_result(call_id, result)

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> Any:
        """Call the object's `render` if it has one."""
        render = getattr(self.target, "render", super().render)
        return render(calls, results)


def _keywords(parse: Callable[..., Any]) -> tuple[str, ...]:
    """Return which of the keywords `tools` and `turn` a `parse` takes."""
    taken = keywords_of(parse)
    return tuple(name for name in ("tools", "turn") if name in taken)


def _adapted(parser: Any) -> ToolCallParser:
    missing = lacking(parser, ToolCallParser)
    if isinstance(parser, type) or missing:
        hint = f"write {parser.__name__}()" if isinstance(parser, type) else f"it lacks {', '.join(missing)}"
        raise TypeError(f"a parser must be an object or a registered name; got {parser!r}: {hint}")
    return _Adapted(parser)


def formats_table() -> str:
    """Return the Markdown table of formats in `docs/howto/formats.md`, one row per format."""
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
