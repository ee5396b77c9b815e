"""Formats in which calls stand in the text, each behind an opener."""

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
    """A format with an opener. A subclass says what opens a call, reads the block behind it, and writes one.

    What opens and closes, and what is made of thoughts and fences, is described in `TextScanner`. around:
    what is written before, between and after the calls of a message. trigger: what a grammar watches for, if
    that is neither the first of these nor the first opener.

    Calls of a message mapping ("tool_calls") count where its text has none.
    """

    around: ClassVar[tuple[str, str, str]] = ("", "\n", "")
    trigger: ClassVar[str] = ""

    @abstractmethod
    def write(self, call: ParsedCall) -> str:
        """Write one call as the model would, without what stands around all calls of a message.

        Raises:
            ValueError: the format cannot say it.
        """

    def frame(self, name: str) -> Frame | None:
        """Give what stands around the arguments in a call of this tool; None if no grammar can say it."""
        before, arguments, after = self.write(ParsedCall(name, {}, "call_0_0")).rpartition("{}")
        return Frame(before, after) if arguments else None

    # Three ways in

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message."""
        found = self._whole(message_text(response), tools, turn).result(response)
        if isinstance(response, str) or found.calls:
            return found
        return replace(found, calls=assign_ids(read_message_calls(response, self.limits), turn))

    def parse_tokens(
        self, ids: Sequence[int], tokenizer: Tokenizer, *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read the tokens that a model sampled; see `ToolCallParser.parse_tokens`."""
        tokens = MarkerTokens(ids, tokenizer, self.control_markers())
        reader = self._whole(tokens.text, tools, turn, tokens.exact)
        return tokens.with_token_spans(reader.result(tokens.text))

    def stream(self, *, tools: Tools | None = None, turn: int = 0) -> Stream:
        """Read a message while it is being written."""
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
        """Read a whole message."""
        reader = self._reader(text, tools, turn, exact)
        finish(self.scan(reader))
        return self.read_again_if_reasoning(reader)

    def read_again_if_reasoning(self, reader: Reader) -> Reader:
        """Read a message again if the end of a thought proves that it began inside one."""
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
            ValueError: the format cannot say it.
        """
        return self.render_calls([call])

    def render_calls(self, calls: Sequence[ParsedCall]) -> str:
        """Write several calls as one message would hold them.

        Raises:
            ValueError: the format cannot say one of them.
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
        """Describe the calls of these tools as a structural tag; see `ToolCallParser.structural_tag`."""
        schemas = parameters(tools)
        frames = [self.frame(name) for name in schemas]
        tags = [frame.tag(schema) for frame, schema in zip(frames, schemas.values(), strict=True) if frame]
        if len(tags) < len(frames):
            return None
        trigger = self.trigger or self.around[0] or self.openers[0]
        return structural_tag(tags, self.around, trigger, tool_choice=tool_choice, parallel=parallel)

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers of this format, which must not come out of a tool.

        A bracket that opens calls is no marker: data is full of them, and tokens that hold one hold more.
        """
        markers = [*self.openers, self.closer, *self.turn_end]
        markers += [marker for pair in self.reasoning_tags.items() for marker in pair]
        markers += [*self.section, *self.result_tags, *self.more_markers]
        return tuple(dict.fromkeys(marker for marker in markers if len(marker) > 1))


class TextStream(Stream):
    """A message in a text format that is being written.

    If the message ends a thought that the prompt opened, and `reasoning_open` is False, events for the calls
    in that thought have been sent already. In the result of `close` those calls are part of the thought, and
    `last_events` has the calls without an event so far.
    """

    def __init__(self, parser: TextParser, reader: Reader) -> None:
        self._parser = parser
        self._reader = reader
        self._steps = parser.scan(reader)

    def feed(self, chunk: str) -> list[Event]:
        """Take the next piece of text; give what is certain by now."""
        if self._reader.is_whole:
            raise ValueError("the stream is closed; make another for the next message")
        if chunk:
            self._reader.append(chunk)
            next(self._steps)
        return self._taken()

    def close(self) -> ParseResult:
        """Say that nothing more comes; give what `parse` gives."""
        if not self._reader.is_whole:
            self._reader.end()
            finish(self._steps)
            self.last_events = self._taken()
            read_again_if_reasoning = self._parser.read_again_if_reasoning(self._reader)
            if read_again_if_reasoning is not self._reader:
                sent = {call.span for call in self._reader.calls}
                unsent = [call for call in read_again_if_reasoning.calls if call.span not in sent]
                self.last_events += events_of(unsent)
                self._reader = read_again_if_reasoning
        return self._reader.result(self._reader.text)

    def _taken(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        return events
