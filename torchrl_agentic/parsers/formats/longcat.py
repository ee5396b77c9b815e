"""Calls of LongCat-Flash: JSON between `<longcat_tool_call>` tags. Format: the models' chat template.

The smallest kind of format: JSON between an opener and a closer. Copy this file to read another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser


class LongCatParser(JSONBlockParser):
    """`<longcat_tool_call>{"name": …, "arguments": {…}}</longcat_tool_call>`, any number of them."""

    # What `get_parser` and the table of formats know it by.
    name: ClassVar[str] = "longcat"
    models = "LongCat-Flash"
    example = '<longcat_tool_call>{"name", "arguments"}</longcat_tool_call>'
    # What stands around a call, a thought and a message; at a stop string the model waits for results.
    openers = ("<longcat_tool_call>",)
    closer = "</longcat_tool_call>"
    think = ("<longcat_think>", "</longcat_think>")
    turn_end = ("</longcat_s>",)
    stop = ("</longcat_s>",)
    # What the model is told if it writes something else.
    shape = (
        '<longcat_tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</longcat_tool_call>'
    )

    def render(self, calls: Sequence[ParsedCall], results: Sequence[ToolResult]) -> list[Mapping[str, JSON]]:
        """Write the results as messages that name their tool, as the chat template wants it."""
        messages = super().render(calls, results)
        return [{**message, "name": call.tool} for call, message in zip(calls, messages, strict=True)]
