"""Parser of LongCat-Flash: JSON between `<longcat_tool_call>` tags.

This is the smallest kind of format, JSON between an opener and a closer; copy this file to add another one.
"""

from __future__ import annotations

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat


class LongCatParser(JSONBlockParser):
    """The format of LongCat-Flash: any number of blocks of JSON.

        <longcat_tool_call>
        {"name": "f", "arguments": {"a": 1}}
        </longcat_tool_call>

    Source: the chat template.
    """

    # For `get_parser` and the table in `docs/howto/formats.md`.
    name = "longcat"
    models = "LongCat-Flash"
    example = '<longcat_tool_call>{"name", "arguments"}</longcat_tool_call>'
    # Markers around a call and around reasoning, and at the end of a message, where sampling ends.
    # Results have a key "name", which the chat template reads.
    format = JSONFormat(
        openers=("<longcat_tool_call>",),
        closer="</longcat_tool_call>",
        think=("<longcat_think>", "</longcat_think>"),
        turn_end=("</longcat_s>",),
    )
