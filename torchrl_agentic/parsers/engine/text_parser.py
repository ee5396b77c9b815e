"""The base class of formats whose calls are part of the text, each after an opener."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from torchrl_agentic.messages import JSON, ParsedCall, ParseResult
from torchrl_agentic.parsers.base import Tokenizer, Tools, message_text, require_name, schemas_of
from torchrl_agentic.parsers.engine.decoded_calls import read_message_calls
from torchrl_agentic.parsers.engine.marker_tokens import MarkerTokens
from torchrl_agentic.parsers.engine.partial_call import assign_ids
from torchrl_agentic.parsers.engine.reader import Reader, finish
from torchrl_agentic.parsers.engine.structural_tag import Frame, parameters, structural_tag
from torchrl_agentic.parsers.engine.text_scanner import TextScanner
from torchrl_agentic.parsers.streaming import Event, Stream, events_of


class TextParser(TextScanner):
    """A format whose calls begin with an opener; a subclass names markers, reads and writes blocks.

    `TextScanner` describes the markers and options. If the text of a message mapping contains no calls, its
    "tool_calls" are read.

    Attributes:
        around: Text before, between and after the calls of a message.
        trigger: String at which a grammar begins a call; by default the first of `around` or of `openers`.
    """

    around: ClassVar[tuple[str, str, str]] = ("", "\n", "")
    trigger: ClassVar[str] = ""

    @abstractmethod
    def write(self, call: ParsedCall) -> str:
        """Write one call as the model would, without the text around all calls of a message.

        Raises:
            ValueError: If the format cannot express the call.
        """

    def frame(self, name: str) -> Frame | None:
        """Return the text around the arguments in a call of this tool; None if no grammar exists."""
        before, arguments, after = self.write(ParsedCall(name, {}, "call_0_0")).rpartition("{}")
        return Frame(before, after) if arguments else None

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
        reader = self._reader("", tools, turn, is_whole=False)
        return TextStream(self, reader)

    def _reader(
        self,
        text: str,
        tools: Tools | None,
        turn: int,
        exact: Mapping[str, Sequence[int]] | None = None,
        *,
        is_whole: bool = True,
    ) -> Reader:
        return Reader(
            text,
            is_whole=is_whole,
            tools=schemas_of(tools),
            turn=turn,
            limits=self.limits,
            exact=exact,
            reasoning_open=self.reasoning_open,
        )

    def _whole(
        self, text: str, tools: Tools | None, turn: int, exact: Mapping[str, Sequence[int]] | None = None
    ) -> Reader:
        """Read a complete message."""
        reader = self._reader(text, tools, turn, exact)
        finish(self.scan(reader))
        return self.read_again_if_reasoning(reader)

    def read_again_if_reasoning(self, reader: Reader) -> Reader:
        """Read a message again if the end of its reasoning proves that it began inside it."""
        if not self.closes_unopened_thought(reader):
            return reader
        again = Reader(
            reader.text,
            tools=reader.tools,
            turn=reader.turn,
            limits=reader.limits,
            exact=reader.exact,
            reasoning_open=True,
        )
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
        before, between, after = self.around
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
        trigger = self.trigger or self.around[0] or self.openers[0]
        return structural_tag(tags, self.around, trigger, tool_choice=tool_choice, parallel=parallel)

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers of this format, which tool results must not contain.

        Single brackets that open calls are left out: they are frequent in data, and part of larger tokens.
        """
        markers = [*self.openers, self.closer, *self.turn_end]
        markers += [marker for pair in self.reasoning_tags.items() for marker in pair]
        markers += [*self.section, *self.result_tags, *self.more_markers]
        return tuple(dict.fromkeys(marker for marker in markers if len(marker) > 1))


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
