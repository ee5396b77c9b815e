"""Base classes of formats whose calls are JSON between markers, such as `<tag>{…}</tag>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torchrl_agentic.messages import JSON, Fields, ParsedCall, ParseResult
from torchrl_agentic.parsers.base import Tools, schemas_of
from torchrl_agentic.parsers.engine.decoded_calls import read_calls
from torchrl_agentic.parsers.engine.json_text import check, dumps, fits, read_call, repair_json, scan_once
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.text_parser import TextParser

_OTHER_DIALECTS = ("<function=", "<invoke", "<parameter", "<arg_key>")


class JSONTextParser(TextParser):
    """A format whose blocks contain JSON: reading the opener, the JSON and the closer."""

    def begin(self, reader: Reader, start: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Read the opener at `start`; return the start of the body and notes.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.

        Raises:
            CallParseError: If the message ends there.
        """
        at, notes = start, ()
        while opener := (yield from reader.which(self.openers, at)):
            notes = ("repeated_opener",) if at > start else ()
            at = yield from reader.skip(at + len(opener.rstrip("[{")))
            if opener[-1] in "[{":
                break
        if at == len(reader.text):
            raise CallParseError("unclosed", "the message ends inside the call", at)
        return at, notes

    def json(self, reader: Reader, at: int) -> Incremental[tuple[JSON, int, tuple[str, ...]]]:
        """Read the JSON of a block; return its value, its end and a note per repair.

        Args:
            reader: The message as read so far.
            at: Index where the JSON begins.

        Raises:
            CallParseError: If it is malformed or cut off.
        """
        try:
            value, end = yield from reader.json(at, (self.closer,) if self.closer else ())
            return value, end, ()
        except CallParseError as error:
            broken = error
        if broken.code == "invalid_json" and self.closer and self.tolerance == "lenient":
            closer = yield from reader.find(self.closer, broken.at or at)
            fixed = repair_json(reader.text[at:closer], self.limits)
            if fixed is not None:
                return fixed[0], closer, fixed[1]
        raise broken

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed block at `start`: its closer or that of its brackets.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        if self.closer:
            return (yield from super().end_of_malformed(reader, start, broke))
        opener = yield from reader.which(self.openers, start)
        at = yield from reader.skip(start + len(opener.rstrip("{[")))
        end = yield from reader.balanced(at)
        return end if end >= 0 else (yield from super().end_of_malformed(reader, start, broke))

    def tail(self, reader: Reader, end: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Read the closer after the JSON; return the end of the block and notes.

        Args:
            reader: The message as read so far.
            end: Index just after the JSON.

        Raises:
            CallParseError: If other text follows.
        """
        if not self.closer:
            return end, ()
        after = yield from reader.skip(end)
        if (yield from reader.which((self.closer,), after)):
            return after + len(self.closer), ()
        following = (*self.openers, *filter(None, self.section[1:]), *self.turn_end)
        rest = reader.text[after:]
        part = rest != self.closer and self.closer not in reader.exact and self.closer.startswith(rest)
        is_cut_off = not rest or part  # a closer that is a token is never cut in two
        if is_cut_off or (yield from reader.which(following, after)):
            return end, ("unclosed_tag",)
        raise CallParseError("extra_data", f"unexpected text after the JSON, expecting {self.closer}", after)


class JSONBlockParser(JSONTextParser):
    """A format of blocks of JSON, each with one call or a list of calls, and text around them.

        <tag>
        {"name": "f", "arguments": {"a": 1}}
        </tag>

    A subclass names the markers; see `TextScanner` for them. JSON marks its own end, so a closer inside a
    string is data. A missing closer is accepted if the JSON is complete and the next block or the end of the
    message follows.

    Attributes:
        arguments_key: Key of the arguments in this format.
        list_notes: Notes of a block with a list of calls; empty if the format has lists.
        fast: Whether well-formed messages take the fast path; only for formats with JSON alone in their
            blocks.
    """

    arguments_key: ClassVar[str] = "arguments"
    list_notes: ClassVar[tuple[str, ...]] = ("list_of_calls",)
    fast: ClassVar[bool] = True

    _opener: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Store the string that begins a well-formed call."""
        super().__init_subclass__(**options)
        cls._opener = "".join(cls.openers[:1])

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message.

        Args:
            response: Its text, or a mapping.
            tools: Tools that may be called.
            turn: Number of the turn, for ids of calls that have none.
        """
        if type(response) is str and self.fast and self.closer and not self.reasoning_open:
            result = self._clean(response, schemas_of(tools), turn)
            if result is not None:
                return result
        return super().parse(response, tools=tools, turn=turn)

    def _clean(self, text: str, tools: Mapping[str, Fields] | None, turn: int) -> ParseResult | None:
        """Read a well-formed message at a third of the cost; return None for any other.

        Well-formed is: optional closed reasoning, text without markup, then calls to the end of the message,
        each with or without a newline inside its tags, and with or without one before the next.
        """
        begin, closer = self._opener, self.closer
        first = at = text.find(begin)
        reasoning, said = "", 0
        if first > 0:
            think, think_end = self.think
            if text.startswith(think):
                thought = text.find(think_end)
                reasoning, said = text[len(think) : thought], thought + len(think_end)
                if thought < 0 or any(end in reasoning for end in self.turn_end):
                    return None
            if text.find(think_end, said, first) >= 0 or self._has_markup(text[said:first]):
                return None
        if first < said:
            return None
        limits, arguments_key = self.limits, self.arguments_key
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
        return bool(text) and not text.isspace() and self._pattern.search(text) is not None

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one block.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        at, notes = yield from self.begin(reader, start)
        if self.closer and (yield from reader.which((self.closer,), at)):
            raise CallParseError("empty", "there is nothing between the tags", at)
        if (yield from reader.which(_OTHER_DIALECTS, at)):
            raise CallParseError("wrong_dialect", "calls in this format are JSON, not XML", at)
        value, end, fixes = yield from self.json(reader, at)
        end, more = yield from self.tail(reader, end)
        try:
            # A list may be larger than the limit on one call; each of its calls is then checked.
            small = fits(reader.text, at, end, self.limits)
            found = self.attempts(value, (*notes, *fixes, *more), len(reader.calls), is_checked=small)
        except CallParseError as error:
            error.end = end
            raise
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
            CallParseError: If the block holds a single, malformed call.
        """
        if isinstance(value, list) and value:
            items = cast("list[JSON]", value)
            notes = (*self.list_notes, *notes)
            return read_calls(items, self.shape, notes, self.limits, first, is_checked=is_checked)
        attempt = read_call(value, self.arguments_key, self.limits)
        attempt.notes += notes
        return [attempt]

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would."""
        body = dumps({"name": call.tool, self.arguments_key: call.args})
        return f"{self.openers[0]}\n{body}\n{self.closer}" if self.closer else body


class JSONListParser(JSONBlockParser):
    """A format with one block that lists all calls: `<tag>[{…}, {…}]</tag>`.

    A subclass puts the tags and brackets into `around`. A single call without a list is read and noted.
    """

    list_notes = ()
    fast = False

    def attempts(
        self, value: JSON, notes: tuple[str, ...], first: int, *, is_checked: bool = True
    ) -> list[PartialCall]:
        """Return the calls of a block.

        Raises:
            CallParseError: If the list is empty or holds a single, malformed call.
        """
        if value == []:
            raise CallParseError("empty", "the list contains no call")
        if not isinstance(value, list):
            notes = ("no_list", *notes)
        return super().attempts(value, notes, first, is_checked=is_checked)

    def write(self, call: ParsedCall) -> str:
        """Write a call without the list around it."""
        return dumps({"name": call.tool, self.arguments_key: call.args})
