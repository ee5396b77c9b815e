"""Calls of Apriel 1.5 and 1.6: Jamba's list, after a thought in words. Format: the models' chat templates."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.formats.jamba import JambaParser


class AprielParser(JambaParser):
    """`Here are my reasoning steps:` … `[BEGIN FINAL RESPONSE]<tool_calls>[{…}]</tool_calls>`.

    The prompt of 1.6 ends with the first words of the thought, 1.5 writes them itself.
    """

    name: ClassVar[str] = "apriel"
    models = "Apriel 1.5, 1.6"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    stop = ("<|end|>",)
    think = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
    turn_end = ("<|end|>",)
