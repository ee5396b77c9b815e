"""Calls of Phi-4-mini: a JSON list behind `functools`. Format: the model card and vLLM's template for it."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.json_blocks import JSONBlockParser


class Phi4MiniParser(JSONBlockParser):
    """`functools[{"name": …, "arguments": {…}}, …]`; nothing closes it but the list itself."""

    name: ClassVar[str] = "phi4_mini"
    stop = ("<|end|>",)
    openers = ("functools[",)
    turn_end = ("<|end|>", "<|endoftext|>")
    list_notes = ()
    around = ("functools[", ", ", "]")
    shape = 'functools[{"name": "tool name", "arguments": {"argument": "value"}}]'
