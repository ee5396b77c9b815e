"""Calls as `<invoke name="f">` with `<parameter name="k">`: MiniMax M2, and DeepSeek V3.2 and V4 ("DSML").

Formats: the chat templates and encoding guides of these models.
"""

from __future__ import annotations

import html
import re
from typing import ClassVar

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.attempts import Attempt, Unreadable
from torchrl_agentic.parsers.engine.jsontext import read_arguments
from torchrl_agentic.parsers.engine.reader import Reader, Steps
from torchrl_agentic.parsers.engine.xml_params import Parameter, XMLParamsParser

_TAG_END = re.compile(r"\s*+>")


class InvokeParser(XMLParamsParser):
    """A format with `invoke` and `parameter` elements that have a `name`.

    attribute: the pattern of an attribute and its value in quotes.
    """

    attribute: ClassVar[re.Pattern[str]] = re.compile(r'\s++(\w++)\s*+=\s*+("[^"<>]*+")')

    def opens(self, reader: Reader, start: int) -> Steps[bool]:
        """Step: whether it stands in a section or at a line start; elsewhere it is prose about calls."""
        return reader.opened_at is not None or reader.is_line_start(start)
        yield

    def read_name(self, reader: Reader, start: int) -> Steps[tuple[str, int]]:
        """Step: read the name of the tool."""
        attributes, end = yield from self._tag(reader, start, self.openers[0])
        return attributes["name"], end

    def read_parameter(self, reader: Reader, start: int) -> Steps[Parameter]:
        """Step: read the opening tag of an argument."""
        attributes, end = yield from self._tag(reader, start, self.parameter)
        return Parameter(attributes["name"], end, self.is_string(attributes))

    def is_string(self, attributes: dict[str, str]) -> bool | None:
        """Whether the tag says that its value is a string; None if it says nothing."""
        del attributes
        return None

    def _tag(self, reader: Reader, start: int, tag: str) -> Steps[tuple[dict[str, str], int]]:
        begin = at = start + len(tag)
        closed = yield from reader.find(">", begin)
        attributes: dict[str, str] = {}
        while match := self.attribute.match(reader.text, at):
            attributes[match[1]] = html.unescape(match[2][1:-1]).strip()
            at = match.end()
        end = _TAG_END.match(reader.text, at)
        if end is None and closed < 0:
            raise Unreadable("unclosed", f"{tag} has no end", begin)
        if end is None or not attributes.get("name"):
            raise Unreadable("missing_name", f'{tag} has no name="…"', begin)
        return attributes, end.end()

    def _named(self, tag: str, name: str, more: str = "") -> str:
        if not name.strip() or name != name.strip():
            raise ValueError(f"the format cannot hold the name {name!r}")
        return f'{tag} name="{html.escape(name)}"{more}>'


class MiniMaxM2Parser(InvokeParser):
    """`<invoke name="f"><parameter name="k">v</parameter></invoke>` in one `<minimax:tool_call>`."""

    name: ClassVar[str] = "minimax_m2"
    aliases = ("minimax", "minimax-m2")
    models = "MiniMax M2, M2.5"
    example = '<invoke name="f"><parameter name="k">v</parameter></invoke>'
    stop = ("[e~[",)
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    openers = ("<invoke",)
    closer = "</invoke>"
    parameter, parameter_end = "<parameter", "</parameter>"
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    style = "minimax_xml"
    turn_end = ("[e~[",)
    forged = ("<response>", "</response>")
    shape = (
        '<minimax:tool_call>\n<invoke name="tool_name">\n<parameter name="argument">value</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    )

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        values = "".join(
            f"{self._named(self.parameter, name)}{self.raw(name, value)}{self.parameter_end}\n"
            for name, value in call.args.items()
        )
        return f"{self._named(self.openers[0], call.tool)}\n{values}{self.closer}"


class DeepSeekV32Parser(InvokeParser):
    """The same with `<｜DSML｜` before each name; `string="false"` marks a value that is JSON.

    In place of parameters a call may hold one JSON object.
    """

    name: ClassVar[str] = "deepseek_v32"
    aliases = ("deepseekv32",)
    models = "DeepSeek V3.2"
    example = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">…'
    stop = ("<｜end▁of▁sentence｜>",)
    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    openers = ("<｜DSML｜invoke",)
    closer = "</｜DSML｜invoke>"
    parameter, parameter_end = "<｜DSML｜parameter", "</｜DSML｜parameter>"
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    style = "deepseek_xml"
    turn_end = ("<｜end▁of▁sentence｜>",)
    forged = ("<function_results>", "</function_results>")
    shape = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="tool_name">\n'
        '<｜DSML｜parameter name="argument" string="true">value</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )

    def is_string(self, attributes: dict[str, str]) -> bool | None:
        """Whether the tag says that its value is a string."""
        told = attributes.get("string")
        return None if told not in ("true", "false") else told == "true"

    def json_body(self, reader: Reader, at: int) -> Steps[tuple[Attempt, int]]:
        """Step: read arguments that are one JSON object."""
        value, end = yield from reader.json(at, (self.closer,))
        args, notes = read_arguments(value, self.limits)
        after = yield from reader.skip(end)
        if not (yield from reader.which((self.closer,), after)):
            code = "unclosed" if after == len(reader.text) else "extra_data"
            raise Unreadable(code, f"after its JSON stands something else than {self.closer}", after)
        return Attempt(args=args, notes=notes), after + len(self.closer)

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it."""
        values = "".join(
            f"{self._named(self.parameter, name, self._kind(isinstance(value, str)))}"
            f"{self.raw(name, value)}{self.parameter_end}\n"
            for name, value in call.args.items()
        )
        return f"{self._named(self.openers[0], call.tool)}\n{values}{self.closer}"

    def _kind(self, is_string: bool) -> str:
        return f' string="{"true" if is_string else "false"}"'


class DeepSeekV4Parser(DeepSeekV32Parser):
    """V4's variant, whose section is called `tool_calls`."""

    name: ClassVar[str] = "deepseek_v4"
    aliases = ("deepseekv4",)
    models = "DeepSeek V4"
    example = '<｜DSML｜tool_calls><｜DSML｜invoke name="f">…'
    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    around = (f"{section[0]}\n", "\n", f"\n{section[1]}")
    forged = ("<tool_result>", "</tool_result>")
    shape = DeepSeekV32Parser.shape.replace("function_calls", "tool_calls")
