"""Calls of Hunyuan A13B: Jamba's list, after a thought. Format: the chat templates of vLLM and of the model.

Hunyuan 3 and later write another format.
"""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.formats.jamba import JambaParser


class HunyuanA13BParser(JambaParser):
    """`<answer><tool_calls>[{…}]</tool_calls></answer>`, behind a thought; the answer's tags stay text."""

    name: ClassVar[str] = "hunyuan_a13b"
    models = "Hunyuan A13B"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    stop = ("<|eos|>",)
    turn_end = ("<|eos|>",)
    result_tags = ("<tool_response>", "</tool_response>")
