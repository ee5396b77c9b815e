"""Parser of MiniMax M1: one JSON object per line between `<tool_calls>` tags."""

from __future__ import annotations

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat, read_json
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

    name = "minimax_m1"
    models = "MiniMax M1"
    example = '<tool_calls>\\n{"name", "arguments"}\\n</tool_calls>'
    format = JSONFormat(
        openers=("<tool_calls>",),
        closer="</tool_calls>",
        around=("<tool_calls>\n", "\n", "\n</tool_calls>"),
        turn_end=("<end_of_sentence>",),
        fast=False,
        written=("", ""),
    )

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one block; calls before a malformed line count."""
        at, notes = yield from self.begin(reader, start)
        if (yield from reader.which((self.format.closer,), at)):
            raise CallParseError("empty", "there is nothing between the tags", at)
        while True:
            value, end, fixes = yield from read_json(self, reader, at)
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
