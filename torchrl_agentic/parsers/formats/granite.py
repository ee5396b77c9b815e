"""Parsers of Granite 3 and Granite 20B.

Granite 4.0 and 4.1 use the parser `hermes`, Granite 4.2 uses `qwen3_coder`.
"""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser


class GraniteParser(JSONBlockParser):
    """The format of Granite 3.0 to 3.3: a JSON list, which has no closer.

        <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]

    Source: the chat templates.
    """

    name: ClassVar[str] = "granite"
    models = "Granite 3"
    example = "<|tool_call|>[{…}]"
    stop = ("<|end_of_text|>",)
    result_role = "tool_response"
    openers = ("<|tool_call|>", "<tool_call>")
    turn_end = ("<|end_of_text|>",)
    list_notes = ()
    around = ("<|tool_call|>[", ", ", "]")
    shape = '<|tool_call|>[{"name": "tool name", "arguments": {"argument": "value"}}]'


class Granite20BParser(JSONBlockParser):
    """The format of granite-20b-functioncalling: any number of objects, each after a marker.

        <function_call> {"name": "f", "arguments": {"a": 1}}

    Source: the chat template.
    """

    name: ClassVar[str] = "granite-20b-fc"
    models = "Granite 20B"
    example = "<function_call> {…}"
    stop = ("<|endoftext|>",)
    openers = ("<function_call>",)
    turn_end = ("<|endoftext|>",)
    shape = '<function_call> {"name": "tool name", "arguments": {"argument": "value"}}'

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would."""
        return f"{self.openers[0]} {super().write(call)}"
