"""Parsers of Qwen3-Coder, Qwen3.5 and later, Nemotron 3 and Granite 4.2; of MiMo V2; of Seed-OSS."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from torchrl_agentic.messages import JSON, ParsedCall
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.xml_params import ArgumentTags, Parameter, XMLFormat, XMLParamsParser

_NAME = re.compile("([^<>\n]*+)>")


class EqualsTags(ArgumentTags):
    """Tags with a name after an equals sign: `<function=f>` and `<parameter=a>`."""

    def read_name(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[tuple[str, int]]:
        """Read the name of the tool."""
        return self._read(reader, start, format.openers[0])

    def read_parameter(self, format: XMLFormat, reader: Reader, start: int) -> Incremental[Parameter]:
        """Read the opening tag of an argument."""
        return Parameter(*(yield from self._read(reader, start, format.parameter)))

    def _read(self, reader: Reader, start: int, tag: str) -> Incremental[tuple[str, int]]:
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

    def write(self, format: XMLFormat, call: ParsedCall, raw: Callable[[str, JSON], str]) -> str:
        """Write a call with the tag around it.

        Raises:
            ValueError: If the format cannot express the call.
        """
        for name in (call.tool, *call.args):
            if name != name.strip() or not name or _NAME.fullmatch(f"{name}>") is None:
                raise ValueError(f"the format cannot express the name {name!r}")
        values = "".join(
            f"{format.parameter}{name}>{format.wrapped(raw(name, value))}{format.parameter_end}\n"
            for name, value in call.args.items()
        )
        body = f"{format.openers[0]}{call.tool}>\n{values}{format.closer}"
        return f"{format.section[0]}\n{body}\n{format.section[1]}"


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

    name = "qwen3_coder"
    aliases = (
        "qwen3_xml", "qwen3.5", "step3p5", "step5", "nanbeige", "granite_thinking", "granite_thinking_parser",
    )  # fmt: skip
    models = "Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Step-3.5 and later, Granite 4.2"
    example = "<tool_call><function=f><parameter=k>v</parameter>…"
    stop = ("<|im_end|>",)
    format = XMLFormat(
        openers=("<function=",),
        closer="</function>",
        section=("<tool_call>", "</tool_call>"),
        trigger="<tool_call>\n<function=",
        turn_end=("<|im_end|>", "<|endoftext|>"),
        result_tags=("<tool_response>", "</tool_response>"),
        parameter="<parameter=",
        parameter_end="</parameter>",
        newlines="each",
        own_lines=True,
        style="qwen_xml",
        tags=EqualsTags(),
    )


class MiMoParser(XMLParamsParser):
    """The format of MiMo V2: that of Qwen3-Coder without newlines around values; newlines there are data.

        <tool_call>
        <function=f>
        <parameter=a>1</parameter>
        </function>
        </tool_call>

    Source: the chat template.
    """

    name = "mimo"
    aliases = ("mimo_v2",)
    models = "MiMo V2"
    example = "<tool_call><function=f><parameter=k>v</parameter>…"
    stop = ("<|im_end|>",)
    format = replace(Qwen3CoderParser.format, newlines="data")


class SeedOSSParser(XMLParamsParser):
    """The format of Seed-OSS: that of Qwen3-Coder between other tags, without newlines around values.

        <seed:tool_call>
        <function=f>
        <parameter=a>1</parameter>
        </function>
        </seed:tool_call>

    A value with newlines on both sides is in Qwen3-Coder's format, which the model writes too. Source: the
    chat template.
    """

    name = "seed_oss"
    aliases = ("seed",)
    models = "Seed-OSS"
    example = "<seed:tool_call><function=f><parameter=k>v</parameter>…"
    format = replace(
        Qwen3CoderParser.format,
        section=("<seed:tool_call>", "</seed:tool_call>"),
        trigger="<seed:tool_call>\n<function=",
        think=("<seed:think>", "</seed:think>"),
        turn_end=("<seed:eos>",),
        newlines="pair",
        result_tags=("", ""),
    )
