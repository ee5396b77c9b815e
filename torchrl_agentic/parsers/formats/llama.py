"""Parser of Llama 3.1 to 3.3: JSON objects without an opener."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser
from torchrl_agentic.parsers.engine.json_text import decode, end_of_odd_value, read_call
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.python_literals import LiteralReader
from torchrl_agentic.parsers.engine.python_source import bracket_end
from torchrl_agentic.parsers.engine.reader import Incremental, Reader

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

    name: ClassVar[str] = "llama3_json"
    aliases = ("llama3", "llama4_json")
    models = "Llama 3.1 to 3.3"
    example = '{"name", "parameters"}'
    stop = ("<|eot_id|>", "<|eom_id|>")
    result_role = "ipython"
    openers = (_PYTHON_TAG, "{")
    shapes: ClassVar = {"{": (_FIRST_KEY, _PART_OF_FIRST_KEY)}
    turn_end = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    arguments_key = "parameters"
    list_notes = ()
    around = ("", "; ", "")
    trigger = '{"name": "'
    shape = '{"name": "tool name", "parameters": {"argument": "value"}}'

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
        if not (_FIRST_KEY.match(reader.text, start) or (yield from self.has_shape(reader, start))):
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
        try:
            value, end = yield from reader.json(start, None)
        except CallParseError as error:
            broken = error
        else:
            return (yield from self._object(reader, start, value, end))
        if broken.code != "invalid_json":
            raise broken
        broke = start if broken.at is None else broken.at
        closed = -1
        if broke == start:  # the error is a value such as NaN; the object may continue after it
            closed, broke = end_of_odd_value(reader.text, start)
        if not (_NAME.search(reader.text, start, broke) and _ARGUMENTS.search(reader.text, start, broke)):
            return broke
        if closed < 0 and (yield from self._closed(reader, start)) < 0:
            raise CallParseError("unclosed", "the message ends inside the call", broken.at)
        raise broken

    def _closed(self, reader: Reader, start: int) -> Incremental[int]:
        """Return `reader.balanced`, or -1 after too many such searches of the whole text."""
        reader.failed_searches += 1
        if reader.failed_searches > 2 * self.limits.calls:
            return -1
        return (yield from reader.balanced(start))

    def _object(self, reader: Reader, start: int, value: JSON, end: int) -> Incremental[int]:
        if not _is_call(value):
            return end
        try:
            (attempt,) = self.attempts(value, (), len(reader.calls))
        except CallParseError as error:
            error.at, error.end = start, end
            raise
        reader.add(attempt, start, end)
        return end
        yield

    def _behind_tag(self, reader: Reader, start: int) -> Incremental[int]:
        at, _ = yield from self.begin(reader, start)
        if reader.text[at] in "[{":
            value, end, notes = yield from self.json(reader, at)
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
        return end if end >= 0 else (yield from self.end_of_text(reader))


def _is_call(value: JSON) -> bool:
    """Return whether an object has the keys of a call."""
    fields: Any = value
    name, inner = fields.get("name"), fields.get("function")
    return (isinstance(name, str) and bool(fields.keys() & {"parameters", "arguments"})) or (
        isinstance(inner, dict) and "name" in inner
    )
