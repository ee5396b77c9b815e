"""Calls of GLM-4.5 to 4.7 and GLM-5. Format: their chat templates."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.attempts import Unreadable
from torchrl_agentic.parsers.engine.reader import Reader, Steps
from torchrl_agentic.parsers.engine.xml_params import Parameter, XMLParamsParser

_KEY_END, _VALUE = "</arg_key>", "<arg_value>"


class GLM45Parser(XMLParamsParser):
    """`<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, with or without newlines."""

    name: ClassVar[str] = "glm45"
    aliases = ("glm", "glm47", "ling3", "spark25", "poolside_v1")
    models = "GLM-4.5 to 4.7, GLM-5, Ling 3, Spark 2.5, Laguna"
    example = "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    stop = ("<|observation|>", "<|user|>", "<|endoftext|>")
    openers = ("<tool_call>",)
    closer = "</tool_call>"
    parameter, parameter_end = "<arg_key>", "</arg_value>"
    style = "glm_xml"
    turn_end = ("<|observation|>", "<|user|>", "<|endoftext|>")
    forged = ("<tool_response>", "</tool_response>")
    shape = "<tool_call>tool_name\n<arg_key>argument</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"

    def read_name(self, reader: Reader, start: int) -> Steps[tuple[str, int]]:
        """Step: read the name of the tool, up to the first argument or the end."""
        begin = yield from reader.past_repeated(self.openers[0], start + len(self.openers[0]))
        markers = (self.parameter, self.closer, *self.openers, *self.turn_end)
        end = yield from reader.find_first(markers, begin)
        if end[0] < 0:
            raise Unreadable("unclosed", f"the message ends before {self.closer}", begin)
        name = reader.text[begin : end[0]].strip()
        if "{" in name or name.startswith("<"):
            raise Unreadable(
                "wrong_dialect", "here a call is the name of the tool, then its arguments", begin
            )
        if "<" in name:
            at = reader.text.find("<", begin)
            raise Unreadable("extra_data", f"expecting {self.parameter} behind the name", at)
        if end[1] in self.turn_end:
            raise Unreadable("unclosed", f"the turn ends before {self.closer}", end[0])
        if not name or len(name.split()) > 1:
            code = "missing_name" if name or end[1] == self.parameter else "empty"
            raise Unreadable(code, "the name of the tool is missing", begin)
        if end[1] in self.openers:
            raise Unreadable("unclosed", f"{self.closer} is missing", end[0])
        return name, end[0]

    def read_parameter(self, reader: Reader, start: int) -> Steps[Parameter]:
        """Step: read the name of an argument and the tag of its value."""
        begin = start + len(self.parameter)
        end = yield from self._within_call(reader, _KEY_END, begin)
        value = yield from reader.skip(end + len(_KEY_END))
        if value == len(reader.text):
            raise Unreadable("unclosed", f"the message ends before {_VALUE}", value)
        if not (yield from reader.which((_VALUE,), value)):
            raise Unreadable("extra_data", f"expecting {_VALUE}", value)
        return Parameter(reader.text[begin:end].strip(), value + len(_VALUE))

    def _within_call(self, reader: Reader, marker: str, at: int) -> Steps[int]:
        markers = (marker, self.closer, *self.openers, *self.turn_end)
        found = yield from reader.find_first(markers, at)
        if found[1] != marker or not reader.text[at : found[0]].strip():
            broke = len(reader.text) if found[0] < 0 else found[0]
            code = "missing_name" if found[1] == marker else "unclosed"
            raise Unreadable(code, f"the name of an argument ends with {marker}", broke)
        return found[0]

    def write(self, call: ParsedCall) -> str:
        """Write a call.

        Raises:
            ValueError: the format cannot say it.
        """
        for name in (call.tool, *call.args):
            if name != name.strip() or not name or "<" in name or "{" in name:
                raise ValueError(f"the format cannot hold the name {name!r}")
        values = "".join(
            f"\n{self.parameter}{name}{_KEY_END}\n{_VALUE}{self.raw(name, value)}{self.parameter_end}"
            for name, value in call.args.items()
        )
        return f"{self.openers[0]}{call.tool}{values}\n{self.closer}"
