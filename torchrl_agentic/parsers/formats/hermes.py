"""Parser of Hermes 2 and 3, Qwen2.5, Qwen3 and other models: JSON between `<tool_call>` tags. The default."""

from __future__ import annotations

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat


class HermesParser(JSONBlockParser):
    """The format of Hermes, Qwen2.5 and Qwen3: any number of blocks of JSON, with text around them.

        <tool_call>
        {"name": "f", "arguments": {"a": 1}}
        </tool_call>

    A list of calls in one block is read and noted. Source:
    https://github.com/NousResearch/Hermes-Function-Calling and the chat templates of Qwen2.5 and Qwen3.
    """

    name = "hermes"
    aliases = (
        "qwen2.5", "qwen25", "qwen3", "qwen", "qwen3_json", "granite4", "ernie45", "smollm3", "trinity",
    )  # fmt: skip
    models = (
        "Hermes, Qwen2.5, Qwen3, QwQ, Granite 4.0 and 4.1, Ernie 4.5, SmolLM3, Bielik, MiMo-VL, Reka Edge, "
        "Trinity"
    )
    example = '<tool_call>{"name", "arguments"}</tool_call>'
    stop = ("<|im_end|>",)
    format = JSONFormat(
        openers=("<tool_call>",),
        closer="</tool_call>",
        turn_end=("<|im_end|>", "<|endoftext|>"),
        result_tags=("<tool_response>", "</tool_response>"),
    )
