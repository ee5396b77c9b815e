"""Parser of Mistral's models, tokenizers v3 to v15."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat, read_json
from torchrl_agentic.parsers.engine.json_text import dumps, read_arguments
from torchrl_agentic.parsers.engine.partial_call import CallParseError, PartialCall
from torchrl_agentic.parsers.engine.reader import Incremental, Reader

_CALL_ID, _ARGS = "[CALL_ID]", "[ARGS]"
_WIRE_ID = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class MistralParser(JSONBlockParser):
    """The formats of Mistral's models: name and arguments (v11 and later), or a JSON list (v3 to v7).

        [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}
        [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]

    Both are read; the first is written. Reasoning is between `[THINK]` tags (Magistral, Ministral 3
    Reasoning) or `<think>` tags (the first Magistral). Ids in results have nine letters or digits: the
    model's own, or a hash of ours. Source: the package `mistral-common` and the chat templates.
    """

    name = "mistral"
    models = "Mistral, Magistral, Ministral, Devstral (tokenizers v3 to v15)"
    example = "[TOOL_CALLS]f[ARGS]{…}"
    format = JSONFormat(
        openers=("[TOOL_CALLS]",),
        around=("", "", ""),
        think=("[THINK]", "[/THINK]"),
        other_thinks=(("<think>", "</think>"),),
        turn_end=("</s>",),
        result_tags=("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        more_markers=("[CALL_ID]", "[ARGS]", "[INST]", "[/INST]", "[TOOL_CONTENT]"),
        list_notes=(),
    )

    def read(self, reader: Reader, start: int) -> Incremental[int]:
        """Read a list or one call."""
        at, notes = yield from self.begin(reader, start)
        if reader.text[at] in "[{" and not (yield from reader.which((_ARGS, _CALL_ID), at)):
            return (yield from super().read(reader, start))
        name, call_id, json_at = yield from self._header(reader, at)
        attempt = PartialCall(name, call_id=call_id)
        reader.header = name, call_id
        value, end, fixes = yield from read_json(self, reader, json_at)
        reader.block = None, end
        attempt.args, more = read_arguments(value, self.limits)
        attempt.notes = (*notes, *fixes, *more)
        reader.add(attempt, start, end)
        return end

    def _header(self, reader: Reader, at: int) -> Incremental[tuple[str, str | None, int]]:
        """Read the name and the id; return them and the start of the arguments."""
        place, marker = yield from self._header_end(reader, at)
        if marker not in (_ARGS, "{"):
            error = CallParseError("unclosed", "the call has no arguments", at)
            error.end = len(reader.text) if place < 0 else place
            raise error
        name, _, call_id = reader.text[at:place].partition(_CALL_ID)
        json_at = place if marker == "{" else (yield from reader.skip(place + len(_ARGS)))
        name = name.strip().strip("\ufeff")
        if len(name.split()) != 1 or "[" in name:
            raise CallParseError("missing_name", "the name of the tool is missing", at)
        return name, call_id.strip() or None, json_at

    def _header_end(self, reader: Reader, at: int) -> Incremental[tuple[int, str]]:
        markers = (_ARGS, "{", *self.format.openers, *self.format.turn_end)
        return (yield from reader.find_first(markers, at))

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed call at `start`: that of its brackets.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        at = start
        while (yield from reader.which(self.format.openers, at)):
            at = yield from reader.skip(at + len(self.format.openers[0]))
        if not reader.text.startswith(("[{", "{"), at):
            place, marker = yield from self._header_end(reader, at)
            if place < 0:
                return (yield from reader.end_of_text())
            if marker not in (_ARGS, "{"):
                return place
            at = place if marker == "{" else (yield from reader.skip(place + len(_ARGS)))
        end = yield from reader.balanced(at)
        return end if end >= 0 else (yield from reader.end_of_text())

    def write(self, call: ParsedCall) -> str:
        """Write a call as newer models would.

        Raises:
            ValueError: If the name of the tool contains white space or a bracket.
        """
        if len(call.tool.split()) != 1 or "[" in call.tool or "{" in call.tool:
            raise ValueError(f"the format cannot express the name {call.tool!r}")
        return f"{self.format.openers[0]}{call.tool}{_ARGS}{dumps(call.args)}"

    def render_result(self, call_id: str, result: ToolResult) -> Mapping[str, JSON]:
        """Write one result as a message, with an id that chat templates accept.

        Args:
            call_id: Id of the call, control tokens escaped.
            result: Result of the call, control tokens escaped.
        """
        return super().render_result(wire_id(call_id), result)


def wire_id(call_id: str) -> str:
    """Return an id of nine letters or digits: the id itself, or a hash of it.

    The hash is blake2b, its first nine base-62 digits.
    """
    if _WIRE_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8", "replace")).digest())
    digits = ""
    for _ in range(9):
        number, digit = divmod(number, 62)
        digits += _DIGITS[digit]
    return digits
