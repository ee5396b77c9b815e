"""Base class of formats that write the tool's name before its arguments as JSON."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.engine.json_blocks import past_closer, past_opener, read_json
from torchrl_agentic.parsers.engine.json_text import decode_any, read_arguments
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser


@dataclass(frozen=True, kw_only=True)
class NamedJSONFormat(TextFormat):
    """Description of a format of a header and JSON arguments; see `TextFormat` for the markers.

    Attributes:
        separator: End of the header.
        json_end: Marker that may follow the JSON before the closer.
    """

    separator: str
    json_end: str = ""


class NamedJSONParser(TextParser):
    """A format of blocks with a header that names the tool, and JSON arguments.

    <opener>f<separator>{"a": 1}<closer>
    """

    format: NamedJSONFormat  # pyright: ignore[reportIncompatibleVariableOverride]  a frozen value

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
        format = self.format
        at, notes = yield from past_opener(self, reader, start)
        separator, before = yield from self._header_end(reader, at)
        if not before or before in format.turn_end:
            raise CallParseError("unclosed", f"the message ends before {format.separator}", separator)
        if before != format.separator:
            raise CallParseError("missing_name", f"{format.separator.strip()} is missing", separator)
        reader.block = at, None
        name, call_id = self.header(reader.text[at:separator])
        reader.header = name, call_id
        attempt, end = yield from self._arguments(reader, separator + len(format.separator))
        attempt.tool, attempt.call_id, attempt.notes = name, call_id, (*notes, *attempt.notes)
        reader.add(attempt, start, end)
        return end

    def _header_end(self, reader: Reader, at: int) -> Incremental[tuple[int, str]]:
        """Return the place and text of the marker that ends the header, "" at the end of the message."""
        format = self.format
        markers = (
            format.separator,
            format.closer,
            *format.openers,
            *filter(None, format.section),
            *format.turn_end,
        )
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
        format = self.format
        at = yield from reader.skip_inside(at)
        notes: tuple[str, ...] = ()
        endings = (format.closer, format.json_end) if format.json_end else (format.closer,)
        if (yield from reader.which(endings, at)):
            value, end = None, at
        elif reader.text[at] in 'n"':  # null, or an object as a JSON string
            value, end = yield from self._scalar(reader, at, format.json_end or format.closer)
        else:
            value, end, notes = yield from read_json(self, reader, at)
        if format.json_end:
            after = yield from reader.skip(end)
            if (yield from reader.which((format.json_end,), after)):
                end = after + len(format.json_end)
        end, more = yield from past_closer(self, reader, end)
        reader.block = at, end
        args, odd = read_arguments(value, self.limits)
        return PartialCall(args=args, notes=(*notes, *odd, *more)), end
