"""The engine of formats whose calls are JSON between markers: `{"name": …, "arguments": {…}}`."""

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
    """A format that holds JSON: what its blocks share, whatever else stands in them."""

    def begin(self, reader: Reader, start: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Step: read the opener at `start`; give where the body begins, and notes.

        Raises:
            CallParseError: there is no body.
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
        """Step: read the JSON of a block; give it, where it ends, and a note for each fix.

        Raises:
            CallParseError: it is broken, or cut off.
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
        """Step: give the end of the unreadable block at `start`: its closer, or that of its brackets."""
        if self.closer:
            return (yield from super().end_of_malformed(reader, start, broke))
        opener = yield from reader.which(self.openers, start)
        at = yield from reader.skip(start + len(opener.rstrip("{[")))
        end = yield from reader.balanced(at)
        return end if end >= 0 else (yield from super().end_of_malformed(reader, start, broke))

    def tail(self, reader: Reader, end: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Step: read what ends a block, behind its JSON; give the end of the block, and notes.

        Raises:
            CallParseError: something else stands there.
        """
        if not self.closer:
            return end, ()
        after = yield from reader.skip(end)
        if (yield from reader.which((self.closer,), after)):
            return after + len(self.closer), ()
        following = (*self.openers, *filter(None, self.section[1:]), *self.turn_end)
        rest = reader.text[after:]
        part = rest != self.closer and self.closer not in reader.exact and self.closer.startswith(rest)
        is_cut_off = not rest or part  # a closer that is a token cannot come in part
        if is_cut_off or (yield from reader.which(following, after)):
            return end, ("unclosed_tag",)
        raise CallParseError("extra_data", f"after its JSON comes something else than {self.closer}", after)


class JSONBlockParser(JSONTextParser):
    """Blocks of JSON, each one call or a list of calls, with text around.

    JSON ends itself, so a closer inside a string is data. A missing closer is forgiven where the JSON is
    complete and the next block or the end follows. arguments_key: the key of the arguments in this format.
    list_notes: the notes of a block that is a list; empty where the format has lists. fast: whether a message
    may be read by the fast path, for formats with nothing but JSON between the tags.
    """

    arguments_key: ClassVar[str] = "arguments"
    list_notes: ClassVar[tuple[str, ...]] = ("list_of_calls",)
    fast: ClassVar[bool] = True

    _begin: ClassVar[str] = ""
    _end: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Note how a clean call begins and ends."""
        super().__init_subclass__(**options)
        cls._begin, cls._end = f"{''.join(cls.openers[:1])}\n", f"\n{cls.closer}"

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one assistant message."""
        if type(response) is str and self.fast and self.closer and not self.reasoning_open:
            result = self._clean(response, schemas_of(tools), turn)
            if result is not None:
                return result
        return super().parse(response, tools=tools, turn=turn)

    def _clean(self, text: str, tools: Mapping[str, Fields] | None, turn: int) -> ParseResult | None:
        """Read a message as trained models mostly write it, at a third of the cost; None if it is not so.

        That is: a closed thought or none, text without markup, and up to the end calls in the form that chat
        templates show.
        """
        begin, end_mark = self._begin, self._end
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
        to_json, to_next, length = len(begin), len(end_mark), len(text)
        calls: list[ParsedCall] = []
        newlines = 0
        while True:
            start, at = at, at + to_json
            try:
                value, end = scan_once(text, at)
                if end - at > small or text.find("\\", at, end) >= 0:
                    check(value, text, at, end, limits)
            except (ValueError, StopIteration, RecursionError):  # CallParseError is a ValueError
                return None
            fields: Any = value
            at = end + to_next
            if type(value) is not dict or len(fields) != 2 or text[end:at] != end_mark:
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
        """Read one block."""
        at, notes = yield from self.begin(reader, start)
        if self.closer and (yield from reader.which((self.closer,), at)):
            raise CallParseError("empty", "there is nothing between the tags", at)
        if (yield from reader.which(_OTHER_DIALECTS, at)):
            raise CallParseError("wrong_dialect", "here a call is JSON, not XML", at)
        value, end, fixes = yield from self.json(reader, at)
        end, more = yield from self.tail(reader, end)
        try:
            # A list may be larger than one call: then each of its calls is measured.
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
        """Give the calls of a block.

        Raises:
            CallParseError: it holds a single one, which cannot be read.
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
    """A block of JSON that lists all calls of a message: `<tags>[{…}, {…}]</tags>`.

    A subclass writes the tags and brackets in `around`. A call without the list is read too, and noted.
    """

    list_notes = ()
    fast = False

    def attempts(
        self, value: JSON, notes: tuple[str, ...], first: int, *, is_checked: bool = True
    ) -> list[PartialCall]:
        """Return the calls of a block.

        Raises:
            CallParseError: It holds a single one, which cannot be read, or none.
        """
        if value == []:
            raise CallParseError("empty", "the list holds no call")
        if not isinstance(value, list):
            notes = ("no_list", *notes)
        return super().attempts(value, notes, first, is_checked=is_checked)

    def write(self, call: ParsedCall) -> str:
        """Write a call without the list around it."""
        return dumps({"name": call.tool, self.arguments_key: call.args})
