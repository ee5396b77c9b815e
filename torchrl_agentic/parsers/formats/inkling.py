"""Parser of Inkling, whose messages are blocks of typed content."""

from __future__ import annotations

import re
from dataclasses import replace

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.partial_call import CallParseError
from torchrl_agentic.parsers.engine.reader import Incremental, Reader, end_of
from torchrl_agentic.parsers.engine.structural_tag import Frame

_BLOCK = "<|message_model|>"
_CALL, _RAW_CALL = "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"
_END = "<|content_model_end_sampling|>"
_HEADER = re.compile(r"[^<\r\n]{0,256}+")


class InklingParser(JSONBlockParser):
    """The format of Inkling: one block per call.

        <|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {"a": 1}}<|end_message|>

    Reasoning, text and calls are blocks that end with the same token and do not nest. A call that begins
    before reasoning has ended is therefore not part of it: it runs, and the message is noted
    `unclosed_reasoning`. The name before the JSON is optional; the one in the JSON counts. A block with raw
    text for a tool is an error. Source: the control tokens of the tokenizer, and the package `tml-renderers`,
    which writes the prompts.
    """

    name = "inkling"
    models = "Inkling"
    example = '<|content_invoke_tool_json|>{"name", "args"}<|end_message|>'
    stop = (_END,)
    format = JSONFormat(
        openers=("<|message_model|>", "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"),
        closer="<|end_message|>",
        around=("", "", ""),
        trigger="<|content_invoke_tool_json|>",
        think=("<|content_thinking|>", "<|end_message|>"),
        think_end_proves=False,
        turn_end=(_END, "<|endoftext|>", "<|message_user|>", "<|message_system|>"),
        result_tags=("<|message_tool|>", "<|end_message|>"),
        arguments_key="args",
        calls_end_thoughts=True,
        shape=f'{_CALL}{{"name": "tool_name", "args": {{"argument": "value"}}}}<|end_message|>',
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether the block at `start` is a call; other blocks are text or reasoning.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        if not reader.at(_BLOCK, start):
            return True
        end = begin = start + len(_BLOCK)
        while (end := end_of(_HEADER.match(reader.text, begin), end)) == len(reader.text):
            if reader.is_whole:
                return False
            yield
        return bool((yield from reader.which((_CALL, _RAW_CALL), end)))

    def begin(self, reader: Reader, start: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Read the header of a block; return the start of the JSON and notes.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.

        Raises:
            CallParseError: If the message ends there, or the call is raw text.
        """
        header = ""
        if reader.at(_BLOCK, start):
            begin = start + len(_BLOCK)
            start = end_of(_HEADER.match(reader.text, begin), begin)
            header = reader.text[begin:start].strip()
        at, notes = yield from super().begin(reader, start)
        if reader.at(_RAW_CALL, start):
            raise CallParseError(
                "wrong_dialect", f"tools are called with JSON, after {_CALL}", at, tool=header
            )
        return at, notes

    def tail(self, reader: Reader, end: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Read the end of a block, which the end of the whole message may be.

        Args:
            reader: The message as read so far.
            end: Index just after the JSON.
        """
        after = yield from reader.skip(end)
        if (yield from reader.which((_END,), after)):
            return end, ()
        return (yield from super().tail(reader, end))

    def write(self, call: ParsedCall) -> str:
        """Write a call as the model would.

        Raises:
            ValueError: If the format cannot express the name of the tool.
        """
        if not call.tool.strip() or not _HEADER.fullmatch(call.tool):
            raise ValueError(f"the format cannot express the name {call.tool!r}")
        body = dumps({"name": call.tool, self.format.arguments_key: call.args})
        return f"{_BLOCK}{call.tool}{_CALL}{body}{self.format.closer}"

    def frame(self, name: str) -> Frame | None:
        """Return the text around the arguments, from the token that distinguishes calls from other blocks."""
        frame = super().frame(name)
        return frame and replace(frame, before=frame.before[frame.before.index(_CALL) :])
