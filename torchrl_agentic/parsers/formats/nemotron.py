"""Parser of Nemotron Nano v2 and Llama-Nemotron: one JSON list in `<TOOLCALL>` tags.

Nemotron 3 uses the parser `qwen3_coder`.
"""

from __future__ import annotations

from typing import ClassVar

from torchrl_agentic.parsers.engine.json_blocks import JSONListParser


class NemotronNanoV2Parser(JSONListParser):
    """The format of Nemotron Nano v2 and Llama-Nemotron: one list of all calls.

        <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>

    Source: the chat templates.
    """

    name: ClassVar[str] = "nemotron_nano_v2"
    aliases = ("llama_nemotron_json",)
    models = "Nemotron Nano v2, Llama-Nemotron"
    example = '<TOOLCALL>[{"name", "arguments"}]</TOOLCALL>'
    stop = ("<SPECIAL_12>", "<|eot_id|>")
    openers = ("<TOOLCALL>",)
    closer = "</TOOLCALL>"
    turn_end = ("<SPECIAL_12>", "<|eot_id|>")
    result_tags = ("<TOOL_RESPONSE>", "</TOOL_RESPONSE>")
    around = ("<TOOLCALL>[", ", ", "]</TOOLCALL>")
    shape = '<TOOLCALL>[{"name": "tool name", "arguments": {"argument": "value"}}]</TOOLCALL>'
