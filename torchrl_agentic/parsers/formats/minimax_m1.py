"""Parser of MiniMax M1: one JSON object per line between `<tool_calls>` tags."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader


class MiniMaxM1Parser(JSONBlockParser):
    """The format of MiniMax M1: one call per line.

        <tool_calls>
        {"name": "f", "arguments": {"a": 1}}
        {"name": "g", "arguments": {}}
        </tool_calls>

    Source: the chat template.
    """

    name: ClassVar[str] = "minimax_m1"
    models = "MiniMax M1"
    example = '<tool_calls>\\n{"name", "arguments"}\\n</tool_calls>'
    stop = ("<end_of_sentence>",)
    openers = ("<tool_calls>",)
    closer = "</tool_calls>"
    turn_end = ("<end_of_sentence>",)
    around = ("<tool_calls>\n", "\n", "\n</tool_calls>")
    fast = False
    shape = '<tool_calls>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</tool_calls>'

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one block; calls before a malformed line count."""
        at, notes = yield from self.begin(reader, start)
        if (yield from reader.which((self.closer,), at)):
            raise CallParseError("empty", "there is nothing between the tags", at)
        while True:
            value, end, fixes = yield from self.json(reader, at)
            at = yield from reader.skip(end)
            is_last = reader.text[at : at + 1] != "{"
            if is_last:
                end, more = yield from self.tail(reader, end)
                fixes = (*fixes, *more)
            try:
                found = self.attempts(value, (*notes, *fixes), len(reader.calls), is_checked=False)
            except CallParseError as error:
                error.at, error.end = start, end
                raise
            for attempt in found:
                reader.add(attempt, start, end)
                start = end
            if is_last:
                return end

    def write(self, call: ParsedCall) -> str:
        """Write a call without the tags around all calls."""
        return dumps({"name": call.tool, "arguments": call.args})
