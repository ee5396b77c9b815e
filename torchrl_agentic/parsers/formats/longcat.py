"""Parser of LongCat-Flash: JSON between `<longcat_tool_call>` tags.

This is the smallest kind of format, JSON between an opener and a closer; copy this file to add another one.
"""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser


class LongCatParser(JSONBlockParser):
    """The format of LongCat-Flash: any number of blocks of JSON.

        <longcat_tool_call>
        {"name": "f", "arguments": {"a": 1}}
        </longcat_tool_call>

    Source: the chat template.
    """

    # For `get_parser` and the table in `docs/howto/formats.md`.
    name: ClassVar[str] = "longcat"
    models = "LongCat-Flash"
    example = '<longcat_tool_call>{"name", "arguments"}</longcat_tool_call>'
    # Markers around a call and around reasoning, and at the end of a message; sampling ends at a stop string.
    openers = ("<longcat_tool_call>",)
    closer = "</longcat_tool_call>"
    think = ("<longcat_think>", "</longcat_think>")
    turn_end = ("</longcat_s>",)
    stop = ("</longcat_s>",)
    # Results have a key "name", which the chat template reads.
    # A correct call, for error messages to the model.
    shape = (
        '<longcat_tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</longcat_tool_call>'
    )
