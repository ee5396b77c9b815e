"""Base class of formats that write the tool's name before its arguments as JSON."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.engine.json_blocks import JSONTextParser
from torchrl_agentic.parsers.engine.json_text import decode_any, read_arguments
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader


class NamedJSONParser(JSONTextParser):
    """A format of blocks with a header that names the tool, and JSON arguments.

        <opener>f<separator>{"a": 1}<closer>

    Attributes:
        separator: End of the header.
        json_end: Marker that may follow the JSON before the closer.
    """

    separator: ClassVar[str] = ""
    json_end: ClassVar[str] = ""

    @abstractmethod
    def header(self, text: str) -> tuple[str, str | None]:
        """Return the name of the tool and the model's id of the call, or None.

        Args:
            text: Text between opener and separator.

        Raises:
            CallParseError: If the text contains no name.
        """

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one call.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        at, notes = yield from self.begin(reader, start)
        separator, before = yield from self._header_end(reader, at)
        if not before or before in self.turn_end:
            raise CallParseError("unclosed", f"the message ends before {self.separator}", separator)
        if before != self.separator:
            raise CallParseError("missing_name", f"{self.separator.strip()} is missing", separator)
        try:
            name, call_id = self.header(reader.text[at:separator])
        except CallParseError as error:
            error.at = at
            raise
        try:
            attempt, end = yield from self._arguments(reader, separator + len(self.separator))
        except CallParseError as error:
            error.tool, error.call_id = name, call_id
            raise
        attempt.tool, attempt.call_id, attempt.notes = name, call_id, (*notes, *attempt.notes)
        reader.add(attempt, start, end)
        return end

    def _header_end(self, reader: Reader, at: int) -> Incremental[tuple[int, str]]:
        """Return the place and text of the marker that ends the header, "" at the end of the message."""
        markers = (self.separator, self.closer, *self.openers, *filter(None, self.section), *self.turn_end)
        place, marker = yield from reader.find_first(markers, at)
        return (len(reader.text) if place < 0 else place), marker

    def _scalar(self, reader: Reader, at: int, closer: str) -> Incremental[tuple[JSON, int]]:
        end = yield from reader.find(closer, at)
        if end < 0:
            raise CallParseError("unclosed", "the message ends inside the call", at)
        try:
            return decode_any(reader.text[at:end], self.limits), end
        except CallParseError as error:
            error.at = at
            raise

    def _arguments(self, reader: Reader, at: int) -> Incremental[tuple[PartialCall, int]]:
        at = yield from reader.skip(at)
        if at == len(reader.text):
            raise CallParseError("unclosed", "the message ends inside the call", at)
        notes: tuple[str, ...] = ()
        endings = (self.closer, self.json_end) if self.json_end else (self.closer,)
        if (yield from reader.which(endings, at)):
            value, end = None, at
        elif reader.text[at] in 'n"':  # null, or an object as a JSON string
            value, end = yield from self._scalar(reader, at, self.json_end or self.closer)
        else:
            value, end, notes = yield from self.json(reader, at)
        if self.json_end:
            after = yield from reader.skip(end)
            if (yield from reader.which((self.json_end,), after)):
                end = after + len(self.json_end)
        end, more = yield from self.tail(reader, end)
        try:
            args, odd = read_arguments(value, self.limits)
        except CallParseError as error:
            error.at, error.end = at, end
            raise
        return PartialCall(args=args, notes=(*notes, *odd, *more)), end
