"""Calls of Jamba: one JSON list between `<tool_calls>` tags. Format: the models' chat templates."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.engine.json_blocks import JSONListParser


class JambaParser(JSONListParser):
    """`<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>`."""

    name: ClassVar[str] = "jamba"
    models = "Jamba"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    stop = ("<|eom|>",)
    openers = ("<tool_calls>",)
    closer = "</tool_calls>"
    turn_end = ("<|eom|>", "<|endoftext|>")
    around = ("<tool_calls>[", ", ", "]</tool_calls>")
    shape = '<tool_calls>[{"name": "tool name", "arguments": {"argument": "value"}}]</tool_calls>'
