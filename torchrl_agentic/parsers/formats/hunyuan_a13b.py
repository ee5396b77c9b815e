"""Parser of Hunyuan A13B: Jamba's list after reasoning. Later versions are in `hy`."""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.formats.jamba import JambaParser


class HunyuanA13BParser(JambaParser):
    """The format of Hunyuan A13B: one JSON list after the reasoning.

        <answer><tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls></answer>

    The tags of the answer stay in the text. Source: the chat templates of vLLM and of the model.
    """

    name: ClassVar[str] = "hunyuan_a13b"
    models = "Hunyuan A13B"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    stop = ("<|eos|>",)
    turn_end = ("<|eos|>",)
    result_tags = ("<tool_response>", "</tool_response>")
