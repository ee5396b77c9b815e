"""Which format a model speaks: the one whose parser reads what the model's chat template writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Protocol, cast

from torchrl_agentic.messages import JSON, Fields, ParsedCall, ParseResult, ToolResult, fields_of
from torchrl_agentic.parsers.base import ToolCallParser, Tools, schemas_of, specs_of
from torchrl_agentic.parsers.engine.attempts import shortened
from torchrl_agentic.parsers.engine.jsontext import dumps
from torchrl_agentic.parsers.engine.text import TextParser

_USER = {"role": "user", "content": "hello"}
_SENTINEL = "sentinel_tool"
_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["text", "count"],
}


_GENTLE = {"type": "object", "properties": {"word": {"const": "word"}}, "required": ["word"]}
"""For templates that write quotes and numbers wrong, as those of some pythonic models do."""
_RESULT = "sentinel result"
_EXAMPLES: Mapping[str, JSON] = {
    "integer": 7, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template, as those of transformers are."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, **options: Any) -> Any:
        """Write a conversation as the model reads it."""
        ...


class Mismatch(ValueError):
    """A parser does not read what the model's chat template writes."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """How a chat template writes a message with one call, and how it lets the model begin."""

    answer: str
    beginning: str

    def opens(self, think: tuple[str, str]) -> bool:
        """Whether the model begins inside a thought."""
        return self.beginning.rfind(think[0]) > self.beginning.rfind(think[1])


def example_call(name: str, schema: Fields) -> ParsedCall:
    """Make a call of a tool, with an argument for each that its schema names."""
    properties = fields_of(schema.get("properties")) or {}
    args = {key: _example(fields_of(kind) or {}) for key, kind in properties.items()}
    return ParsedCall(name, args, "call00000")


def _example(schema: Fields) -> JSON:
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return _example(fields_of(schema[key][0]) or {})
    kind: JSON = schema.get("type")
    if isinstance(kind, list):
        kind = next(iter(cast("list[JSON]", kind)), None)
    return _EXAMPLES.get(kind, 'a "quoted" <b> & text')


def rendered(
    tokenizer: ChatTokenizer, call: ParsedCall, tools: Tools, results: Sequence[JSON] = (), **told: Any
) -> Rendered:
    """Write a call by the chat template of a model, and perhaps messages behind it.

    told: more for the template, such as `enable_thinking`.

    Raises:
        ValueError: the template cannot, or leaves it out.
    """

    def write(messages: list[Any], **options: Any) -> str:
        told_all = {**told, **options}
        return tokenizer.apply_chat_template(messages, tokenize=False, tools=specs_of(tools), **told_all)

    reason: object = "it leaves calls out"
    for arguments in (call.args, dumps(call.args)):  # some templates want them as a string
        function = {"name": call.tool, "arguments": arguments}
        calls = [{"id": call.call_id, "type": "function", "function": function}]
        try:
            before = write([_USER])
            after = write([_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results])
            beginning = write([_USER], add_generation_prompt=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        answer = after[len(_shared(before, after)) :]
        if call.tool in answer:
            return Rendered(answer, beginning[len(before) :] if beginning.startswith(before) else beginning)
    raise ValueError(f"the chat template writes no tool calls ({reason}); name the parser yourself")


def _shared(before: str, after: str) -> str:
    """What both texts begin with; no marker is cut in two."""
    shared = "".join(
        a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    )
    return shared[: shared.rfind("<")] if shared.rfind("<") > shared.rfind(">") else shared


def detect(
    tokenizer: ChatTokenizer, parsers: Mapping[str, Callable[..., ToolCallParser]], **told: Any
) -> ToolCallParser:
    """Choose the parser that reads what the chat template writes, and set it to what the template wants.

    That is: whether the model begins inside a thought, and the role of results. told: more for the template.

    Raises:
        ValueError: the template writes no calls, or none that a parser reads.
    """
    name, schema = _likely(tokenizer, parsers, told)
    parser = parsers[name]()
    if hasattr(tokenizer, "added_tokens_decoder"):
        parser = parser.with_tokenizer(cast("Any", tokenizer))
    call, tools = example_call(_SENTINEL, schema), {_SENTINEL: schema}
    if isinstance(parser, TextParser):
        written = rendered(tokenizer, call, tools, **told)
        opened = [think for think in (parser.think, *parser.other_thoughts) if written.opens(think)]
        parser.reasoning_open = bool(opened)
        if opened and opened[0] != parser.think:
            vars(parser)["think"] = opened[0]
    if parser.result_role != "tool" and not _takes_results(parser, tokenizer, call, tools, told):
        parser.result_role = "tool"
    return parser


def _takes_results(
    parser: ToolCallParser, tokenizer: ChatTokenizer, call: ParsedCall, tools: Tools, told: Mapping[str, Any]
) -> bool:
    results = parser.render([call], [ToolResult.from_text(_RESULT)])
    try:
        return _RESULT in rendered(tokenizer, call, tools, results, **told).answer
    except ValueError:
        return False


def _likely(
    tokenizer: ChatTokenizer,
    parsers: Mapping[str, Callable[..., ToolCallParser]],
    told: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, Fields]:
    """Give the name of the parser that leaves least of a sentinel's call over, and the sentinel's schema."""
    answer = ""
    for schema in (_SCHEMA, _GENTLE):
        call, tools = example_call(_SENTINEL, schema), {_SENTINEL: schema}
        answer = rendered(tokenizer, call, tools, **told).answer
        found: list[tuple[int, int, str]] = []
        for name, make in parsers.items():
            result = make().parse(answer, tools=tools)
            if _is_read(result, call):
                found.append((len(result.text), len(result.calls[0].notes), name))
        if found:
            return min(found, key=lambda item: item[:2])[2], schema
    raise ValueError(f"no parser reads what the chat template writes: {shortened(answer, 120)}")


def _is_read(result: ParseResult, call: ParsedCall) -> bool:
    return [(c.tool, dict(c.args), c.error) for c in result.calls] == [(call.tool, call.args, None)]


def check_parser(
    parser: ToolCallParser,
    tools: Tools,
    tokenizer: ChatTokenizer | None = None,
    *,
    parsers: Mapping[str, Callable[..., ToolCallParser]] | None = None,
) -> list[str]:
    """See that a call of each tool reads back: as the parser writes it, or as the model's template does.

    Gives the names of the tools that can be called so; without a tokenizer, those that the format cannot say
    are missing. parsers: those among which to look for the right one, if this is the wrong one.

    Raises:
        Mismatch: one does not read back; the message shows what was written, and names the parser that reads
            it. Or no tool can be called in this format.
        ValueError: the template writes no calls.
    """
    schemas = schemas_of(tools) or {}
    checked: list[str] = []
    for name, schema in schemas.items():
        call = example_call(name, schema)
        try:
            written = rendered(tokenizer, call, tools).answer if tokenizer else parser.render_call(call)
        except ValueError:
            if tokenizer:
                raise
            continue  # this format is for other tools, such as a tag for a search
        result = parser.parse(written, tools=schemas)
        # A template may get values wrong, such as quotes inside of strings; that is not the parser's fault.
        if not (_is_read(result, call) or (tokenizer and _is_seen(result, call))):
            raise Mismatch(_reason(parser, name, written, tokenizer, parsers or {}))
        checked.append(name)
    if schemas and not checked:
        raise Mismatch(
            f"parser {parser.name!r} can write a call of none of these tools: {', '.join(schemas)}"
        )
    return checked


def _is_seen(result: ParseResult, call: ParsedCall) -> bool:
    return [(c.tool, c.args.keys(), c.error) for c in result.calls] == [(call.tool, call.args.keys(), None)]


def _reason(
    parser: ToolCallParser,
    tool: str,
    written: str,
    tokenizer: ChatTokenizer | None,
    parsers: Mapping[str, Callable[..., ToolCallParser]],
) -> str:
    reason = f"parser {parser.name!r} does not read a call of {tool!r} written as {shortened(written, 160)}"
    if tokenizer is None:
        return reason
    others = {name: make for name, make in parsers.items() if name != parser.name}
    try:
        return f"{reason}; {_likely(tokenizer, others)[0]!r} does"
    except ValueError:
        return f"{reason}; nor does any other"
