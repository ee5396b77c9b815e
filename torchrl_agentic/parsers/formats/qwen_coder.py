"""Parsers of Qwen3-Coder, Qwen3.5 and later, Nemotron 3 and Granite 4.2; of MiMo V2; of Seed-OSS."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import Parameter, XMLParamsParser

_NAME = re.compile("([^<>\n]*+)>")


class Qwen3CoderParser(XMLParamsParser):
    """The format of Qwen3-Coder and Qwen3.5: each tag and each value on lines of its own.

        <tool_call>
        <function=f>
        <parameter=a>
        1
        </parameter>
        </function>
        </tool_call>

    `<function=` alone begins a call too, since these models omit the tag around it. Source: the chat
    templates.
    """

    name: ClassVar[str] = "qwen3_coder"
    aliases = (
        "qwen3_xml", "qwen3.5", "step3p5", "step5", "nanbeige", "granite_thinking", "granite_thinking_parser",
    )  # fmt: skip
    models = "Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step-3.5 and later, Granite 4.2"
    example = "<tool_call><function=f><parameter=k>v</parameter>…"
    stop = ("<|im_end|>",)
    section = ("<tool_call>", "</tool_call>")
    openers = ("<function=",)
    closer = "</function>"
    parameter, parameter_end = "<parameter=", "</parameter>"
    newlines: ClassVar[Literal["data", "each", "pair"]] = "each"
    own_lines = True
    style = "qwen_xml"
    trigger = f"{section[0]}\n{openers[0]}"
    turn_end = ("<|im_end|>", "<|endoftext|>")
    result_tags = ("<tool_response>", "</tool_response>")
    shape = (
        "<tool_call>\n<function=tool_name>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n"
        "</tool_call>"
    )

    def read_name(self, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the name of the tool."""
        return (yield from self._equals(reader, start, self.openers[0]))

    def read_parameter(self, reader: Reader, start: int) -> Incremental[Parameter]:
        """Read the opening tag of an argument."""
        return Parameter(*(yield from self._equals(reader, start, self.parameter)))

    def _equals(self, reader: Reader, start: int, tag: str) -> Incremental[tuple[str, int]]:
        begin = start + len(tag)
        match = _NAME.match(reader.text, begin)
        if match is not None and (name := match[1].strip()):
            return name, match.end()
        end = yield from reader.find_first((">", "\n", "<"), begin)
        if end[1] != ">":
            raise CallParseError("unclosed", f"{tag} has no end", start)
        name = reader.text[begin : end[0]].strip()
        if not name:
            raise CallParseError("missing_name", f"{tag} has no name", start)
        return name, end[0] + 1

    def write(self, call: ParsedCall) -> str:
        """Write a call with the tag around it.

        Raises:
            ValueError: If the format cannot express the call.
        """
        for name in (call.tool, *call.args):
            if name != name.strip() or not name or _NAME.fullmatch(f"{name}>") is None:
                raise ValueError(f"the format cannot express the name {name!r}")
        values = "".join(
            f"{self.parameter}{name}>{self.wrapped(self.raw(name, value))}{self.parameter_end}\n"
            for name, value in call.args.items()
        )
        body = f"{self.openers[0]}{call.tool}>\n{values}{self.closer}"
        return f"{self.section[0]}\n{body}\n{self.section[1]}"

    def wrapped(self, text: str) -> str:
        """Return a value with the newlines that the format writes around it."""
        return f"\n{text}\n"


class MiMoParser(Qwen3CoderParser):
    """The format of MiMo V2: that of Qwen3-Coder without newlines around values; newlines there are data.

        <tool_call>
        <function=f>
        <parameter=a>1</parameter>
        </function>
        </tool_call>

    Source: the chat template.
    """

    name: ClassVar[str] = "mimo"
    aliases = ("mimo_v2",)
    models = "MiMo V2"
    newlines: ClassVar[Literal["data", "each", "pair"]] = "data"
    shape = Qwen3CoderParser.shape.replace("\nvalue\n", "value")

    def wrapped(self, text: str) -> str:
        """Return the value unchanged."""
        return text


class SeedOSSParser(Qwen3CoderParser):
    """The format of Seed-OSS: that of Qwen3-Coder between other tags, without newlines around values.

        <seed:tool_call>
        <function=f>
        <parameter=a>1</parameter>
        </function>
        </seed:tool_call>

    A value with newlines on both sides is in Qwen3-Coder's format, which the model writes too. Source: the
    chat template.
    """

    name: ClassVar[str] = "seed_oss"
    aliases = ("seed",)
    models = "Seed-OSS"
    example = "<seed:tool_call><function=f><parameter=k>v</parameter>…"
    stop = ("<seed:eos>",)
    section = ("<seed:tool_call>", "</seed:tool_call>")
    think = ("<seed:think>", "</seed:think>")
    trigger = f"{section[0]}\n{Qwen3CoderParser.openers[0]}"
    turn_end = ("<seed:eos>",)
    result_tags = ("", "")
    newlines: ClassVar[Literal["data", "each", "pair"]] = "pair"
    shape = Qwen3CoderParser.shape.replace("\nvalue\n", "value").replace("tool_call>", "seed:tool_call>")

    def wrapped(self, text: str) -> str:
        """Return the value, with newlines around it only if it begins and ends with newlines itself."""
        return text if self.unwrapped(text) == text else f"\n{text}\n"
