"""Parser of K2 Horizon."""

from __future__ import annotations

from torchrl_agentic.parsers.engine.json_text import read_call
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import XMLFormat, XMLParamsParser
from torchrl_agentic.parsers.formats.glm import KeyTags

_TYPE, _TYPE_END = "<ifm|arg_type>", "</ifm|arg_type>"
_THOUGHTS = tuple((f"<ifm|{level}>", f"</ifm|{level}>") for level in ("think", "think_fast", "think_faster"))


class K2HorizonParser(XMLParamsParser):
    """The format of K2 Horizon: any number of calls in one section.

        <ifm|tool_calls>
        <ifm|tool_call>f
        <ifm|arg_key>a</ifm|arg_key>
        <ifm|arg_value>1</ifm|arg_value>
        </ifm|tool_call>
        </ifm|tool_calls>

    This is the format "xml" of its chat template. In "xml_typed" an `<ifm|arg_type>` precedes each value, and
    in "json" a call is `{"name", "arguments"}`; both are read too. Each level of effort has its own reasoning
    tags. Source: the parsers of vLLM and SGLang.
    """

    name = "k2_horizon"
    models = "K2 Horizon"
    example = "<ifm|tool_call>f<ifm|arg_key>k</ifm|arg_key><ifm|arg_value>v</ifm|arg_value>…"
    format = XMLFormat(
        openers=("<ifm|tool_call>",),
        closer="</ifm|tool_call>",
        section=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        around=("<ifm|tool_calls>\n", "\n", "\n</ifm|tool_calls>"),
        think=_THOUGHTS[0],
        other_thinks=_THOUGHTS[1:],
        turn_end=("<|ifm|im_end|>",),
        parameter="<ifm|arg_key>",
        parameter_end="</ifm|arg_value>",
        tags=KeyTags("</ifm|arg_key>", "<ifm|arg_value>", type_tags=("<ifm|arg_type>", "</ifm|arg_type>")),
    )

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one call, whose body may be JSON.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        format = self.format
        at = yield from reader.past_repeated(format.openers[0], start + len(format.openers[0]))
        at = yield from reader.skip(at)
        if not reader.at("{", at):
            return (yield from super().read(reader, start))
        value, end = yield from reader.json(at, (format.closer,))
        attempt = read_call(value, limits=self.limits)
        end = yield from self.past_json(reader, end, tool=attempt.tool)
        reader.add(attempt, start, end)
        return end
