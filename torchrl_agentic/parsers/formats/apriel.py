"""Parser of Apriel 1.5 and 1.6: Jamba's list after reasoning between two sentences."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.formats.jamba import JambaParser


class AprielParser(JambaParser):
    """The format of Apriel 1.5 and 1.6.

        Here are my reasoning steps:
        …
        [BEGIN FINAL RESPONSE]
        <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>

    The prompt of 1.6 ends with the first words of the reasoning; 1.5 writes them itself. Source: the chat
    templates of both models.
    """

    name: ClassVar[str] = "apriel"
    models = "Apriel 1.5, 1.6"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    stop = ("<|end|>",)
    think = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
    turn_end = ("<|end|>",)
