"""Parsers of Granite 3 and Granite 20B.

Granite 4.0 and 4.1 use the parser `hermes`, Granite 4.2 uses `qwen3_coder`.
"""

from __future__ import annotations

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat


class GraniteParser(JSONBlockParser):
    """The format of Granite 3.0 to 3.3: a JSON list, which has no closer.

        <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]

    Source: the chat templates.
    """

    name = "granite"
    models = "Granite 3"
    example = "<|tool_call|>[{…}]"
    result_role = "tool_response"
    format = JSONFormat(
        openers=("<|tool_call|>", "<tool_call>"),
        around=("<|tool_call|>[", ", ", "]"),
        turn_end=("<|end_of_text|>",),
        list_notes=(),
    )


class Granite20BParser(JSONBlockParser):
    """The format of granite-20b-functioncalling: any number of objects, each after a marker.

        <function_call> {"name": "f", "arguments": {"a": 1}}

    Source: the chat template.
    """

    name = "granite-20b-fc"
    models = "Granite 20B"
    example = "<function_call> {…}"
    format = JSONFormat(
        openers=("<function_call>",), turn_end=("<|endoftext|>",), written=("<function_call> ", "")
    )
