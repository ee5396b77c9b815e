"""The base class of formats whose calls are part of the text, each after an opener."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Self

from torchrl_agentic.messages import JSON, Fields, ParsedCall, ParseResult
from torchrl_agentic.parsers.base import (
    LIMITS,
    Limits,
    Tokenizer,
    ToolCallParser,
    Tools,
    message_text,
    require_name,
    schemas_of,
)
from torchrl_agentic.parsers.control_tokens import AddedTokens
from torchrl_agentic.parsers.engine.decoded_calls import read_message_calls
from torchrl_agentic.parsers.engine.marker_tokens import MarkerTokens
from torchrl_agentic.parsers.engine.partial_call import CallParseError, assign_ids
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, finish
from torchrl_agentic.parsers.engine.reasoning import opens_thought
from torchrl_agentic.parsers.engine.scan import scan_text
from torchrl_agentic.parsers.engine.structural_tag import Frame, parameters, structural_tag
from torchrl_agentic.parsers.engine.text_format import ReasoningPolicy, TextFormat
from torchrl_agentic.parsers.streaming import Event, Stream, events_of


class TextParser(ToolCallParser):
    """A format whose calls begin with an opener; a subclass describes it, and reads and writes blocks.

    If the text of a message mapping contains no calls, its "tool_calls" are read.

    Args:
        parse_reasoning: What to do with calls inside closed reasoning: leave them as "text", answer them with
            an "error", or "execute" them; None for the default of the format, "text" for most. Calls in
            reasoning that never closes are calls in any case, because models in training write such messages.
        reasoning_open: Whether the prompt has opened the reasoning; None means False until `with_tokenizer`
            has read the chat template.
        tolerance: "lenient" allows a fixed list of repairs without loss (`json_text.repair_json`), each noted
            on its call.
        limits: Bounds on what is read from one message.

    Attributes:
        format: Description of the format: markers and what surrounds calls.
        stop: Strings at which sampling must stop; the ends of a turn if the class names no others.
    """

    format: TextFormat

    def __init__(
        self,
        *,
        parse_reasoning: ReasoningPolicy | None = None,
        reasoning_open: bool | None = None,
        tolerance: Literal["strict", "lenient"] = "strict",
        limits: Limits = LIMITS,
    ) -> None:
        parse_reasoning = self.format.parse_reasoning if parse_reasoning is None else parse_reasoning
        if parse_reasoning not in ("text", "error", "execute"):
            raise ValueError(f'parse_reasoning is "text", "error" or "execute"; got {parse_reasoning!r}')
        if tolerance not in ("strict", "lenient"):
            raise ValueError(f'tolerance is "strict" or "lenient"; got {tolerance!r}')
        self.parse_reasoning: ReasoningPolicy = parse_reasoning
        self.reasoning_open = bool(reasoning_open)
        self._learns_reasoning = reasoning_open is None
        self.tolerance = tolerance
        self.limits = limits
        self.stop = self.stop or self.format.turn_end

    def with_tokenizer(self, tokenizer: AddedTokens, **template_kwargs: Any) -> Self:
        """Return a copy that knows a tokenizer's control tokens and whether its prompts open the reasoning.

        Args:
            tokenizer: The model's tokenizer. Without a chat template `reasoning_open` stays False.
            **template_kwargs: Options of the chat template, such as `enable_thinking`.
        """
        made = super().with_tokenizer(tokenizer, **template_kwargs)
        if made._learns_reasoning:
            made.reasoning_open = made.opens_thought(tokenizer, **template_kwargs)
        return made

    def opens_thought(self, tokenizer: Any, **template_kwargs: Any) -> bool:
        """Return whether the prompt of a tokenizer's chat template opens the model's reasoning.

        Args:
            tokenizer: The model's tokenizer.
            **template_kwargs: Options of the chat template.
        """
        return any(
            opens_thought(tokenizer, pair, **template_kwargs) for pair in self.format.reasoning_tags.items()
        )

    # Methods for subclasses

    @abstractmethod
    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read the block whose opener is at `start`, add its calls to the reader and return its end.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.

        Raises:
            CallParseError: If the block is malformed; `end_of_malformed` finds its end.
        """

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the opener at `start` begins a call.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        del reader, start
        return True
        yield

    def read_other_opener(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Handle one of `other_openers` and return where to continue; by default it is text.

        Args:
            reader: The message as read so far.
            place: Index of the opener.
            marker: The opener.
        """
        del reader
        return place + len(marker)
        yield

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed block at `start`: its closer, or the end of the message.

        The search begins where reading failed; openers before its result are data.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        closer = self.format.closer
        if not closer:
            return (yield from reader.end_of_text())
        found = yield from reader.find(closer, max(start, broke))
        return len(reader.text) if found < 0 else found + len(closer)

    def begin_reasoning(self, reader: Reader, inside: int) -> Incremental[int]:
        """Return where the text of reasoning begins, after the opening tag that ends at `inside`.

        Args:
            reader: The message as read so far.
            inside: Index after the tag.
        """
        del reader
        return inside
        yield

    def read_other_content(self, reader: Reader, start: int) -> Incremental[int]:
        """Raise the error for a section that contains no call at `start`.

        Args:
            reader: The message as read so far.
            start: Index of the content.

        Raises:
            CallParseError: Always.
        """
        if start == len(reader.text):
            raise CallParseError("unclosed", "the message ends inside the call", start)
        if (yield from reader.which(self.format.section[1:], start)):
            raise CallParseError(
                "empty", f"there is nothing between {self.format.section[0]} and its closer", start
            )
        raise CallParseError("wrong_dialect", "this is not a call of this format", start)
        yield

    def has_call_behind_prose(self, reader: Reader) -> bool:
        """Return whether one of `reader.suspects` would be a call on a line of its own."""
        del reader
        return False

    scan = scan_text

    @abstractmethod
    def write(self, call: ParsedCall) -> str:
        """Write one call as the model would, without the text around all calls of a message.

        Raises:
            ValueError: If the format cannot express the call.
        """

    def frame(self, name: str) -> Frame | None:
        """Return the text around the arguments in a call of this tool; None if no grammar exists."""
        if not self.format.has_grammar:
            return None
        before, arguments, after = self.write(ParsedCall(name, {}, "call_0_0")).rpartition("{}")
        return Frame(before, after) if arguments else None

    # The interface of parsers

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message; see `ToolCallParser.parse`.

        Args:
            response: Its text, or a mapping.
            tools: Tools that may be called.
            turn: Number of the turn, for ids of calls that have none.
        """
        found = self._whole(message_text(response), tools, turn).result(response)
        if isinstance(response, str) or found.calls:
            return found
        return replace(found, calls=assign_ids(read_message_calls(response, self.limits), turn))

    def parse_tokens(
        self, ids: Sequence[int], tokenizer: Tokenizer, *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read the token ids that a model sampled; see `ToolCallParser.parse_tokens`.

        Args:
            ids: Sampled token ids.
            tokenizer: The tokenizer of the model.
            tools: Tools that may be called.
            turn: Number of the turn, for ids of calls that have none.
        """
        tokens = MarkerTokens(ids, tokenizer, self.control_markers())
        reader = self._whole(tokens.text, tools, turn, tokens.exact)
        return tokens.with_token_spans(reader.result(tokens.text))

    def stream(self, *, tools: Tools | None = None, turn: int = 0) -> Stream:
        """Return a stream that reads a message while it is being written.

        Args:
            tools: Tools that may be called.
            turn: Number of the turn, for ids of calls that have none.
        """
        return TextStream(self, self._reader("", schemas_of(tools), turn, is_whole=False))

    def _reader(
        self,
        text: str,
        tools: Mapping[str, Fields] | None,
        turn: int,
        exact: Mapping[str, Sequence[int]] = MappingProxyType({}),
        *,
        is_whole: bool = True,
    ) -> Reader:
        return Reader(
            text,
            tools=tools,
            turn=turn,
            limits=self.limits,
            exact=exact,
            is_whole=is_whole,
            reasoning_open=self.reasoning_open,
        )

    def _whole(
        self, text: str, tools: Tools | None, turn: int, exact: Mapping[str, Sequence[int]] | None = None
    ) -> Reader:
        """Read a complete message."""
        reader = self._reader(text, schemas_of(tools), turn, exact or {})
        finish(self.scan(reader))
        return self.read_again_if_reasoning(reader)

    def read_again_if_reasoning(self, reader: Reader) -> Reader:
        """Read a message again if the end of its reasoning proves that it began inside it."""
        if not _closes_unopened_thought(self.format, reader):
            return reader
        again = self._reader(reader.text, reader.tools, reader.turn, reader.exact)
        again.reasoning_open = True
        again.note("unopened_reasoning")
        finish(self.scan(again))
        return again

    def render_call(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: If the format cannot express the call.
        """
        return self.render_calls([call])

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write several calls as they appear in one message.

        Raises:
            ValueError: If the format cannot express one of them.
        """
        if not calls:
            return ""
        for call in calls:
            require_name(call)
        before, between, after = self.format.around
        return f"{before}{between.join(map(self.write, calls))}{after}"

    def structural_tag(
        self, tools: Tools, *, tool_choice: Literal["auto", "required"] = "auto", parallel: bool = True
    ) -> dict[str, JSON] | None:
        """Return the structural tag of these tools; see `ToolCallParser.structural_tag`.

        Args:
            tools: Tools that may be called.
            tool_choice: "auto", or "required" for at least one call.
            parallel: Whether a message may have several calls.
        """
        schemas = parameters(tools)
        frames = [self.frame(name) for name in schemas]
        tags = [frame.tag(schema) for frame, schema in zip(frames, schemas.values(), strict=True) if frame]
        if len(tags) < len(frames):
            return None
        format = self.format
        trigger = format.trigger or format.around[0] or format.openers[0]
        return structural_tag(tags, format.around, trigger, tool_choice=tool_choice, parallel=parallel)

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers of this format, which tool results must not contain."""
        return self.format.control_markers()

    @cached_property
    def shape(self) -> str:
        """A correct call, for error messages and prompts."""
        example = ParsedCall("tool_name", {"argument": "value"}, "call_0_0")
        return self.format.shape or self.render_call(example)


def _closes_unopened_thought(format: TextFormat, reader: Reader) -> bool:
    """Return whether a message ends reasoning that only the prompt can have opened.

    An end tag inside the arguments of a call proves nothing.
    """
    if reader.reasoning_open or not format.think_end_proves:
        return False
    for think in format.reasoning_tags:
        if reader.at(think, 0):
            return False
    for end in format.think_ends:
        if reader.is_outside_calls(end):
            break
    else:
        return False
    closed, _ = reader.first(format.think_ends, 0)
    if closed < 0 or any(0 <= reader.seek(think, 0) < closed for think in format.reasoning_tags):
        return False
    spans = [call.span for call in reader.calls if call.error is None and call.span is not None]
    return not any(begin <= closed < end for begin, end in spans)


class TextStream(Stream):
    """A stream of a text format.

    If the message ends reasoning that the prompt opened, and `reasoning_open` is False, events for calls in
    that reasoning have been emitted before the proof. The result of `close` has those calls as part of the
    reasoning, and `last_events` has the calls without an event so far.

    Args:
        parser: Parser of the format.
        reader: Reader of an empty message.
    """

    def __init__(self, parser: TextParser, reader: Reader) -> None:
        self._parser = parser
        self._reader = reader
        self._steps = parser.scan(reader)

    def feed(self, chunk: str) -> list[Event]:
        """Append a chunk of text and return the events that it makes certain."""
        if self._reader.is_whole:
            raise ValueError("the stream is closed; create another for the next message")
        if chunk:
            self._reader.append(chunk)
            next(self._steps)
        return self._taken()

    def close(self) -> ParseResult:
        """End the message and return the same result as `parse`."""
        if not self._reader.is_whole:
            self._reader.end()
            finish(self._steps)
            self.last_events = self._taken()
            again = self._parser.read_again_if_reasoning(self._reader)
            if again is not self._reader:
                sent = {call.span for call in self._reader.calls}
                calls = again.result(again.text).calls
                self.last_events += events_of(call for call in calls if call.span not in sent)
                self._reader = again
        return self._reader.result(self._reader.text)

    def _taken(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        return events
