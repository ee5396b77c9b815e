"""Calls of LongCat-Flash: JSON between `<longcat_tool_call>` tags. Format: the models' chat template.

The smallest kind of format: JSON between an opener and a closer. Copy this file to read another one.
"""

from __future__ import annotations

from typing import ClassVar

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
    # The chat template wants the name of the tool in results.
    names_tool: ClassVar[bool] = True
    # What the model is told if it writes something else.
    shape = (
        '<longcat_tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</longcat_tool_call>'
    )
