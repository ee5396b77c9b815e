"""Parser of xLAM 2: a bare JSON list."""

from __future__ import annotations

import re
from typing import Any, ClassVar, cast

from torchrl_agentic.messages import JSON, ParsedCall
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser
from torchrl_agentic.parsers.engine.json_text import dumps, fits
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.formats.llama import Llama3JSONParser

_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_WRAPPERS = (_TAG, "[TOOL_CALLS]")
_JSON_FENCES, _LONGEST = ("```", "```json"), 20
_KEYS = "name|parameters|arguments|type|function|id"
_FIRST_KEY = re.compile(rf'\[\s{{0,99}}+\{{\s{{0,99}}+"(?:{_KEYS})"\s{{0,99}}+:')
_PART_OF_FIRST_KEY = re.compile(r'\[\s{0,99}+(?:\{\s{0,99}+(?:"\w{0,10}(?:"\s{0,99}+)?)?)?\Z')


class XLAMParser(Llama3JSONParser):
    """The format of xLAM 2: a JSON list on a line of its own, or after reasoning.

        [{"name": "f", "arguments": {"a": 1}}]

    Without an opener, a list is a call if its first object begins with a key of a call and one of its objects
    has a name and arguments, or is malformed after them. A Markdown fence of JSON or without a language may
    surround it. After `[TOOL_CALLS]` and in `<tool_call>` tags any content is a call, and noted. `[]` is
    text: no tool fits. Source: the chat templates, and the wrappers that vLLM's parser reads.
    """

    name: ClassVar[str] = "xlam"
    models = "xLAM 2"
    example = '[{"name", "arguments"}]'
    stop = ("<|im_end|>", "<|eot_id|>")
    result_role = "tool"
    openers = (*_WRAPPERS, "[")
    shapes: ClassVar = {"[": (_FIRST_KEY, _PART_OF_FIRST_KEY)}
    turn_end = ("<|im_end|>", "<|eot_id|>")
    arguments_key = "arguments"
    around = ("[", ", ", "]")
    trigger = ""
    shape = '[{"name": "tool name", "arguments": {"argument": "value"}}]'

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether a list is where a call may be, and begins like one of calls."""
        if (yield from reader.which(_WRAPPERS, start)):
            return True
        if not reader.at("[", start) or not reader.is_line_start(start):
            return False
        return (yield from self.has_shape(reader, start))

    def begin(self, reader: Reader, start: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Read the wrapper at `start`; return the start of its JSON and a note.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.

        Raises:
            CallParseError: If the message ends there.
        """
        at = start
        while wrapper := (yield from reader.which(_WRAPPERS, at)):
            at = yield from reader.skip(at + len(wrapper))
        if at == len(reader.text):
            raise CallParseError("unclosed", "the message ends inside the call", at)
        return at, ("foreign_wrapper",)

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one list; a list without calls stays text."""
        wrapper = yield from reader.which(_WRAPPERS, start)
        if not wrapper:
            return (yield from super().read(reader, start))
        end = yield from JSONBlockParser.read(self, reader, start)
        if wrapper == _TAG:
            after = yield from reader.skip(end)
            if (yield from reader.which((_TAG_END,), after)):
                end = after + len(_TAG_END)
                reader.extend(end)
        return end

    def _read_fence(self, reader: Reader, place: int, marker: str) -> Incremental[int]:
        """Read a Markdown fence; return the end of its first line if it may contain calls."""
        line_end = yield from reader.line_end(place)
        if line_end - place <= _LONGEST and reader.text[place:line_end].strip() in _JSON_FENCES:
            return line_end
        return (yield from super()._read_fence(reader, place, marker))

    def _object(self, reader: Reader, start: int, value: JSON, end: int) -> Incremental[int]:
        items = cast("list[Any]", value)
        if any(map(_is_call, items)):
            small = fits(reader.text, start, end, self.limits)
            for attempt in self.attempts(value, (), len(reader.calls), is_checked=small):
                reader.add(attempt, start, end)
                start = end
        return end
        yield

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed list at `start`: that of its wrapper or of its brackets."""
        at = start
        while wrapper := (yield from reader.which(_WRAPPERS, at)):
            at = yield from reader.skip(at + len(wrapper))
        if reader.at(_TAG, start):
            closer = yield from reader.find(_TAG_END, max(at, broke))
            end = closer + len(_TAG_END) if closer >= 0 else -1
        else:
            end = yield from reader.balanced(at)
        return end if end >= 0 else (yield from self.end_of_text(reader))

    def write(self, call: ParsedCall) -> str:
        """Write a call without the list around it."""
        return dumps({"name": call.tool, "arguments": call.args})

    def frame(self, name: str) -> None:
        """Return None: a grammar would have to start at every bracket."""
        del name


def _is_call(item: Any) -> bool:
    """Return whether an object has a name and arguments, or those under "function"."""
    if not isinstance(item, dict):
        return False
    fields = cast("dict[str, Any]", item)
    if isinstance(fields.get("function"), dict) and "name" not in fields:
        return "name" in fields["function"]
    return isinstance(fields.get("name"), str) and bool(fields.keys() & {"parameters", "arguments"})
