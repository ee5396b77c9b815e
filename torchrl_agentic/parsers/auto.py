"""Detect a model's tool-call format: the parser that reads what the chat template writes."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args

from torchrl_agentic.messages import JSON, Fields, ParsedCall, ParseResult, ToolResult, fields_of
from torchrl_agentic.parsers.base import ToolCallParser, Tools, schemas_of, specs_of
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.reasoning import QUESTION
from torchrl_agentic.parsers.engine.text_parser import TextParser
from torchrl_agentic.text import one_line

_SENTINEL = "sentinel_tool"
_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Text."},
        "count": {"type": "integer", "description": "Count."},
        "flag": {"type": "boolean", "description": "Flag."},
        "limit": {"anyOf": [{"type": "null"}, {"type": "integer"}], "description": "Limit."},
    },
    "required": ["text", "count", "flag", "limit"],
}
_RESULT = "sentinel result"
_TEXT = "a \"quoted\" <b> & 'text'\nin two lines\n"
_EXAMPLES: Mapping[str, JSON] = {
    "integer": 7, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip
Example: TypeAlias = Literal["full", "plain", "words"]
_KINDS: tuple[Example, ...] = get_args(Example)
_MARKUP = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{3,40}\]")
"""The shapes of control tokens and tags."""


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template, such as those of transformers."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, **options: Any) -> Any:
        """Render a conversation as the model's prompt.

        Args:
            conversation: Messages as mappings.
            tokenize: Whether to return token ids; always False here.
            **options: Tools and options of the template.
        """
        ...


class Mismatch(ValueError):
    """The parser does not read the calls that the model's chat template writes."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """An assistant message with one call, as a chat template writes it.

    Attributes:
        answer: Text of the message and the text after it.
        markup: Tags and control tokens of a conversation without calls.
    """

    answer: str
    markup: frozenset[str]

    def is_whole(self, parser: ToolCallParser, result: ParseResult) -> bool:
        """Return whether the text outside of the calls contains only markup of messages without calls.

        Args:
            parser: Parser that read the message.
            result: What it read.
        """
        known = {*self.markup, *parser.stop}
        if isinstance(parser, TextParser):
            tags = parser.format.reasoning_tags
            known.update((*tags, *tags.values(), *parser.format.turn_end))
        return all(match[0] in known for match in _MARKUP.finditer(result.text))


def example_call(name: str, schema: Fields, kind: Example = "full") -> ParsedCall:
    """Return a call of a tool with an example value for each property of its schema.

    Args:
        name: Name of the tool.
        schema: JSON Schema of its input.
        kind: "full" uses values that need escaping. "plain" leaves out what some chat templates write
            wrongly: quotes, newlines and null. "words" has only strings of one word, for templates that write
            every value as a string.
    """
    properties = fields_of(schema.get("properties")) or {}
    args = {key: _example(fields_of(inner) or {}, kind) for key, inner in properties.items()}
    if kind == "words":
        args = {key: value for key, value in args.items() if isinstance(value, str)}
    return ParsedCall(name, args, "call00000")


def _example(schema: Fields, kind: Example) -> JSON:
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            branches = [fields_of(branch) or {} for branch in schema[key]]
            branches.sort(key=lambda branch: (branch.get("type") == "null") == (kind != "full"))
            return _example(branches[0], kind)
    types: JSON = schema.get("type")
    if isinstance(types, list):
        known = sorted(cast("list[JSON]", types), key=lambda one: (one == "null") == (kind != "full"))
        types = next(iter(known), None)
    return _EXAMPLES.get(types, _TEXT if kind == "full" else "word")


def rendered(
    tokenizer: ChatTokenizer,
    call: ParsedCall,
    tools: Tools,
    results: Sequence[JSON] = (),
    **template_kwargs: Any,
) -> Rendered:
    """Render a call, and optionally results, with a model's chat template.

    Args:
        tokenizer: Tokenizer with the chat template.
        call: The call to render.
        tools: Tools shown in the prompt.
        results: Messages after the call.
        **template_kwargs: Options of the template, such as `enable_thinking`.

    Raises:
        ValueError: If the template fails or leaves the call out.
    """

    def write(messages: list[Any], **options: Any) -> str:
        all_options = {**template_kwargs, **options}
        return tokenizer.apply_chat_template(messages, tokenize=False, tools=specs_of(tools), **all_options)

    reason: object = "it leaves them out"
    odd: Rendered | None = None
    for arguments in (call.args, dumps(call.args)):  # some templates require a string
        function = {"name": call.tool, "arguments": arguments}
        calls = [{"id": call.call_id, "type": "function", "function": function}]
        try:
            before = write([QUESTION])
            after = write([QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *results])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        answer = after[len(_shared(before, after)) :]
        if call.tool not in answer:
            continue
        found = Rendered(answer, _markup(before, write))
        # A template that requires a string writes a mapping in Python's syntax.
        if not isinstance(arguments, str) and arguments and str(arguments) in answer:
            odd = found
            continue
        return found
    if odd is not None:
        return odd
    raise ValueError(f"the chat template renders no tool calls ({reason}); pass the name of a parser")


def _markup(before: str, write: Callable[..., str]) -> frozenset[str]:
    """Return the markup of a conversation without calls."""
    said = [QUESTION, {"role": "assistant", "content": "hello"}, QUESTION]
    texts = [before]
    for messages, options in ((said, {}), ([QUESTION], {"add_generation_prompt": True})):
        with suppress(Exception):  # templates may reject conversations that others render
            texts.append(write(messages, **options))
    return frozenset(match[0] for text in texts for match in _MARKUP.finditer(text))


def _shared(before: str, after: str) -> str:
    """Return the common prefix of two texts, shortened so that it does not end inside a marker."""
    shared = "".join(
        a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    )
    return shared[: shared.rfind("<")] if shared.rfind("<") > shared.rfind(">") else shared


def detect(
    tokenizer: ChatTokenizer, parsers: Mapping[str, Callable[..., ToolCallParser]], **template_kwargs: Any
) -> ToolCallParser:
    """Return a parser, configured for the template, that reads the calls of a chat template.

    Configured are the role of results and whether the prompt opens the model's reasoning.

    Args:
        tokenizer: Tokenizer with a chat template.
        parsers: Factories of parsers by name.
        **template_kwargs: Options of the template, such as `enable_thinking`.

    Raises:
        ValueError: If the template writes no calls, or calls that no parser reads; the message names the
            formats whose markers it has.
    """
    try:
        name, call, schema = _likely(tokenizer, parsers, template_kwargs)
    except ValueError as error:
        names = ", ".join(_mentioned(tokenizer, parsers, template_kwargs))
        hint = f". It or its tokenizer has the markers of {names}: try these" if names else ""
        raise ValueError(f"{error}{hint}") from None
    parser = _knowing(parsers[name](), tokenizer, template_kwargs)
    if isinstance(parser, TextParser):
        parser.reasoning_open = parser.opens_thought(tokenizer, **template_kwargs)
    tools = {_SENTINEL: schema}
    if parser.result_role != "tool" and not _takes_results(parser, tokenizer, call, tools, template_kwargs):
        parser.result_role = "tool"
    return parser


def _mentioned(
    tokenizer: ChatTokenizer,
    parsers: Mapping[str, Callable[..., ToolCallParser]],
    template_kwargs: Mapping[str, Any],
) -> list[str]:
    """Return the formats whose calls open and close with markers of a template or its control tokens."""
    found = [str(template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", ""))]
    with suppress(Exception):  # templates raise any type
        found.append(
            tokenizer.apply_chat_template(
                [QUESTION], tokenize=False, tools=specs_of({_SENTINEL: _SCHEMA}), **template_kwargs
            )
        )
    if hasattr(tokenizer, "added_tokens_decoder"):
        found += control_tokens_of(cast("Any", tokenizer)).values()
    text = "\n".join(found)
    names: list[str] = []
    for name, make in parsers.items():
        parser = make()
        if isinstance(parser, TextParser):
            markers = (*parser.format.openers[:1], parser.format.closer)
            if all(marker in text for marker in markers) and any(map(_MARKUP.search, markers)):
                names.append(name)
    return names


def _knowing(
    parser: ToolCallParser, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]
) -> ToolCallParser:
    """Return the parser configured for a tokenizer with added tokens, else the parser itself."""
    if not hasattr(tokenizer, "added_tokens_decoder"):
        return parser
    return parser.with_tokenizer(cast("Any", tokenizer), **template_kwargs)


def _takes_results(
    parser: ToolCallParser,
    tokenizer: ChatTokenizer,
    call: ParsedCall,
    tools: Tools,
    template_kwargs: Mapping[str, Any],
) -> bool:
    """Return whether the chat template mentions the parser's role of results and renders such messages."""
    source = str(template_kwargs.get("chat_template") or getattr(tokenizer, "chat_template", ""))
    if not re.search(rf"""\\?['"]{re.escape(parser.result_role)}\\?['"]""", source):
        return False
    results = parser.render([call], [ToolResult.from_text(_RESULT)])
    try:
        return _RESULT in rendered(tokenizer, call, tools, results, **template_kwargs).answer
    except ValueError:
        return False


def _likely(
    tokenizer: ChatTokenizer,
    parsers: Mapping[str, Callable[..., ToolCallParser]],
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, ParsedCall, Fields]:
    """Return the name of the parser that fits the template best, the example call and its schema.

    A parser fits if it reads the same values and leaves no markup over. The best one leaves the least text
    and notes; ties are broken by how many of its other markers (of turns and reasoning) the template writes,
    because some families write calls alike. If none fits, plainer calls are tried: some templates garble
    values.

    Raises:
        ValueError: If the template writes no calls, or calls that no parser reads.
    """
    answer = ""
    for kind in _KINDS:
        call, tools = example_call(_SENTINEL, _SCHEMA, kind), {_SENTINEL: _SCHEMA}
        written = rendered(tokenizer, call, tools, **template_kwargs)
        answer = written.answer
        found: list[tuple[int, int, int, str]] = []
        for name, make in parsers.items():
            parser = _knowing(make(), tokenizer, template_kwargs)
            result = _read(parser, written, call, tools)
            if result is not None:
                markers = _markers_seen(parser, answer, tokenizer, template_kwargs)
                found.append((len(result.text), len(result.calls[0].notes), -markers, name))
        if found:
            return min(found, key=lambda item: item[:3])[3], call, _SCHEMA
    raise ValueError(f"no parser reads what the chat template writes: {one_line(answer, 120)}")


def _markers_seen(
    parser: ToolCallParser, answer: str, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]
) -> int:
    """Count the markers of a format, those of calls aside, that a chat template writes."""
    if not isinstance(parser, TextParser):
        return 0
    ends = sum(marker in answer for marker in parser.format.turn_end)
    return ends + parser.opens_thought(tokenizer, **template_kwargs)


def _is_read(result: ParseResult, call: ParsedCall) -> bool:
    """Return whether exactly this call was read, with equal values in any order; True differs from 1."""
    found = [(one.tool, _sorted(one.args), one.error) for one in result.calls]
    return found == [(call.tool, _sorted(call.args), None)]


def _sorted(args: Mapping[str, JSON]) -> str:
    return json.dumps(args, sort_keys=True)


def check_parser(
    parser: ToolCallParser,
    tools: Tools,
    tokenizer: ChatTokenizer | None = None,
    *,
    parsers: Mapping[str, Callable[..., ToolCallParser]] | None = None,
) -> list[str]:
    """Check that a call of each tool reads back, as the parser or the model's chat template writes it.

    If a template garbles values, such as quotes in strings, a plainer call is checked instead and a
    UserWarning shows what the template wrote.

    Args:
        parser: The parser to check.
        tools: Tools that it must be able to call.
        tokenizer: Tokenizer with the model's chat template; if None, the parser writes the calls itself.
        parsers: Factories by name, among which a matching parser is searched for the error message.

    Returns:
        Names of the tools that can be called. Without a tokenizer, tools that the format cannot express are
        left out.

    Raises:
        Mismatch: If a call does not read back or leaves tags of another format over, or if the format can
            express no call of these tools. The message shows the written call and the parser that reads it.
        ValueError: If the template writes no calls.
    """
    schemas = schemas_of(tools) or {}
    checked: list[str] = []
    for name, schema in schemas.items():
        if tokenizer is None:
            call = example_call(name, schema)
            try:
                written = parser.render_call(call)
            except ValueError:
                continue  # the format cannot express this tool, for example a tag for a search
            if not _is_read(parser.parse(written, tools=schemas), call):
                raise Mismatch(_read_reasoning(parser, name, written, None, parsers or {}))
        else:
            _check_template(parser, name, schemas, tokenizer, parsers or {})
        checked.append(name)
    if schemas and not checked:
        raise Mismatch(
            f"parser {parser.name!r} can express a call of none of these tools: {', '.join(schemas)}"
        )
    return checked


def _check_template(
    parser: ToolCallParser,
    name: str,
    schemas: Mapping[str, Fields],
    tokenizer: ChatTokenizer,
    parsers: Mapping[str, Callable[..., ToolCallParser]],
) -> None:
    """Check that a parser reads a call of one tool as a chat template writes it."""
    call = example_call(name, schemas[name])
    full = rendered(tokenizer, call, schemas)
    if _read(parser, full, call, schemas) is not None:
        return
    others = [other for other in parsers if other != parser.name]
    if all(_read(parsers[other](), full, call, schemas) is None for other in others):
        kinds: Mapping[Example, str] = {
            "plain": "quotes, newlines or null",
            "words": "values that are not words",
        }
        for kind, lost in kinds.items():
            call = example_call(name, schemas[name], kind)
            if _read(parser, rendered(tokenizer, call, schemas), call, schemas) is not None:
                message = f"{lost} in a call of {name!r} do not read back"
                written = one_line(full.answer, 160)
                warnings.warn(f"{message}: the chat template writes it as {written}", stacklevel=3)
                return
    raise Mismatch(_read_reasoning(parser, name, full.answer, tokenizer, parsers))


def _read(
    parser: ToolCallParser, written: Rendered, call: ParsedCall, tools: Mapping[str, Fields]
) -> ParseResult | None:
    """Parse the call that a template wrote; return None if values differ or markup is left over."""
    result = parser.parse(written.answer, tools=tools)
    return result if _is_read(result, call) and written.is_whole(parser, result) else None


def _read_reasoning(
    parser: ToolCallParser,
    tool: str,
    written: str,
    tokenizer: ChatTokenizer | None,
    parsers: Mapping[str, Callable[..., ToolCallParser]],
) -> str:
    reason = f"parser {parser.name!r} does not read a call of {tool!r} written as {one_line(written, 160)}"
    if tokenizer is None:
        return reason
    others = {name: make for name, make in parsers.items() if name != parser.name}
    try:
        return f"{reason}; {_likely(tokenizer, others)[0]!r} does"
    except ValueError:
        return f"{reason}; no other parser does either"
