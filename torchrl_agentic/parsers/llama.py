"""Calls of Llama 3.1 to 3.3 as JSON. Format: Meta's prompt formats and the chat template."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from torchrl_agentic.parsers.attempts import Attempt, Unreadable
from torchrl_agentic.parsers.json_blocks import JSONBlockParser
from torchrl_agentic.parsers.literals import LiteralReader
from torchrl_agentic.parsers.python_text import extent
from torchrl_agentic.parsers.reader import Reader, Steps

_PYTHON_TAG = "<|python_tag|>"
_KEYS = "name|parameters|arguments|type|function|id"
_FIRST_KEY = re.compile(rf'\{{\s*+"(?:{_KEYS})"\s*+:')
_PART_OF_FIRST_KEY = re.compile(r'\{\s*+(?:"\w{0,10}(?:"\s*+)?)?\Z')
_NAME = re.compile(r'"name"\s*+:\s*+"')
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*+:')
_BUILTIN = re.compile(r"[A-Za-z_][\w.]{0,200}+ ?+\(")
_PART_OF_BUILTIN = re.compile(r"[A-Za-z_][\w.]{0,200}+ ?+\Z")


class Llama3JSONParser(JSONBlockParser):
    """`{"name": …, "parameters": {…}}` on a line of its own, or behind `<|python_tag|>`; `; ` between calls.

    There is no opener, so an object is an attempt if it has a name and parameters, or breaks after them.
    Behind `<|python_tag|>` a built-in call `f.call(query="x")` is read too.
    """

    name: ClassVar[str] = "llama3_json"
    stop = ("<|eot_id|>", "<|eom_id|>")
    result_role = "ipython"
    openers = (_PYTHON_TAG, "{")
    turn_end = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    arguments_key = "parameters"
    list_notes = ()
    around = ("", "; ", "")
    trigger = '{"name": "'
    shape = '{"name": "tool name", "parameters": {"argument": "value"}}'

    def opens(self, reader: Reader, start: int) -> Steps[bool]:
        """Step: whether an object stands where a call may, and begins like one."""
        if reader.at(_PYTHON_TAG, start):
            return True
        covered = reader.covered
        follows = start - covered < 16 and reader.text[covered:start].strip() == ";"
        if not (reader.is_line_start(start) or (follows and reader.calls)):
            return False
        while not _FIRST_KEY.match(reader.text, start):
            if reader.is_whole or not _PART_OF_FIRST_KEY.match(reader.text, start):
                return False
            yield
        return True

    def read(self, reader: Reader, start: int) -> Steps[int]:
        """Read one object or built-in call; what turns out to be none is left as text."""
        if (yield from reader.which((_PYTHON_TAG,), start)):
            return (yield from self._behind_tag(reader, start))
        try:
            value, end = yield from reader.json(start)
        except Unreadable as error:
            broke = max(start + 1, start if error.at is None else error.at)
            if error.code != "invalid_json" or self._is_meant(reader.text[start:broke]):
                raise
            return broke
        fields: Any = value
        name, inner = fields.get("name"), fields.get("function")
        if not (isinstance(name, str) and fields.keys() & {"parameters", "arguments"}) and not (
            isinstance(inner, dict) and "name" in inner
        ):
            return end
        (attempt,) = self.attempts(value, (), len(reader.calls))
        reader.add(attempt, start, end)
        return end

    def _is_meant(self, broken: str) -> bool:
        return bool(_NAME.search(broken) and _ARGUMENTS.search(broken))

    def _behind_tag(self, reader: Reader, start: int) -> Steps[int]:
        at = yield from reader.skip(start + len(_PYTHON_TAG))
        if at == len(reader.text):
            raise Unreadable("unclosed", "the message ends inside the call", at)
        if reader.text[at] in "[{":
            value, end, notes = yield from self.json(reader, at)
            for attempt in self.attempts(value, notes, len(reader.calls)):
                reader.add(attempt, start, end)
                start = end
            return end
        return (yield from self._builtin(reader, start, at))

    def _builtin(self, reader: Reader, start: int, at: int) -> Steps[int]:
        while not (match := _BUILTIN.match(reader.text, at)) and not reader.is_whole:
            if not _PART_OF_BUILTIN.match(reader.text, at):
                break
            yield
        if match is None:
            raise Unreadable("invalid_json", "invalid JSON, expecting an object", at)
        yield from extent(reader, match.end() - 1)
        name, args, end = LiteralReader(reader.text, self.limits).call(at)
        reader.add(Attempt(name.removesuffix(".call"), args), start, end)
        return end

    def end_of_bad(self, reader: Reader, start: int, broke: int) -> Steps[int]:
        """Step: give the end of the unreadable call at `start`: that of its brackets."""
        tag = yield from reader.which((_PYTHON_TAG,), start)
        at = yield from reader.skip(start + len(tag))
        end = yield from reader.balanced(at)
        return end if end >= 0 else (yield from self.end_of_text(reader))
