"""Parser of Phi-4-mini and FireFunction v2: a JSON list after `functools`, or between tags."""

from __future__ import annotations

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat
from torchrl_agentic.parsers.engine.reader import Incremental, Reader

_TAG, _TAG_END = "<|tool_call|>", "<|/tool_call|>"


class Phi4MiniParser(JSONBlockParser):
    """The format of Phi-4-mini and FireFunction v2: one list of all calls.

        functools[{"name": "f", "arguments": {"a": 1}}]

    The list, or one object, between `<|tool_call|>` and `<|/tool_call|>` is read too. Source: the model
    cards, and the chat templates of vLLM and llama.cpp.
    """

    name = "phi4_mini"
    aliases = ("phi4_mini_json", "firefunction_v2")
    models = "Phi-4-mini, FireFunction v2"
    example = "functools[{…}]"
    stop = ("<|end|>", "<|eot_id|>")
    format = JSONFormat(
        openers=("functools[", "<|tool_call|>"),
        around=("functools[", ", ", "]"),
        turn_end=("<|end|>", "<|endoftext|>", "<|eot_id|>"),
        list_notes=(),
    )

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read one list, and the closing tag if there is an opening one."""
        end = yield from super().read(reader, start)
        if not reader.at(_TAG, start):
            return end
        after = yield from reader.skip(end)
        if (yield from reader.which((_TAG_END,), after)):
            end = after + len(_TAG_END)
            reader.extend(end)
        return end
