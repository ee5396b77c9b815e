"""Parsers of one JSON list between tags: Jamba, Apriel, Hunyuan A13B and Nemotron Nano v2.

Later Hunyuan models are in `hy`; Nemotron 3 uses the parser `qwen3_coder`.
"""

from __future__ import annotations

from dataclasses import replace

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat


class JambaParser(JSONBlockParser):
    """The format of Jamba: one list of all calls.

        <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>

    Source: the chat templates.
    """

    name = "jamba"
    models = "Jamba"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    stop = ("<|eom|>",)
    format = JSONFormat(
        openers=("<tool_calls>",),
        closer="</tool_calls>",
        around=("<tool_calls>[", ", ", "]</tool_calls>"),
        turn_end=("<|eom|>", "<|endoftext|>"),
        is_list=True,
    )


class AprielParser(JSONBlockParser):
    """The format of Apriel 1.5 and 1.6.

        Here are my reasoning steps:
        …
        [BEGIN FINAL RESPONSE]
        <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>

    The prompt of 1.6 ends with the first words of the reasoning; 1.5 writes them itself. Source: the chat
    templates of both models.
    """

    name = "apriel"
    models = "Apriel 1.5, 1.6"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    format = replace(
        JambaParser.format,
        think=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        turn_end=("<|end|>",),
    )


class HunyuanA13BParser(JSONBlockParser):
    """The format of Hunyuan A13B: one JSON list after the reasoning.

        <answer><tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls></answer>

    The tags of the answer stay in the text. Source: the chat templates of vLLM and of the model.
    """

    name = "hunyuan_a13b"
    models = "Hunyuan A13B"
    example = '<tool_calls>[{"name", "arguments"}]</tool_calls>'
    format = replace(
        JambaParser.format, turn_end=("<|eos|>",), result_tags=("<tool_response>", "</tool_response>")
    )


class NemotronNanoV2Parser(JSONBlockParser):
    """The format of Nemotron Nano v2 and Llama-Nemotron: one list of all calls.

        <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>

    Source: the chat templates.
    """

    name = "nemotron_nano_v2"
    aliases = ("llama_nemotron_json",)
    models = "Nemotron Nano v2, Llama-Nemotron"
    example = '<TOOLCALL>[{"name", "arguments"}]</TOOLCALL>'
    format = JSONFormat(
        openers=("<TOOLCALL>",),
        closer="</TOOLCALL>",
        around=("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
        turn_end=("<SPECIAL_12>", "<|eot_id|>"),
        result_tags=("<TOOL_RESPONSE>", "</TOOL_RESPONSE>"),
        is_list=True,
    )
