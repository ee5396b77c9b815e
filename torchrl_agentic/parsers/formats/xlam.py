"""Parser of xLAM 2: a bare JSON list."""

from __future__ import annotations

import re
from typing import Any, cast

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat
from torchrl_agentic.parsers.engine.json_text import fits
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.scan import has_shape
from torchrl_agentic.parsers.formats.llama import read_bare

_TAG, _TAG_END = "<tool_call>", "</tool_call>"
_WRAPPERS = (_TAG, "[TOOL_CALLS]")
_KEYS = "name|parameters|arguments|type|function|id"
_FIRST_KEY = re.compile(rf'\[\s{{0,99}}+\{{\s{{0,99}}+"(?:{_KEYS})"\s{{0,99}}+:')
_PART_OF_FIRST_KEY = re.compile(r'\[\s{0,99}+(?:\{\s{0,99}+(?:"\w{0,10}(?:"\s{0,99}+)?)?)?\Z')


class XLAMParser(JSONBlockParser):
    """The format of xLAM 2: a JSON list on a line of its own, or after reasoning.

        [{"name": "f", "arguments": {"a": 1}}]

    Without an opener, a list is a call if its first object begins with a key of a call and one of its objects
    has a name and arguments, or is malformed after them. A Markdown fence of JSON or without a language may
    surround it. After `[TOOL_CALLS]` and in `<tool_call>` tags any content is a call, and noted. `[]` is
    text: no tool fits. Source: the chat templates, and the wrappers that vLLM's parser reads.
    """

    name = "xlam"
    models = "xLAM 2"
    example = '[{"name", "arguments"}]'
    result_role = "tool"
    format = JSONFormat(
        openers=(*_WRAPPERS, "["),
        shapes={"[": (_FIRST_KEY, _PART_OF_FIRST_KEY)},
        around=("[", ", ", "]"),
        turn_end=("<|im_end|>", "<|eot_id|>"),
        list_notes=(),
        written=("", ""),
        has_grammar=False,
        call_fences=("```", "```json"),
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether a list is where a call may be, and begins like one of calls."""
        if (yield from reader.which(_WRAPPERS, start)):
            return True
        if not reader.at("[", start) or not reader.is_line_start(start):
            return False
        return (yield from has_shape(self.format, reader, start))

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
            return (yield from read_bare(reader, start, self._list))
        end = yield from super().read(reader, start)
        if wrapper == _TAG:
            after = yield from reader.skip(end)
            if (yield from reader.which((_TAG_END,), after)):
                end = after + len(_TAG_END)
                reader.extend(end)
        return end

    def _list(self, reader: Reader, start: int, value: JSON, end: int) -> Incremental[int]:
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
        return end if end >= 0 else (yield from reader.end_of_text())


def _is_call(item: Any) -> bool:
    """Return whether an object has a name and arguments, or those under "function"."""
    if not isinstance(item, dict):
        return False
    fields = cast("dict[str, Any]", item)
    if isinstance(fields.get("function"), dict) and "name" not in fields:
        return "name" in fields["function"]
    return isinstance(fields.get("name"), str) and bool(fields.keys() & {"parameters", "arguments"})
