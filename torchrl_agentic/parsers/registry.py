"""Find a parser by name."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers.base import ToolCallParser, Tools
from torchrl_agentic.text import nearest
from torchrl_agentic.tools.signatures import keywords_of

if TYPE_CHECKING:
    from torchrl_agentic.parsers.adapters.base import EngineParser

_FORMATS = {
    "hermes": "hermes:HermesParser",
    "qwen3_coder": "qwen_coder:Qwen3CoderParser",
    "mimo": "qwen_coder:MiMoParser",
    "seed_oss": "qwen_coder:SeedOSSParser",
    "llama3_json": "llama:Llama3JSONParser",
    "pythonic": "pythonic:PythonicParser",
    "olmo3": "pythonic:OLMo3Parser",
    "lfm2": "lfm2:LFM2Parser",
    "mistral": "mistral:MistralParser",
    "deepseek_v3": "deepseek:DeepSeekV3Parser",
    "deepseek_v31": "deepseek:DeepSeekV31Parser",
    "deepseek_v32": "invoke:DeepSeekV32Parser",
    "deepseek_v4": "invoke:DeepSeekV4Parser",
    "deepseek_v41": "invoke:DeepSeekV41Parser",
    "glm45": "glm:GLM45Parser",
    "hy_v4": "hy:HyV4Parser",
    "hy_v3": "hy:HyV3Parser",
    "kimi_k2": "kimi:KimiK2Parser",
    "kimi_k3": "kimi_k3:KimiK3Parser",
    "harmony": "harmony:HarmonyParser",
    "minimax_m2": "invoke:MiniMaxM2Parser",
    "gemma4": "gemma:Gemma4Parser",
    "functiongemma": "gemma:FunctionGemmaParser",
    "inkling": "inkling:InklingParser",
    "minimax_m3": "minimax_m3:MiniMaxM3Parser",
    "cohere_command3": "cohere:CohereParser",
    "command_r": "cohere:CommandRParser",
    "minicpm5": "minicpm:MiniCPM5Parser",
    "step3": "step:Step3Parser",
    "plamo3": "plamo:Plamo3Parser",
    "dots": "dots:DotsParser",
    "k2_horizon": "k2_horizon:K2HorizonParser",
    "granite": "granite:GraniteParser",
    "granite-20b-fc": "granite:Granite20BParser",
    "phi4_mini": "phi:Phi4MiniParser",
    "jamba": "jamba:JambaParser",
    "apriel": "jamba:AprielParser",
    "hunyuan_a13b": "jamba:HunyuanA13BParser",
    "nemotron_nano_v2": "jamba:NemotronNanoV2Parser",
    "xlam": "xlam:XLAMParser",
    "longcat": "longcat:LongCatParser",
    "internlm": "internlm:InternLMParser",
    "gigachat3": "gigachat:GigaChat3Parser",
    "gigachat35": "gigachat:GigaChat35Parser",
    "apertus": "apertus:ApertusParser",
    "minimax_m1": "minimax_m1:MiniMaxM1Parser",
    "openai": "api_messages:OpenAIToolCallParser",
    "anthropic": "api_messages:AnthropicToolUseParser",
    "xml": "xml:XMLToolCallParser",
    "json": "torchrl_json:JSONToolCallParser",
    "fence": "fenced_code:FenceParser",
    "tags": "tags:TagsParser",
    "react": "react:ReActParser",
}
"""Modules and classes in `formats/` by the name of the parser, in the order of `docs/howto/formats.md`."""


def format_class(name: str) -> type[ToolCallParser]:
    """Return the class of a format that comes with the package; load its module if needed."""
    module, _, attribute = _FORMATS[name].partition(":")
    return getattr(importlib.import_module(f"torchrl_agentic.parsers.formats.{module}"), attribute)


def _create(name: str, /, **options: Any) -> ToolCallParser:
    return format_class(name)(**options)


PARSERS: dict[str, Callable[..., ToolCallParser]] = {name: partial(_create, name) for name in _FORMATS}
"""Factories of parsers by registered name. Other packages add entry points "torchrl_agentic.parsers"."""


@functools.cache
def _formats() -> tuple[type[ToolCallParser], ...]:
    return tuple(map(format_class, _FORMATS))


@functools.cache
def _aliases() -> Mapping[str, str]:
    return {alias: parser.name for parser in _formats() for alias in parser.aliases}


if TYPE_CHECKING:
    FORMATS: tuple[type[ToolCallParser], ...]
    """Classes of the formats that come with the package; all are loaded at the first use."""
    ALIASES: Mapping[str, str]
    """Registered names by alias: names of vLLM, SGLang, verl, TorchRL, and models; loads all formats."""


def __getattr__(name: str) -> Any:
    """Compute what needs all formats when it is first used."""
    if name == "FORMATS":
        return _formats()
    if name == "ALIASES":
        return _aliases()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    name = parser if parser in PARSERS or parser == "auto" else _aliases().get(parser, parser)
    if name in PARSERS:
        return PARSERS[name](**options)
    if name == "auto":
        if tokenizer is None:
            raise TypeError("parser 'auto' needs a tokenizer: get_parser('auto', tokenizer=tokenizer)")
        from torchrl_agentic.parsers.auto import detect  # it loads all formats

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
    near = _nearest(parser, [*known, *_aliases()])
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
    name = _aliases().get(name, name)
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
    for parser in _formats():
        aliases = " ".join(f"`{alias}`" for alias in parser.aliases)
        quote = "```` " if "```" in parser.example else "`"
        example = parser.example.replace("|", r"\|")
        rows.append(
            f"| `{parser.name}` | {aliases} | {parser.models} | {quote}{example}{quote[::-1]} |".replace(
                "|  |", "| |"
            )
        )
    return "\n".join(rows)
