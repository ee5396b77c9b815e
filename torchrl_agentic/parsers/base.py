"""What every parser is: from one message to its calls, and from results back to messages."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from inspect import getattr_static, isfunction
from itertools import islice
from typing import Any, ClassVar, Literal, Protocol, Self, cast

from torchrl_agentic.errors import Interface
from torchrl_agentic.messages import (
    JSON,
    Content,
    Fields,
    ParsedCall,
    ParseResult,
    TextPart,
    ToolResult,
    content_text,
    fields_of,
)
from torchrl_agentic.parsers.control_tokens import (
    FAMILY_MARKERS,
    AddedTokens,
    Escaper,
    control_tokens_of,
    escaper,
)
from torchrl_agentic.parsers.streaming import Stream, WholeStream
from torchrl_agentic.text import MAX_DEPTH
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.tool_adapter import ensure_tool

Tools = Iterable[Tool | Fields] | Mapping[str, Fields]
"""The tools there are: `Tool`s, their specs as API servers have them, or name → JSON Schema of the input."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of one message is read. What is beyond becomes an error entry and is never cut.

    calls: how many; telling what is wrong with one costs time too. argument_bytes: of one call, in UTF-8.
    depth: of brackets inside brackets.
    """

    calls: int = 256
    argument_bytes: int = 4_000_000
    depth: int = MAX_DEPTH

    def __post_init__(self) -> None:
        """Refuse what would let nothing through."""
        if min(self.calls, self.argument_bytes, self.depth) < 1:
            raise ValueError(f"limits are 1 at least; got {self}")


LIMITS = Limits()


class Tokenizer(Protocol):
    """What reading tokens needs of a tokenizer; those of transformers have it."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Give the text of some tokens."""
        ...

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Give the id of a token; that of the unknown token, or None, if there is no such token."""
        ...

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Give the token of an id."""
        ...


class ToolCallParser(metaclass=Interface, members=("parse", "render_call", "render_result")):
    """The format in which a family of models calls tools. It has no state; one object serves everybody.

    `isinstance(item, ToolCallParser)` is true of look-alikes too: objects with `parse`, `render_call` and
    `render_result`; see `get_parser`.

    What `render_result` and `render` of a subclass are given is escaped already, names and ids included: no
    control token stands in it, nor a marker of the format (`control_markers`). This class sees to that, so
    that a format cannot forget it. See `with_tokenizer` for which tokens those are.

    Attributes:
        name: The registered name.
        aliases: Other names of it: those of vLLM, SGLang, verl and TorchRL, and of models.
        models: Which models write this format, for the table of formats.
        example: A call in short, for the table of formats.
        stop: Strings at which a model that waits for results must stop.
        result_role: The role of the messages that answer.
        names_tool: Whether those messages also have the name of the tool, as "name".

    Promises, which `testing.ParserContract` checks: `parse` never raises on what a model writes, gives one
    entry per attempt in the order written, loses no byte (`text` and the spans of the calls make up `raw`),
    and gives the same ids for the same text. `parse(render_call(call))` gives the call back. A message may be
    a mapping, whose content is text, None or a list of parts (`messages.content_text` reads all three). Calls
    beyond `limits` are error entries with the code "over_limit" or "too_large".

    `parsers.text.TextParser` does most of it for formats with an opener: subclass that one if you can.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    models: ClassVar[str] = ""
    example: ClassVar[str] = ""
    stop: tuple[str, ...] = ()
    result_role: str = "tool"
    names_tool: ClassVar[bool] = False
    limits: Limits = LIMITS
    added_tokens: tuple[str, ...] | None = None
    """The control tokens of the model's tokenizer; None: it is not known, and those of all families count."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Escape what the methods are given that write results, whichever base class they come from."""
        super().__init_subclass__(**options)
        for name, escaping in (("render_result", _escaping_one), ("render", _escaping_all)):
            method = getattr_static(cls, name)
            # `wraps` copies attributes, so that a mark is one only of the function that it names.
            if method is not vars(ToolCallParser)[name] and getattr(method, "escaping", None) is not method:
                made: Any = escaping(method)
                made.escaping = made
                setattr(cls, name, made)

    def with_tokenizer(self, tokenizer: AddedTokens, **template_kwargs: Any) -> Self:
        """Return a parser of the same format that escapes the control tokens of a tokenizer, and no others.

        Args:
            tokenizer: The model's; see `control_tokens.control_tokens_of`.
            **template_kwargs: Options of its chat template, for formats that learn from the template.
        """
        del template_kwargs
        made = copy.copy(self)
        made.added_tokens = tuple(control_tokens_of(tokenizer).values())
        return made

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers of this format that must not come out of a tool, control tokens or not."""
        return ()

    @cached_property
    def control_escaper(self) -> Escaper:
        """What escapes control tokens, in whatever others write; markers of this format may stay."""
        return escaper(FAMILY_MARKERS if self.added_tokens is None else self.added_tokens)

    @cached_property
    def markup_escaper(self) -> Escaper:
        """What escapes control tokens and the markers of this format, in results."""
        return escaper((*self.control_escaper.markers, *self.control_markers()))

    @abstractmethod
    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message: its text, or a mapping as API servers and chat histories have it.

        tools: what may be called, for formats whose values have no types of their own. turn: goes into the
        ids of calls that bring none, `call_{turn}_{index}`.
        """

    def parse_tokens(
        self, ids: Sequence[int], tokenizer: Tokenizer, *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read the tokens that a model sampled.

        Where the tokenizer has the markers of the format as tokens of their own, only those count: the same
        characters, spelled with others, are text.
        """
        return self.parse(tokenizer.decode(ids, skip_special_tokens=False), tools=tools, turn=turn)

    def stream(self, *, tools: Tools | None = None, turn: int = 0) -> Stream:
        """Read a message while it is being written."""
        return WholeStream(self, tools, turn)

    @abstractmethod
    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the model would, for few-shot prompts, scripted policies and tests.

        Raises:
            ValueError: the format cannot say it.
        """

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write several calls as one message would hold them."""
        return "\n".join(map(self.render_call, calls))

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a message: role, content, and whatever else the family's template reads."""
        content, call_id = self.markup_escaper.escape(result.text), self.control_escaper.escape(call_id)
        return {"role": self.result_role, "content": content, "tool_call_id": call_id}

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write all results of a turn, in the order of the calls.

        Overridden where one message holds them all.
        """
        pairs = zip(calls, results, strict=True)
        messages = [self.render_result(call.call_id, result) for call, result in pairs]
        if not self.names_tool:
            return messages
        names = [self.control_escaper.escape(call.tool) for call in calls]
        return [{**message, "name": name} for message, name in zip(messages, names, strict=True)]

    def structural_tag(
        self, tools: Tools, *, tool_choice: Literal["auto", "required"] = "auto", parallel: bool = True
    ) -> dict[str, JSON] | None:
        """Describe the calls of these tools as an xgrammar structural tag, or None where there is none.

        As JSON it is what vLLM's `StructuredOutputsParams(structural_tag=…)` takes: free text stays free, a
        call cannot be malformed. The behaviour policy is then the masked one: see the README on log-probs.
        tool_choice: "auto", or "required" for one call at least. parallel: whether there may be several.
        """
        del tools, tool_choice, parallel
        return None

    def __repr__(self) -> str:
        hidden = ("added_tokens", "_learns_reasoning")
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
        """What makes this parser what it is, without what is only remembered of it."""
        kind = type(self)
        return {
            key: value
            for key, value in vars(self).items()
            if not isinstance(getattr(kind, key, None), cached_property)
        }

    def __hash__(self) -> int:
        return hash(type(self))


def _escaping_one(render_result: Any) -> Callable[..., Any]:
    """Make a `render_result` that is given an escaped result."""
    write = _method(render_result)

    @wraps(render_result)
    def escaped(self: ToolCallParser, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        text = result.text
        clean = _with_text(result, text, self.markup_escaper.escape(text))
        return write(self, self.control_escaper.escape(call_id), clean)

    return escaped


def _escaping_all(render: Any) -> Callable[..., Any]:
    """Make a `render` that is given escaped calls and results; it may write them one behind the other."""
    write = _method(render)

    @wraps(render)
    def escaped(
        self: ToolCallParser, calls: Sequence[ParsedCall], results: Sequence[ToolResult]
    ) -> list[Mapping[str, JSON]]:
        escape = self.control_escaper.escape
        named = [replace(call, tool=escape(call.tool), call_id=escape(call.call_id)) for call in calls]
        texts = [result.text for result in results]
        clean = map(_with_text, results, texts, self.markup_escaper.together(texts))
        return write(self, named, list(clean))

    return escaped


def _method(found: Any) -> Callable[..., Any]:
    """Return what stands in a class as a function that takes the object first, static methods included."""

    def bound(self: ToolCallParser, *args: Any) -> Any:
        return (found.__get__(self, type(self)) if hasattr(found, "__get__") else found)(*args)

    return cast("Any", found) if isfunction(found) else bound


def _with_text(result: ToolResult, before: str, after: str) -> ToolResult:
    """Return a result with another text of as many lines; parts whose text is the same stay as they are."""
    if before == after:
        return result
    lines = iter(after.split("\n"))
    texts = ["\n".join(islice(lines, str(part).count("\n") + 1)) for part in result.parts]
    pairs = zip(result.parts, texts, strict=True)
    return replace(result, parts=tuple(part if str(part) == text else TextPart(text) for part, text in pairs))


def schemas_of(tools: Tools | None) -> Mapping[str, Fields] | None:
    """Give name → JSON Schema of the input, whichever way the tools are given.

    Raises:
        TypeError: one of them is no tool.
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
            raise TypeError(f"a tool is a Tool or its spec, with a name; got {tool!r}")
        schemas[name] = schema
    return schemas


def specs_of(tools: Tools) -> list[dict[str, JSON]]:
    """Give the tools as chat templates and API servers have them: `{"type": "function", "function": …}`."""
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
    """Check that the name of a call's tool reads back: it is not empty, and no white space is around it.

    Raises:
        ValueError: It does not.
    """
    if not call.tool or call.tool != call.tool.strip():
        reason = "it is empty, or has white space around it"
        raise ValueError(f"the format cannot hold the name {call.tool!r}: {reason}")


def message_text(response: str | Mapping[str, JSON]) -> str:
    """All text of a message, given as such or as a mapping."""
    return response if isinstance(response, str) else content_text(cast("Content", response.get("content")))
