"""Parser of Kimi K2 to K2.6."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.named_json import NamedJSONFormat, NamedJSONParser
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.structural_tag import Frame

_ID = re.compile(r"\s*+(?:functions\.)?+(?P<name>[^\s:]++):(?P<index>\d++)\s*+\Z")
_OURS = re.compile(r"call_\d+_(\d+)")


class KimiK2Parser(NamedJSONParser):
    """The format of Kimi K2 to K2.6: any number of calls in one section.

        <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
        <|tool_call_end|><|tool_calls_section_end|>

    (Without the line break.) The id contains the tool's name and counts the calls of the conversation; ids
    that are assigned here have the call's index in its message. Source: the chat template and the tool-call
    guide of Kimi K2.
    """

    name = "kimi_k2"
    aliases = ("kimi",)
    models = "Kimi K2 to K2.6"
    example = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}"
    stop = ("<|im_end|>",)
    format = NamedJSONFormat(
        openers=("<|tool_call_begin|>",),
        closer="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        around=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
        turn_end=("<|im_end|>", "[EOS]"),
        separator="<|tool_call_argument_begin|>",
    )

    def header(self, text: str) -> tuple[str, str | None]:
        """Return the name in the id, and the id."""
        match = _ID.match(text)
        if match is None:
            raise CallParseError("bad_id", "the id of a call must be functions.name:number")
        return match["name"], text.strip()

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it.

        Raises:
            ValueError: If the name of the tool contains white space or a colon.
        """
        format = self.format
        return f"{format.openers[0]}{wire_id(call)}{format.separator}{dumps(call.args)}{format.closer}"

    def frame(self, name: str) -> Frame:
        """Return the text around the arguments of a call, with any number in its id."""
        format = self.format
        return Frame(
            f"{format.openers[0]}functions.{name}:", format.closer, infix=(r"\d{1,4}", format.separator)
        )

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write the results as messages with the tool's name, which the chat template reads.

        Args:
            calls: Calls of the turn.
            results: One result per call.
        """
        return [
            {**self.render_result(wire_id(call) if call.tool else call.call_id, result), "name": call.tool}
            for call, result in zip(calls, results, strict=True)
        ]


def wire_id(call: ParsedCall) -> str:
    """Return a call's id in Kimi's form: its own, or one with the index of `call_{turn}_{index}`.

    Raises:
        ValueError: If no such id exists for the name of the tool.
    """
    match = _ID.match(call.call_id)
    if match is not None and match["name"] == call.tool:
        return call.call_id
    ours = _OURS.match(call.call_id)
    made = f"functions.{call.tool}:{ours[1] if ours else call.index}"
    if _ID.match(made) is None:
        raise ValueError(f"Kimi's format cannot express the name {call.tool!r}")
    return made
