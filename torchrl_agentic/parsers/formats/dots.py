"""Calls of dots. Format: the parsers of vLLM and SGLang."""

from __future__ import annotations

import re
from typing import ClassVar

from torchrl_agentic.parsers.engine.json_text import read_call
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.formats.invoke import MiniMaxM2Parser


class DotsParser(MiniMaxM2Parser):
    """`<invoke name="f"><parameter name="k">v</parameter></invoke>` in one `<dots_function_call>`.

    In place of these a section may hold one call as JSON. Values are taken as they are, their newlines too.
    """

    name: ClassVar[str] = "dots"
    models = "dots"
    example = '<dots_function_call><invoke name="f"><parameter name="k">v</parameter>…'
    stop = ("<|endofresponse|>",)
    section = ("<dots_function_call>", "</dots_function_call>")
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    attribute = re.compile(r"""\s++(\w++)\s*+=\s*+("[^"<>]*+"|'[^'<>]*+')""")
    style = ""
    turn_end = ("<|endofresponse|>",)
    result_tags = ("", "")
    shape = MiniMaxM2Parser.shape.replace("minimax:tool_call", "dots_function_call")

    def read_other_content(self, reader: Reader, start: int) -> Incremental[int]:
        """Read a section that holds JSON.

        Raises:
            CallParseError: it holds something else, or no call.
        """
        if not reader.at("{", start):
            return (yield from super().read_other_content(reader, start))
        value, end = yield from reader.json(start, (self.section[1],))
        attempt = read_call(value, limits=self.limits)
        after = yield from reader.skip(end)
        if not (yield from reader.which(self.section[1:], after)):
            if after < len(reader.text):
                reason = f"after its JSON comes something else than {self.section[1]}"
                raise CallParseError("extra_data", reason, after, tool=attempt.tool)
            attempt.notes = (*attempt.notes, "unclosed_tag")
        reader.add(attempt, start, end)
        return end
