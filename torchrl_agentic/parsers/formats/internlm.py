"""Parser of InternLM2 and Intern-S1: JSON after `<|plugin|>`."""

from __future__ import annotations

from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader

_PLUGIN, _INTERPRETER = "<|plugin|>", "<|interpreter|>"


class InternLMParser(JSONBlockParser):
    """The format of InternLM2, InternLM2.5 and Intern-S1.

        <|action_start|><|plugin|>
        {"name": "f", "parameters": {"a": 1}}
        <|action_end|>

    Code after `<|interpreter|>` names no tool and becomes an error entry. Source: the chat format of
    InternLM2 (`chat/chat_format.md` of its repository).
    """

    name = "internlm"
    aliases = ("internlm2", "interns1")
    models = "InternLM2, InternLM2.5, Intern-S1"
    example = '<|action_start|><|plugin|>{"name", "parameters"}<|action_end|>'
    format = JSONFormat(
        openers=("<|action_start|>",),
        closer="<|action_end|>",
        turn_end=("<|im_end|>",),
        more_markers=("<|plugin|>", "<|interpreter|>"),
        arguments_key="parameters",
        fast=False,
        written=("<|action_start|><|plugin|>\n", "\n<|action_end|>"),
    )

    def begin(self, reader: Reader, start: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Read the opener and `<|plugin|>` at `start`; return the start of the JSON and notes.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.

        Raises:
            CallParseError: If `<|plugin|>` is missing, or the message ends there.
        """
        at, notes = yield from super().begin(reader, start)
        called = yield from reader.which((_PLUGIN, _INTERPRETER), at)
        if called == _INTERPRETER:
            raise CallParseError("wrong_dialect", f"tools are called after {_PLUGIN}", at)
        if not called:
            raise CallParseError("missing_name", f"{_PLUGIN} is missing", at)
        at = yield from reader.skip_inside(at + len(called))
        return at, notes
