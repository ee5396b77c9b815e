"""Formats whose calls are JSON between markers, such as `<tag>{…}</tag>`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torchrl_agentic.messages import JSON, Fields, ParsedCall, ParseResult, fields_of
from torchrl_agentic.parsers.base import Tools, schemas_of
from torchrl_agentic.parsers.engine.decoded_calls import read_calls
from torchrl_agentic.parsers.engine.json_text import check, dumps, fits, read_call, repair_json, scan_once
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.text_format import TextFormat
from torchrl_agentic.parsers.engine.text_parser import TextParser

_OTHER_DIALECTS = ("<function=", "<invoke", "<parameter", "<arg_key>")


@dataclass(frozen=True, kw_only=True)
class JSONFormat(TextFormat):
    """Description of a format of JSON between markers; see `TextFormat` for the markers.

    Attributes:
        arguments_key: Key of the arguments in this format.
        field_names: Our names of the fields of a call by those of this format, where they differ.
        is_list: Whether one block lists all calls, `<tag>[{…}, {…}]</tag>`, with tags and brackets in
            `around`. A single call without a list is read and noted.
        list_notes: Notes of a block with a list of calls in other formats; empty if it is usual.
        written: Text before and after the JSON of a call; None for the opener and the closer on lines of
            their own, or for neither if there is no closer.
        fast: Whether well-formed messages take the fast path; only for formats with JSON alone in their
            blocks.
    """

    arguments_key: str = "arguments"
    field_names: Mapping[str, str] = field(default_factory=dict[str, str])
    is_list: bool = False
    list_notes: tuple[str, ...] = ("list_of_calls",)
    written: tuple[str, str] | None = None
    fast: bool = True


def past_opener(parser: TextParser, reader: Reader, start: int) -> Incremental[tuple[int, tuple[str, ...]]]:
    """Read the opener at `start`; return the start of the body and notes.

    Args:
        parser: Parser of the format.
        reader: The message as read so far.
        start: Index of the opener in the text.

    Raises:
        CallParseError: If the message ends there.
    """
    at, notes = start, ()
    while opener := (yield from reader.which(parser.format.openers, at)):
        notes = ("repeated_opener",) if at > start else ()
        at = yield from reader.skip(at + len(opener.rstrip("[{")))
        if opener[-1] in "[{":
            break
    if at == len(reader.text):
        raise CallParseError("unclosed", "the message ends inside the call", at)
    return at, notes


def read_json(parser: TextParser, reader: Reader, at: int) -> Incremental[tuple[JSON, int, tuple[str, ...]]]:
    """Read the JSON of a block; return its value, its end and a note per repair.

    Args:
        parser: Parser of the format.
        reader: The message as read so far.
        at: Index where the JSON begins.

    Raises:
        CallParseError: If it is malformed or cut off.
    """
    closer = parser.format.closer
    try:
        value, end = yield from reader.json(at, (closer,) if closer else ())
        return value, end, ()
    except CallParseError as error:
        broken = error
    if broken.code == "invalid_json" and closer and parser.tolerance == "lenient":
        stop = yield from reader.find(closer, broken.at or at)
        fixed = repair_json(reader.text[at:stop], parser.limits)
        if fixed is not None:
            return fixed[0], stop, fixed[1]
    raise broken


def past_closer(parser: TextParser, reader: Reader, end: int) -> Incremental[tuple[int, tuple[str, ...]]]:
    """Read the closer after the JSON; return the end of the block and notes.

    Args:
        parser: Parser of the format.
        reader: The message as read so far.
        end: Index just after the JSON.

    Raises:
        CallParseError: If other text follows.
    """
    format = parser.format
    if not format.closer:
        return end, ()
    after = yield from reader.skip(end)
    if (yield from reader.which((format.closer,), after)):
        return after + len(format.closer), ()
    following = (*format.openers, *filter(None, format.section[1:]), *format.turn_end)
    rest = reader.text[after:]
    part = rest != format.closer and format.closer not in reader.exact and format.closer.startswith(rest)
    is_cut_off = not rest or part  # a closer that is a token is never cut in two
    if is_cut_off or (yield from reader.which(following, after)):
        return end, ("unclosed_tag",)
    raise CallParseError("extra_data", f"unexpected text after the JSON, expecting {format.closer}", after)


class JSONBlockParser(TextParser):
    """A format of blocks of JSON, each with one call or a list of calls, and text around them.

        <tag>
        {"name": "f", "arguments": {"a": 1}}
        </tag>

    A subclass names the markers in its `format`. JSON marks its own end, so a closer inside a string is data.
    A missing closer is accepted if the JSON is complete and the next block or the end of the message follows.
    """

    format: JSONFormat  # pyright: ignore[reportIncompatibleVariableOverride]  a frozen value

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message.

        Args:
            response: Its text, or a mapping.
            tools: Tools that may be called.
            turn: Number of the turn, for ids of calls that have none.
        """
        format = self.format
        is_clean = format.fast and format.closer and not (format.is_list or self.reasoning_open)
        if is_clean and type(response) is str:
            result = self._clean(response, schemas_of(tools), turn)
            if result is not None:
                return result
        return super().parse(response, tools=tools, turn=turn)

    def _clean(self, text: str, tools: Mapping[str, Fields] | None, turn: int) -> ParseResult | None:
        """Read a well-formed message at a third of the cost; return None for any other.

        Well-formed is: optional closed reasoning, text without markup, then calls to the end of the message,
        each with or without a newline inside its tags, and with or without one before the next.
        """
        format = self.format
        begin, closer = format.openers[0], format.closer
        first = at = text.find(begin)
        reasoning, said = "", 0
        if first > 0:
            think, think_end = format.think
            if text.startswith(think):
                thought = text.find(think_end)
                reasoning, said = text[len(think) : thought], thought + len(think_end)
                if thought < 0 or any(end in reasoning for end in format.turn_end):
                    return None
            if text.find(think_end, said, first) >= 0 or self._has_markup(text[said:first]):
                return None
        if first < said:
            return None
        limits, arguments_key = self.limits, format.arguments_key
        most, small = limits.calls, min(limits.depth, limits.argument_bytes // 4)
        to_json, to_next, length = len(begin), len(closer), len(text)
        calls: list[ParsedCall] = []
        newlines = 0
        while True:
            start, at = at, at + to_json
            at += text.startswith("\n", at)
            try:
                value, end = scan_once(text, at)
                if end - at > small or text.find("\\", at, end) >= 0:
                    check(value, text, at, end, limits)
            except (ValueError, StopIteration, RecursionError):  # CallParseError is a ValueError
                return None
            fields: Any = value
            end += text.startswith("\n", end)
            at = end + to_next
            if type(value) is not dict or len(fields) != 2 or not text.startswith(closer, end):
                return None
            name: Any = fields.get("name")
            args: Any = fields.get(arguments_key)
            index = len(calls)
            if type(name) is not str or type(args) is not dict or name != name.strip() or not name:
                return None
            if index == most or (tools is not None and name not in tools):
                return None
            call_id = f"call_{turn}_{index}"
            calls.append(ParsedCall(name, cast("Fields", args), call_id, index=index, span=(start, at)))
            if at == length:
                around = text[:first] + "\n" * newlines
                return ParseResult(around, tuple(calls), text, reasoning=reasoning)
            if not text.startswith(begin, at):
                at, newlines = at + 1, newlines + 1
                if text[at - 1] != "\n" or not text.startswith(begin, at):
                    return None

    def _has_markup(self, text: str) -> bool:
        return bool(text) and not text.isspace() and self.format.pattern.search(text) is not None

    begin = past_opener
    tail = past_closer

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one block.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        at, notes = yield from self.begin(reader, start)
        closer = self.format.closer
        if closer and (yield from reader.which((closer,), at)):
            raise CallParseError("empty", "there is nothing between the tags", at)
        if (yield from reader.which(_OTHER_DIALECTS, at)):
            raise CallParseError("wrong_dialect", "calls in this format are JSON, not XML", at)
        value, end, fixes = yield from read_json(self, reader, at)
        end, more = yield from self.tail(reader, end)
        reader.block = None, end
        # A list may be larger than the limit on one call; each of its calls is then checked.
        small = fits(reader.text, at, end, self.limits)
        found = self.attempts(value, (*notes, *fixes, *more), len(reader.calls), is_checked=small)
        for attempt in found:
            reader.add(attempt, start, end)
            start = end
        return end

    def attempts(
        self, value: JSON, notes: tuple[str, ...], first: int, *, is_checked: bool = True
    ) -> list[PartialCall]:
        """Return the calls of a block.

        Args:
            value: The decoded JSON.
            notes: Notes for each of the calls.
            first: Index of the first of them in the message.
            is_checked: Whether each call is known to be within the limits.

        Raises:
            CallParseError: If the list is empty, or the block holds a single, malformed call.
        """
        format = self.format
        if format.field_names:
            items = cast("list[JSON]", value if isinstance(value, list) else [value])
            value = [_renamed(item, format.field_names) for item in items]
        if format.is_list and value == []:
            raise CallParseError("empty", "the list contains no call")
        if isinstance(value, list) and value:
            items = cast("list[JSON]", value)
            notes = notes if format.is_list else (*format.list_notes, *notes)
            return read_calls(items, self.shape, notes, self.limits, first, is_checked=is_checked)
        if format.is_list:
            notes = ("no_list", *notes)
        attempt = read_call(value, format.arguments_key, self.limits)
        attempt.notes += notes
        return [attempt]

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed block at `start`: its closer or that of its brackets.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        if self.format.closer:
            return (yield from super().end_of_malformed(reader, start, broke))
        opener = yield from reader.which(self.format.openers, start)
        at = yield from reader.skip(start + len(opener.rstrip("{[")))
        end = yield from reader.balanced(at)
        return end if end >= 0 else (yield from super().end_of_malformed(reader, start, broke))

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would."""
        format = self.format
        body = dumps({"name": call.tool, format.arguments_key: call.args})
        if format.written is not None:
            return f"{format.written[0]}{body}{format.written[1]}"
        return (
            f"{format.openers[0]}\n{body}\n{format.closer}" if format.closer and not format.is_list else body
        )


def _renamed(item: JSON, names: Mapping[str, str]) -> JSON:
    """Return a call with our names of its fields, and its id as a string."""
    fields = fields_of(item)
    if fields is None:
        return item
    named = {names.get(key, key): value for key, value in fields.items()}
    if isinstance(named.get("id"), int):
        named["id"] = str(named["id"])
    return named
