"""Which format a model speaks: the one whose parser reads what the model's chat template writes."""

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
    """A tokenizer with a chat template, as those of transformers are."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, **options: Any) -> Any:
        """Write a conversation as the model reads it."""
        ...


class Mismatch(ValueError):
    """A parser does not read what the model's chat template writes."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """How a chat template writes an assistant message with one call.

    Attributes:
        answer: The text of the message, and the text that follows it.
        markup: The tags and control tokens of a conversation without calls.
    """

    answer: str
    markup: frozenset[str]

    def is_whole(self, parser: ToolCallParser, result: ParseResult) -> bool:
        """Return whether the text beside the calls has no markup but that of messages without calls."""
        known = {*self.markup, *parser.stop}
        if isinstance(parser, TextParser):
            known.update((*parser.reasoning_tags, *parser.reasoning_tags.values(), *parser.turn_end))
        return all(match[0] in known for match in _MARKUP.finditer(result.text))


def example_call(name: str, schema: Fields, kind: Example = "full") -> ParsedCall:
    """Return a call of a tool, with an argument for each property that its schema names.

    Args:
        name: The tool.
        schema: JSON Schema of its input.
        kind: "plain" leaves out what chat templates get wrong: quotes, newlines and null; "words" has strings
            of one word as its only arguments, for templates that write all values as strings.
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
    """Write a call by the chat template of a model, and perhaps messages behind it.

    template_kwargs: Options of the template, such as `enable_thinking`.

    Raises:
        ValueError: the template cannot, or leaves it out.
    """

    def write(messages: list[Any], **options: Any) -> str:
        all_options = {**template_kwargs, **options}
        return tokenizer.apply_chat_template(messages, tokenize=False, tools=specs_of(tools), **all_options)

    reason: object = "it leaves calls out"
    odd: Rendered | None = None
    for arguments in (call.args, dumps(call.args)):  # some templates want them as a string
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
        # A template that wants a string writes a mapping as Python does.
        if not isinstance(arguments, str) and arguments and str(arguments) in answer:
            odd = found
            continue
        return found
    if odd is not None:
        return odd
    raise ValueError(f"the chat template writes no tool calls ({reason}); name the parser yourself")


def _markup(before: str, write: Callable[..., str]) -> frozenset[str]:
    """Return the markup of a conversation whose answer calls nothing."""
    said = [QUESTION, {"role": "assistant", "content": "hello"}, QUESTION]
    texts = [before]
    for messages, options in ((said, {}), ([QUESTION], {"add_generation_prompt": True})):
        with suppress(Exception):  # templates may refuse what others take
            texts.append(write(messages, **options))
    return frozenset(match[0] for text in texts for match in _MARKUP.finditer(text))


def _shared(before: str, after: str) -> str:
    """What both texts begin with; no marker is cut in two."""
    shared = "".join(
        a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    )
    return shared[: shared.rfind("<")] if shared.rfind("<") > shared.rfind(">") else shared


def detect(
    tokenizer: ChatTokenizer, parsers: Mapping[str, Callable[..., ToolCallParser]], **template_kwargs: Any
) -> ToolCallParser:
    """Return the parser that reads the calls of a chat template, set up for it.

    Set up are whether the model begins inside a thought, and the role of results.

    Args:
        tokenizer: One with a chat template.
        parsers: Name → what makes the parser.
        **template_kwargs: Options of the template, such as `enable_thinking`.

    Raises:
        ValueError: The template writes no calls, or none that a parser reads.
    """
    name, call, schema = _likely(tokenizer, parsers, template_kwargs)
    parser = _knowing(parsers[name](), tokenizer, template_kwargs)
    if isinstance(parser, TextParser):
        parser.reasoning_open = parser.opens_thought(tokenizer, **template_kwargs)
    tools = {_SENTINEL: schema}
    if parser.result_role != "tool" and not _takes_results(parser, tokenizer, call, tools, template_kwargs):
        parser.result_role = "tool"
    return parser


def _knowing(
    parser: ToolCallParser, tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]
) -> ToolCallParser:
    """Return a parser that has learned what it can from a tokenizer."""
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
    """Return whether the chat template knows the role that the parser gives to results, and writes them."""
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
    """Return the name of the parser that leaves least of a sentinel's call over, the call and its schema.

    Parsers that leave markup over, or that read other values than were written, do not count. For templates
    that write some values wrong there are plainer calls. Of parsers that leave as little, the one counts
    whose other markers the template writes: some families write their calls alike, and differ in what ends a
    turn and opens a thought.

    Raises:
        ValueError: The template writes no calls, or none that a parser reads.
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
    """Count the markers of a format that a chat template writes, those of calls aside."""
    if not isinstance(parser, TextParser):
        return 0
    ends = sum(marker in answer for marker in parser.turn_end)
    return ends + parser.opens_thought(tokenizer, **template_kwargs)


def _is_read(result: ParseResult, call: ParsedCall) -> bool:
    """Return whether one call was found, with the same values, in any order; True is not 1 here."""
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
    """Check that a call of each tool reads back: as the parser writes it, or as the model's template does.

    Where a template garbles values, such as quotes in strings, no parser can give them back: a plainer call
    is tried then, and a UserWarning tells what was written.

    Args:
        parser: The parser to check.
        tools: The tools that it is to call.
        tokenizer: The model's, with its chat template; None: the parser writes the calls itself.
        parsers: Among which to look for the right one, if this is the wrong one.

    Returns:
        The names of the tools that can be called so; without a tokenizer, those that the format cannot say
        are missing.

    Raises:
        Mismatch: A call does not read back, or leaves tags of another format over; the message shows what was
            written, and names the parser that reads it. Or no tool can be called in this format.
        ValueError: The template writes no calls.
    """
    schemas = schemas_of(tools) or {}
    checked: list[str] = []
    for name, schema in schemas.items():
        if tokenizer is None:
            call = example_call(name, schema)
            try:
                written = parser.render_call(call)
            except ValueError:
                continue  # this format is for other tools, such as a tag for a search
            if not _is_read(parser.parse(written, tools=schemas), call):
                raise Mismatch(_read_reasoning(parser, name, written, None, parsers or {}))
        else:
            _check_template(parser, name, schemas, tokenizer, parsers or {})
        checked.append(name)
    if schemas and not checked:
        raise Mismatch(
            f"parser {parser.name!r} can write a call of none of these tools: {', '.join(schemas)}"
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
    """Read the call that a template wrote; return None if its values differ, or markup is left over."""
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
        return f"{reason}; nor does any other"
