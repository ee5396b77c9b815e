"""The interface of parsers: read the calls of a message, write results as messages, escape control tokens."""

from __future__ import annotations

import copy
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from inspect import getattr_static, isfunction
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, cast

from torchrl_agentic.errors import Interface
from torchrl_agentic.messages import (
    JSON,
    CallError,
    Content,
    Fields,
    Message,
    ParsedCall,
    ParseResult,
    TextPart,
    ToolResult,
    content_text,
    fields_of,
)
from torchrl_agentic.parsers.control_tokens import (
    BREAK,
    FAMILY_MARKERS,
    SHAPED,
    SHAPES,
    AddedTokens,
    control_tokens_of,
)
from torchrl_agentic.text import MAX_DEPTH
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.tool_adapter import ensure_tool

if TYPE_CHECKING:
    from torchrl_agentic.parsers.streaming import Stream

logger = logging.getLogger(__name__)

Tools = Iterable[Tool | Fields] | Mapping[str, Fields]
"""Tools: `Tool` objects, their specs as API servers take them, or JSON Schemas of the input by name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is read from one message. Calls beyond them become error entries.

    Attributes:
        calls: Number of calls per message.
        argument_bytes: Size of the arguments of one call, in UTF-8 bytes.
        depth: Nesting depth of objects and lists.
    """

    calls: int = 256
    argument_bytes: int = 4_000_000
    depth: int = MAX_DEPTH

    def __post_init__(self) -> None:
        """Check that each limit is positive."""
        if min(self.calls, self.argument_bytes, self.depth) < 1:
            raise ValueError(f"limits must be at least 1; got {self}")


LIMITS = Limits()
SPEAKERS = frozenset({"system", "developer", "user", "assistant"})
"""Roles of messages that are not results of tools, or not always."""


class Tokenizer(Protocol):
    """The methods of a tokenizer that `parse_tokens` needs; those of transformers have them."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Return the text of token ids.

        Args:
            token_ids: Ids to decode.
            skip_special_tokens: Whether special tokens are left out of the text.
        """
        ...

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token; None or the id of the unknown token if it is not in the vocabulary."""
        ...

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the token of an id."""
        ...


class ToolCallParser(metaclass=Interface, members=("parse", "render_call", "render_result")):
    """The tool-call format of a model family; stateless, so one object serves all conversations.

    `isinstance(item, ToolCallParser)` also accepts other classes with the methods `parse`, `render_call` and
    `render_result`; see `get_parser`.

    Arguments of `render_result` and `render` are escaped before the methods of a subclass receive them: they
    contain neither control tokens nor markers of the format (`control_markers`), in names and ids either.
    `with_tokenizer` sets which tokens those are.

    Contract, checked by `testing.ParserContract`: `parse` never raises on text of a model, returns one entry
    per call or attempted call in the order written, and loses no byte (`text` and the spans of the calls make
    up `raw`). The same text gives the same ids. `parse(render_call(call))` returns an equal call. A message
    may be a mapping, whose content is text, None or a list of parts (see `messages.content_text`). Calls
    beyond `limits` are error entries with the code "over_limit" or "too_large".

    Formats whose calls begin with a marker should subclass `TextParser`, which implements most methods.

    Attributes:
        name: The registered name.
        aliases: Other names: those of vLLM, SGLang, verl and TorchRL, and of models.
        models: Models that use this format, for the table of formats.
        example: A short call, for the table of formats.
        tool_names: Regular expression of the names that the API of this format accepts; "" for any.
        stop: Strings at which sampling must stop so that the tools can run.
        result_role: Role of the messages that carry results.
        result_around: Text before and after a result in its message.
        limits: Bounds on what is read from one message.
        added_tokens: Control tokens of the model's tokenizer; None if they are unknown, in which case the
            control tokens of all known families are escaped.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[str] = ""
    example: ClassVar[str] = ""
    tool_names: ClassVar[str] = ""
    stop: tuple[str, ...] = ()
    result_role: str = "tool"
    result_around: tuple[str, str] = ("", "")
    limits: Limits = LIMITS
    added_tokens: tuple[str, ...] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap `render_result` and `render`, own or inherited, so that they receive escaped arguments."""
        super().__init_subclass__(**options)
        for name, escaping in (("render_result", _escaping_one), ("render", _escaping_all)):
            method = getattr_static(cls, name)
            # `wraps` copies attributes, so the mark counts only on the function that it refers to.
            if method is not vars(ToolCallParser)[name] and getattr(method, "escaping", None) is not method:
                made: Any = escaping(method)
                made.escaping = made
                setattr(cls, name, made)

    def with_tokenizer(self, tokenizer: AddedTokens, **template_kwargs: Any) -> Self:
        """Return a copy of the parser that escapes the control tokens of one tokenizer only.

        Args:
            tokenizer: The model's tokenizer; see `control_tokens.control_tokens_of`.
            **template_kwargs: Options of its chat template, for formats that read settings from the template.
        """
        del template_kwargs
        made = copy.copy(self)
        made.added_tokens = tuple(control_tokens_of(tokenizer).values())
        return made

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers of this format that tool results must not contain, control tokens or not."""
        return ()

    @cached_property
    def control_escaper(self) -> Escaper:
        """Escaper of control tokens, for any text the model did not write; markers of the format are kept."""
        return escaper(FAMILY_MARKERS if self.added_tokens is None else self.added_tokens)

    @cached_property
    def markup_escaper(self) -> Escaper:
        """Escaper of control tokens and the markers of this format, for results."""
        return escaper((*self.control_escaper.markers, *self.control_markers()))

    @abstractmethod
    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message.

        Args:
            response: Its text, or a mapping as in chat histories and responses of API servers.
            tools: Tools that may be called. Formats without typed values need their schemas.
            turn: Number of the turn; calls without an id get `call_{turn}_{index}`.

        Returns:
            The text outside of calls and one entry per call; entries that cannot be read have an `error`.
        """

    def parse_tokens(
        self, ids: Sequence[int], tokenizer: Tokenizer, *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read an assistant message from the token ids that the model sampled.

        Where the tokenizer has the markers of the format as single tokens, only those tokens count; the same
        characters in other tokens are text.

        Args:
            ids: Sampled token ids.
            tokenizer: The tokenizer of the model.
            tools: Tools that may be called.
            turn: Number of the turn, for ids of calls that have none.
        """
        return self.parse(tokenizer.decode(ids, skip_special_tokens=False), tools=tools, turn=turn)

    def stream(self, *, tools: Tools | None = None, turn: int = 0) -> Stream:
        """Return a stream that reads a message while it is being written.

        Args:
            tools: Tools that may be called.
            turn: Number of the turn, for ids of calls that have none.
        """
        from torchrl_agentic.parsers.streaming import WholeStream  # only what streams needs it

        return WholeStream(self, tools, turn)

    @abstractmethod
    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the model would, for few-shot prompts, scripted policies and tests.

        Raises:
            ValueError: If the format cannot express the call.
        """

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write several calls as they appear in one message."""
        return "\n".join(map(self.render_call, calls))

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a message.

        Args:
            call_id: Id of the call.
            result: Result of the call.

        Returns:
            A mapping with role, content and the other keys that chat templates of the family read.
        """
        text, call_id = self.markup_escaper.escape(result.text), self.control_escaper.escape(call_id)
        content = f"{self.result_around[0]}{text}{self.result_around[1]}"
        return {"role": self.result_role, "content": content, "tool_call_id": call_id}

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write all results of a turn as messages, in the order of the calls.

        Override this method if one message holds all results. Messages get the name of their tool, which
        some chat templates write, also if another method wrote them (`with_tool_names`).

        Args:
            calls: Calls of the turn.
            results: One result per call.
        """
        pairs = zip(calls, results, strict=True)
        messages = [self.render_result(call.call_id, result) for call, result in pairs]
        return with_tool_names(messages, [escaped_call(call, self.control_escaper.escape) for call in calls])

    def structural_tag(
        self, tools: Tools, *, tool_choice: Literal["auto", "required"] = "auto", parallel: bool = True
    ) -> dict[str, JSON] | None:
        """Return an xgrammar structural tag that rules out malformed calls, or None.

        Its JSON goes into vLLM's `StructuredOutputsParams(structural_tag=…)`; text outside of calls stays
        free. Constrained sampling changes the log-probabilities of the behaviour policy: see
        `docs/howto/formats.md`.

        Args:
            tools: Tools that may be called.
            tool_choice: "auto", or "required" for at least one call.
            parallel: Whether a message may have several calls.
        """
        del tools, tool_choice, parallel
        return None

    def __repr__(self) -> str:
        hidden = ("added_tokens", "_learns_reasoning", "format", "stop")
        shown = {key: value for key, value in self._state().items() if key not in hidden}
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in shown.items())})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ToolCallParser)
            and type(other) is type(self)
            and other._state() == self._state()
        )

    def __getstate__(self) -> dict[str, JSON]:
        return self._state()

    def _state(self) -> dict[str, JSON]:
        """Return the attributes without cached properties."""
        kind = type(self)
        return {
            key: value
            for key, value in vars(self).items()
            if not isinstance(getattr(kind, key, None), cached_property)
        }

    def __hash__(self) -> int:
        return hash(type(self))


def _escaping_one(render_result: Any) -> Callable[..., Any]:
    """Wrap a `render_result` so that it receives an escaped result."""
    write = _method(render_result)

    @wraps(render_result)
    def escaped(self: ToolCallParser, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        text = result.text
        clean = _with_text(result, text, self.markup_escaper.escape(text))
        return write(self, self.control_escaper.escape(call_id), clean)

    return escaped


def _escaping_all(render: Any) -> Callable[..., Any]:
    """Wrap a `render` so that it receives escaped calls and results, safe also if written without a gap."""
    write = _method(render)

    @wraps(render)
    def escaped(
        self: ToolCallParser, calls: Sequence[ParsedCall], results: Sequence[ToolResult]
    ) -> list[Mapping[str, JSON]]:
        escape = self.control_escaper.escape
        named = [escaped_call(call, escape) for call in calls]
        texts = [result.text for result in results]
        clean = map(_with_text, results, texts, self.markup_escaper.together(texts))
        return with_tool_names(list(write(self, named, list(clean))), named)

    return escaped


def escaped_call(call: ParsedCall, escape: Callable[[str], str]) -> ParsedCall:
    """Return a call whose tool and id are escaped.

    Args:
        call: The call.
        escape: Returns a text with its control tokens escaped.
    """
    tool, call_id = escape(call.tool), escape(call.call_id)
    is_clean = tool == call.tool and call_id == call.call_id
    return call if is_clean else replace(call, tool=tool, call_id=call_id)


def _method(found: Any) -> Callable[..., Any]:
    """Return a class member as a function whose first argument is the object, static methods included."""

    def bound(self: ToolCallParser, *args: Any) -> Any:
        return (found.__get__(self, type(self)) if hasattr(found, "__get__") else found)(*args)

    return cast("Any", found) if isfunction(found) else bound


def _with_text(result: ToolResult, before: str, after: str) -> ToolResult:
    """Return a copy of a result with new text of as many lines; parts with unchanged text are kept."""
    if before == after:
        return result
    lines = iter(after.split("\n"))
    texts = ["\n".join(islice(lines, str(part).count("\n") + 1)) for part in result.parts]
    pairs = zip(result.parts, texts, strict=True)
    return replace(result, parts=tuple(part if str(part) == text else TextPart(text) for part, text in pairs))


def with_tool_names(
    messages: Sequence[Mapping[str, JSON]], calls: Sequence[ParsedCall]
) -> list[Mapping[str, JSON]]:
    """Return the messages of a turn's results with the name of the tool under "name", where it is missing.

    A message belongs to the call with its id, else to the one in its place if there are as many messages as
    calls. Messages with a role that is not of results alone are kept: there, a name is that of the speaker.

    Args:
        messages: Messages that carry the results.
        calls: Calls of the turn.
    """
    names = {call.call_id: call.tool for call in calls}
    places = [call.tool for call in calls] if len(messages) == len(calls) else [""] * len(messages)
    made: list[Mapping[str, JSON]] = []
    for message, place in zip(messages, places, strict=True):
        name = names.get(cast("str", message.get("tool_call_id")), place)
        is_named = message["role"] in SPEAKERS or message.get("name") or not name
        made.append(message if is_named else {**message, "name": name})
    return made


def schemas_of(tools: Tools | None) -> Mapping[str, Fields] | None:
    """Return the JSON Schema of each tool's input by the name of the tool.

    Raises:
        TypeError: If an item is neither a tool nor a spec.
    """
    if tools is None or isinstance(tools, Mapping):
        return cast("Mapping[str, Fields] | None", tools)
    schemas: dict[str, Fields] = {}
    for tool in tools:
        if isinstance(tool, Mapping):
            function = fields_of(tool.get("function")) or tool
            name, schema = function.get("name"), fields_of(function.get("parameters")) or {}
        else:
            name, schema = getattr(tool, "name", None), cast("Fields", getattr(tool, "input_schema", {}))
        if not isinstance(name, str):
            raise TypeError(f"a tool must be a Tool or a spec with a name; got {tool!r}")
        schemas[name] = schema
    return schemas


def specs_of(tools: Tools) -> list[dict[str, JSON]]:
    """Return specs of the tools as chat templates and API servers take them: `{"type": "function", …}`."""
    if isinstance(tools, Mapping):
        described = cast("Mapping[str, Fields]", tools)
        tools = [
            {"name": name, "description": "", "parameters": schema} for name, schema in described.items()
        ]
    return [
        {"type": "function", "function": tool.get("function", tool)}
        if isinstance(tool, Mapping)
        else ensure_tool(tool).spec()
        for tool in tools
    ]


def require_name(call: ParsedCall) -> None:
    """Check that a call's tool name can be read back: not empty, no surrounding white space.

    Raises:
        ValueError: If it cannot.
    """
    if not call.tool or call.tool != call.tool.strip():
        reason = "it is empty or has surrounding white space"
        raise ValueError(f"the format cannot express the name {call.tool!r}: {reason}")


def message_text(response: str | Mapping[str, JSON]) -> str:
    """Return all text of a message, a string or a mapping."""
    return response if isinstance(response, str) else content_text(cast("Content", response.get("content")))


def parse_message(
    parser: ToolCallParser, message: Message, *, tools: Tools, turn: int, trajectory: str
) -> ParseResult:
    """Read the calls of a message; a parser that raises yields one error.

    An incomplete message and a refusal have no calls.

    Args:
        parser: The parser.
        message: A message of any role; only the assistant's can contain calls.
        tools: Tools that may be called, for parsers of untyped values.
        turn: Number of the turn, for the ids of calls.
        trajectory: Name of the trajectory, for log lines.
    """
    if message.role != "assistant" or message.finish != "stop":
        return ParseResult(message.text, (), message.text)
    response: Any = message.content
    if message.tool_calls or not isinstance(response, str):
        response = {"role": "assistant", "content": response, "tool_calls": list(message.tool_calls)}
    try:
        found: Any = parser.parse(response, tools=tools, turn=turn)  # adapted ones have classes of their own
        if isinstance(found, ParseResult):
            return found
        return ParseResult(str(found.text), tuple(found.calls), response)
    except Exception as error:
        logger.exception("parser %r crashed (trajectory %s)", parser, trajectory)
        reason = CallError("parser_crash", f"the message could not be read ({type(error).__name__})")
        return ParseResult(message.text, (ParsedCall("", {}, f"call_{turn}_0", error=reason),), "")


def escape_control_tokens(text: str, markers: Iterable[str] = FAMILY_MARKERS) -> str:
    """Return the text with a zero-width space after the first character of each marker.

    The text stays readable, but no tokenizer reads a control token out of it. Text without markers and text
    that is already escaped are returned unchanged.

    Args:
        text: Text of a tool, a page or a server.
        markers: Strings to escape: `control_tokens_of(tokenizer).values()` if the tokenizer is known. Strings
            with the shape of a control token, such as `<|…|>`, are always escaped.
    """
    return escaper(tuple(markers)).escape(text)


class Escaper:
    """A compiled `escape_control_tokens` for many texts.

    Args:
        markers: Strings to escape.
    """

    def __init__(self, markers: Iterable[str] = FAMILY_MARKERS) -> None:
        self.markers = tuple(dict.fromkeys(marker for marker in markers if marker))
        patterns: dict[str, tuple[str, str]] = {}
        others = [marker for marker in self.markers if not SHAPED.fullmatch(marker)]
        for first in dict.fromkeys([*(first for first, _ in SHAPES), *(marker[0] for marker in others)]):
            shapes = [shape for one, shape in SHAPES if one == first]
            rests = [marker[1:] for marker in others if marker[0] == first]
            # A marker of one character would be found again before the break.
            rest = f"(?!{BREAK})" if "" in rests else f"(?:{'|'.join([*shapes, *_branches(rests)])})"
            if not shapes and "" not in rests:  # brackets are frequent; test the next character first
                rest = f"(?=[{''.join(sorted({re.escape(text[0]) for text in rests}))}]){rest}"
            patterns[first] = re.escape(first), rest
        # One search per first character: a pattern that begins with a literal skips to it at once.
        self._found = tuple((first, re.compile(head + rest)) for first, (head, rest) in patterns.items())
        # Match only the first character, so that overlapping markers are all found.
        self._firsts = re.compile("|".join(f"{head}(?={rest})" for head, rest in patterns.values()))

    def escape(self, text: str) -> str:
        """Return the text with its markers escaped."""
        for first, pattern in self._found:
            if first in text and pattern.search(text) is not None:
                return self._firsts.sub(_broken, text)
        return text

    def together(self, texts: Sequence[str]) -> list[str]:
        """Escape texts that may be joined without a gap, as they are or stripped of white space."""
        made = [self.escape(text) for text in texts]
        if any(self.escape(joined) != joined for joined in ("".join(made), "".join(map(str.strip, made)))):
            made[:-1] = [f"{text}{BREAK}" for text in made[:-1]]
        return made

    def json(self, value: JSON) -> JSON:
        """Return a JSON value with the markers in its strings and keys escaped."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, JSON]", value)
            return {self.escape(key): self.json(item) for key, item in fields.items()}
        if isinstance(value, list | tuple):
            return [self.json(item) for item in cast("Sequence[JSON]", value)]
        return value


escaper = lru_cache(maxsize=64)(Escaper)
"""Return the cached escaper of a tuple of markers."""


def _branches(texts: Sequence[str]) -> list[str]:
    """Write texts as alternatives of a pattern that reads each character once."""
    if "" in texts:
        return [""]
    groups = [(first, [*group]) for first, group in groupby(sorted(texts), key=lambda text: text[0])]
    return [
        f"{re.escape(first)}(?:{'|'.join(_branches([text[1:] for text in group]))})"
        for first, group in groups
    ]


def _broken(match: re.Match[str]) -> str:
    return f"{match[0]}{BREAK}"
