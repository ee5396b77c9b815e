"""Calls of Kimi K2, K2.5 and K2.6. Format: their chat template and tool-call guide."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.named_json import NamedJSONParser
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.structural_tag import Frame

_ID = re.compile(r"\s*+(?:functions\.)?+(?P<name>[^\s:]++):(?P<index>\d++)\s*+\Z")
_OURS = re.compile(r"call_\d+_(\d+)")


class KimiK2Parser(NamedJSONParser):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in one section.

    The id names the tool; its number counts the calls of the conversation. An id that we make has the index
    of the call in its message.
    """

    name: ClassVar[str] = "kimi_k2"
    aliases = ("kimi",)
    models = "Kimi K2 to K2.6"
    example = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}"
    stop = ("<|im_end|>",)
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    around = (section[0], "", section[1])
    openers = ("<|tool_call_begin|>",)
    closer = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    turn_end = ("<|im_end|>", "[EOS]")
    shape = f'{section[0]}{openers[0]}functions.name:0{separator}{{"argument": "value"}}{closer}{section[1]}'

    def header(self, text: str) -> tuple[str, str | None]:
        """Read the id, which holds the name."""
        match = _ID.match(text)
        if match is None:
            raise CallParseError("bad_id", "the id of a call is functions.name:number")
        return match["name"], text.strip()

    def write(self, call: ParsedCall) -> str:
        """Write a call without the section around it.

        Raises:
            ValueError: the name of the tool holds white space or a colon.
        """
        return f"{self.openers[0]}{wire_id(call)}{self.separator}{dumps(call.args)}{self.closer}"

    def frame(self, name: str) -> Frame:
        """Give what stands around the arguments of a call, with any number in its id."""
        return Frame(f"{self.openers[0]}functions.{name}:", self.closer, infix=(r"\d{1,4}", self.separator))

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write the results as messages that name their tool, as the chat template wants it."""
        return [
            {**self.render_result(wire_id(call) if call.tool else call.call_id, result), "name": call.tool}
            for call, result in zip(calls, results, strict=True)
        ]


def wire_id(call: ParsedCall) -> str:
    """Give a call's id in Kimi's shape: its own, or one with the index of `call_{turn}_{index}`.

    Raises:
        ValueError: there is none for the name of the tool.
    """
    match = _ID.match(call.call_id)
    if match is not None and match["name"] == call.tool:
        return call.call_id
    ours = _OURS.match(call.call_id)
    made = f"functions.{call.tool}:{ours[1] if ours else call.index}"
    if _ID.match(made) is None:
        raise ValueError(f"Kimi's format cannot name a tool {call.tool!r}")
    return made
