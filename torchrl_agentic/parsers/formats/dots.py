"""Parser of dots."""

from __future__ import annotations

from dataclasses import replace

from torchrl_agentic.parsers.engine.json_text import read_call
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import XMLParamsParser
from torchrl_agentic.parsers.formats.invoke import EITHER_QUOTES, AttributeTags, MiniMaxM2Parser


class DotsParser(XMLParamsParser):
    """The format of dots: `invoke` elements in one section.

        <dots_function_call>
        <invoke name="f">
        <parameter name="a">1</parameter>
        </invoke>
        </dots_function_call>

    A section may hold one call as JSON instead. All newlines in values are data. Source: the parsers of vLLM
    and SGLang.
    """

    name = "dots"
    models = "dots"
    example = '<dots_function_call><invoke name="f"><parameter name="k">v</parameter>…'
    format = replace(
        MiniMaxM2Parser.format,
        section=("<dots_function_call>", "</dots_function_call>"),
        around=("<dots_function_call>\n", "\n", "\n</dots_function_call>"),
        turn_end=("<|endofresponse|>",),
        tags=AttributeTags(EITHER_QUOTES),
        result_tags=("", ""),
        style="",
    )

    def read_other_content(self, reader: Reader, start: int) -> Incremental[int]:
        """Read a section that contains JSON.

        Args:
            reader: The message as read so far.
            start: Index of the content.

        Raises:
            CallParseError: If it contains something else, or no call.
        """
        format = self.format
        if not reader.at("{", start):
            return (yield from super().read_other_content(reader, start))
        value, end = yield from reader.json(start, (format.section[1],))
        attempt = read_call(value, limits=self.limits)
        after = yield from reader.skip(end)
        if not (yield from reader.which(format.section[1:], after)):
            if after < len(reader.text):
                reason = f"unexpected text after the JSON, expecting {format.section[1]}"
                raise CallParseError("extra_data", reason, after, tool=attempt.tool)
            attempt.notes = (*attempt.notes, "unclosed_tag")
        reader.add(attempt, start, end)
        return end
