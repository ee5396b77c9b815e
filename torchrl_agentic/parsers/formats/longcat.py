"""Calls of LongCat-Flash: JSON between `<longcat_tool_call>` tags. Format: the models' chat template.

The smallest kind of format: JSON between an opener and a closer. Copy this file to read another one.
"""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser


class LongCatParser(JSONBlockParser):
    """`<longcat_tool_call>{"name": …, "arguments": {…}}</longcat_tool_call>`, any number of them."""

    # For `get_parser` and the table of formats in the README.
    name: ClassVar[str] = "longcat"
    models = "LongCat-Flash"
    example = '<longcat_tool_call>{"name", "arguments"}</longcat_tool_call>'
    # The markers around a call and a thought, and at the end of a message; at a stop string sampling ends.
    openers = ("<longcat_tool_call>",)
    closer = "</longcat_tool_call>"
    think = ("<longcat_think>", "</longcat_think>")
    turn_end = ("</longcat_s>",)
    stop = ("</longcat_s>",)
    # Results have a key "name", because the chat template reads it.
    names_tool: ClassVar[bool] = True
    # A correct call, for error messages to the model.
    shape = (
        '<longcat_tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</longcat_tool_call>'
    )
