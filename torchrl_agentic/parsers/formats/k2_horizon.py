"""Parser of K2 Horizon."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.engine.json_text import read_call
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.formats.glm import GLM45Parser

_TYPE, _TYPE_END = "<ifm|arg_type>", "</ifm|arg_type>"
_THOUGHTS = tuple((f"<ifm|{level}>", f"</ifm|{level}>") for level in ("think", "think_fast", "think_faster"))


class K2HorizonParser(GLM45Parser):
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

    name: ClassVar[str] = "k2_horizon"
    models = "K2 Horizon"
    example = "<ifm|tool_call>f<ifm|arg_key>k</ifm|arg_key><ifm|arg_value>v</ifm|arg_value>…"
    stop = ("<|ifm|im_end|>",)
    section = ("<ifm|tool_calls>", "</ifm|tool_calls>")
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    openers = ("<ifm|tool_call>",)
    closer = "</ifm|tool_call>"
    parameter, parameter_end = "<ifm|arg_key>", "</ifm|arg_value>"
    key_end, value_begin = "</ifm|arg_key>", "<ifm|arg_value>"
    style = ""
    think = _THOUGHTS[0]
    other_thinks = _THOUGHTS[1:]
    turn_end = ("<|ifm|im_end|>",)
    result_tags = ("", "")
    shape = (
        "<ifm|tool_calls>\n<ifm|tool_call>tool_name\n<ifm|arg_key>argument</ifm|arg_key>\n"
        "<ifm|arg_value>value</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>"
    )

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one call, whose body may be JSON.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        at = yield from reader.past_repeated(self.openers[0], start + len(self.openers[0]))
        at = yield from reader.skip(at)
        if not reader.at("{", at):
            return (yield from super().read(reader, start))
        value, end = yield from reader.json(at, (self.closer,))
        attempt = read_call(value, limits=self.limits)
        end = yield from self.past_closer(reader, end, tool=attempt.tool)
        reader.add(attempt, start, end)
        return end

    def read_type(self, reader: Reader, at: int) -> Incremental[tuple[int, bool | None]]:
        """Read the type of an argument if it is there; `array[string]` and its like are not strings."""
        begin = yield from reader.skip(at)
        if not (yield from reader.which((_TYPE,), begin)):
            return at, None
        begin += len(_TYPE)
        markers = (_TYPE_END, self.value_begin, self.closer, *self.openers, *self.turn_end)
        end, marker = yield from reader.find_first(markers, begin)
        if marker != _TYPE_END:
            raise CallParseError("unclosed", f"the type of an argument must end with {_TYPE_END}", begin)
        kind = reader.text[begin:end].strip().lower()
        return end + len(_TYPE_END), None if kind in ("", "any") else kind == "string"
