"""Parser of Jamba: one JSON list between `<tool_calls>` tags."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.engine.json_blocks import JSONListParser


class JambaParser(JSONListParser):
    """The format of Jamba: one list of all calls.

        <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>

    Source: the chat templates.
    """

    name: ClassVar[str] = "jamba"
    models = "Jamba"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    stop = ("<|eom|>",)
    openers = ("<tool_calls>",)
    closer = "</tool_calls>"
    turn_end = ("<|eom|>", "<|endoftext|>")
    around = ("<tool_calls>[", ", ", "]</tool_calls>")
    shape = '<tool_calls>[{"name": "tool name", "arguments": {"argument": "value"}}]</tool_calls>'
