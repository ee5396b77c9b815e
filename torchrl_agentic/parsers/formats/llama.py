"""Parser of Llama 3.1 to 3.3: JSON objects without an opener."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat, read_json
from torchrl_agentic.parsers.engine.json_text import decode, end_of_odd_value, read_call
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.python_literals import LiteralReader
from torchrl_agentic.parsers.engine.python_source import bracket_end
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.scan import has_shape

_PYTHON_TAG = "<|python_tag|>"
_KEYS = "name|parameters|arguments|type|function|id"
_FIRST_KEY = re.compile(rf'\{{\s{{0,99}}+"(?:{_KEYS})"\s{{0,99}}+:')
_PART_OF_FIRST_KEY = re.compile(r'\{\s{0,99}+(?:"\w{0,10}(?:"\s{0,99}+)?)?\Z')
_NAME = re.compile(r'"name"\s*+:\s*+"')
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*+:')
_BUILTIN = re.compile(r"[A-Za-z_][\w.]{0,200}+ ?+\(")
_PART_OF_BUILTIN = re.compile(r"[A-Za-z_][\w.]{0,200}+ ?+\Z")


class Llama3JSONParser(JSONBlockParser):
    """The format of Llama 3.1 to 3.3: JSON objects on lines of their own or after `<|python_tag|>`.

        {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}

    Without an opener, an object is a call if it begins with a key of a call and has a name and parameters, or
    is malformed after them. After prose on the same line it is text; if it is a readable call, the message is
    noted "call_behind_prose". After `<|python_tag|>` a built-in call `f.call(query="x")` is read too. Source:
    Meta's prompt formats and the chat template.
    """

    name = "llama3_json"
    aliases = ("llama3", "llama4_json")
    models = "Llama 3.1 to 3.3"
    example = '{"name", "parameters"}'
    stop = ("<|eot_id|>", "<|eom_id|>")
    result_role = "ipython"
    format = JSONFormat(
        openers=(_PYTHON_TAG, "{"),
        shapes={"{": (_FIRST_KEY, _PART_OF_FIRST_KEY)},
        around=("", "; ", ""),
        trigger='{"name": "',
        turn_end=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        arguments_key="parameters",
        list_notes=(),
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether an object is where a call may be, and begins like one.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        if reader.at(_PYTHON_TAG, start):
            return True
        covered = reader.covered
        follows = start - covered < 16 and reader.text[covered:start].strip() == ";"
        if not (_FIRST_KEY.match(reader.text, start) or (yield from has_shape(self.format, reader, start))):
            return False
        if reader.is_line_start(start) or (follows and reader.calls):
            return True
        reader.suspect(start)
        return False

    def has_call_behind_prose(self, reader: Reader) -> bool:
        """Return whether an object after prose can be read as a call of a tool."""
        passed = 0
        for place in reader.suspects:
            try:
                if place < passed:
                    continue
                value, passed = decode(reader.text, place, self.limits)
                if _is_call(value) and reader.knows(read_call(value, limits=self.limits).tool):
                    return True
            except CallParseError:
                continue
        return False

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one object or built-in call; an object that is not a call stays text."""
        if (yield from reader.which((_PYTHON_TAG,), start)):
            return (yield from self._behind_tag(reader, start))
        return (yield from read_bare(reader, start, self._object))

    def _object(self, reader: Reader, start: int, value: JSON, end: int) -> Incremental[int]:
        if not _is_call(value):
            return end
        reader.block = start, end
        (attempt,) = self.attempts(value, (), len(reader.calls))
        reader.add(attempt, start, end)
        return end
        yield

    def _behind_tag(self, reader: Reader, start: int) -> Incremental[int]:
        at, _ = yield from self.begin(reader, start)
        if reader.text[at] in "[{":
            value, end, notes = yield from read_json(self, reader, at)
            for attempt in self.attempts(value, notes, len(reader.calls)):
                reader.add(attempt, start, end)
                start = end
            return end
        return (yield from self._builtin(reader, start, at))

    def _builtin(self, reader: Reader, start: int, at: int) -> Incremental[int]:
        while not (match := _BUILTIN.match(reader.text, at)) and not reader.is_whole:
            if not _PART_OF_BUILTIN.match(reader.text, at):
                break
            yield
        if match is None:
            raise CallParseError("invalid_json", "invalid JSON, expecting an object", at)
        if (yield from bracket_end(reader, match.end() - 1)) < 0:
            raise CallParseError("unclosed", "the message ends inside the call", at)
        name, args, end = LiteralReader(reader.text, self.limits).call(at)
        reader.add(PartialCall(name.removesuffix(".call"), args), start, end)
        return end

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed call at `start`: that of its brackets.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        at, tags = start, (_PYTHON_TAG,)
        while tag := (yield from reader.which(tags, at)):
            at = yield from reader.skip(at + len(tag))
        if match := _BUILTIN.match(reader.text, at):
            end = yield from bracket_end(reader, match.end() - 1)
        else:
            end = yield from reader.balanced(at)
        return end if end >= 0 else (yield from reader.end_of_text())


def read_bare(
    reader: Reader, start: int, take: Callable[[Reader, int, JSON, int], Incremental[int]]
) -> Incremental[int]:
    """Read JSON that no opener precedes, and return its end; malformed JSON is text unless it is like a call.

    Args:
        reader: The message as read so far.
        start: Index of its bracket.
        take: Adds the calls of a value, given the reader, its start, the value and its end.

    Raises:
        CallParseError: If it is malformed after a name and arguments.
    """
    try:
        value, end = yield from reader.json(start, None)
    except CallParseError as error:
        broken = error
    else:
        return (yield from take(reader, start, value, end))
    if broken.code != "invalid_json":
        raise broken
    broke = start if broken.at is None else broken.at
    closed = -1
    if broke == start:  # the error is a value such as NaN; the object may continue after it
        closed, broke = end_of_odd_value(reader.text, start)
    if not (_NAME.search(reader.text, start, broke) and _ARGUMENTS.search(reader.text, start, broke)):
        return broke
    if closed < 0 and (yield from _closed(reader, start)) < 0:
        raise CallParseError("unclosed", "the message ends inside the call", broken.at)
    raise broken


def _closed(reader: Reader, start: int) -> Incremental[int]:
    """Return `reader.balanced`, or -1 after too many such searches of the whole text."""
    reader.failed_searches += 1
    if reader.failed_searches > 2 * reader.limits.calls:
        return -1
    return (yield from reader.balanced(start))


def _is_call(value: JSON) -> bool:
    """Return whether an object has the keys of a call."""
    fields: Any = value
    name, inner = fields.get("name"), fields.get("function")
    return (isinstance(name, str) and bool(fields.keys() & {"parameters", "arguments"})) or (
        isinstance(inner, dict) and "name" in inner
    )
