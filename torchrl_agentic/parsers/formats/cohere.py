"""Parsers of Cohere's Command R, R7B, A and 4."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.reader import Incremental, Reader
from torchrl_agentic.parsers.engine.structural_tag import Frame

_FIELD_NAMES = {"tool_call_id": "id", "tool_name": "name", "parameters": "arguments"}
_FENCE = "```json"
_OURS = re.compile(r"call_\d+_(\d+)")


class CohereParser(JSONBlockParser):
    """The format of Command R7B, A and 4: a JSON list of calls with ids.

        <|START_ACTION|>[
            {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}
        ]<|END_ACTION|>

    Ids count the calls of the conversation. The tags around the answer to the user, `<|START_RESPONSE|>` of
    Command R7B and A and `<|START_TEXT|>` of Command 4, stay in the text. The chat templates take ids of
    results from the `tool_calls` of messages; if calls are part of the text, results get an empty id. Source:
    the chat templates.
    """

    name = "cohere_command3"
    aliases = ("cohere_command4", "command_r7b", "command_a")
    models = "Command R7B, A and 4, North Mini Code"
    example = '<|START_ACTION|>[{"tool_call_id", "tool_name", "parameters"}]'
    format = JSONFormat(
        openers=("<|START_ACTION|>",),
        closer="<|END_ACTION|>",
        around=("<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
        trigger="<|START_ACTION|>",
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
        turn_end=("<|END_OF_TURN_TOKEN|>",),
        result_tags=("<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
        arguments_key="parameters",
        list_notes=(),
        field_names=_FIELD_NAMES,
    )

    def write(self, call: ParsedCall) -> str:
        """Write a call without the list around it."""
        return dumps({"tool_call_id": wire_id(call), "tool_name": call.tool, "parameters": call.args})

    def frame(self, name: str) -> Frame:
        """Return the text around the arguments of a call, with any number as its id."""
        before = f'", "tool_name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
        return Frame('{"tool_call_id": "', "}", infix=(r"\d{1,4}", before))


def wire_id(call: ParsedCall) -> str:
    """Return a call's id as Command writes it: its own number, or the index of `call_{turn}_{index}`."""
    if call.call_id.isascii() and call.call_id.isdigit():
        return call.call_id
    ours = _OURS.fullmatch(call.call_id)
    return ours[1] if ours else str(call.index)


class CommandRParser(JSONBlockParser):
    """The format of Command R and R+: a Markdown fence with a list of calls, without ids.

        Action: ```json
        [
            {"tool_name": "f", "parameters": {"a": 1}}
        ]```

    Source: the tool-use prompt of c4ai-command-r-v01 and its chat template.
    """

    name = "command_r"
    aliases = ("command_r_plus",)
    models = "Command R, R+"
    example = 'Action: ```json [{"tool_name", "parameters"}]```'
    format = replace(
        CohereParser.format,
        openers=("Action:",),
        closer="```",
        around=("Action:\n```json\n[\n    ", ",\n    ", "\n]```"),
        trigger="Action:\n```json",
        result_tags=("<results>", "</results>"),
    )

    def opens(self, reader: Reader, start: int) -> Incremental[bool]:
        """Return whether a fence of JSON follows.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
        """
        after = yield from reader.skip(start + len(self.format.openers[0]))
        return bool((yield from reader.which((_FENCE,), after)))

    def begin(self, reader: Reader, start: int) -> Incremental[tuple[int, tuple[str, ...]]]:
        """Read the opener and the fence at `start`; return the start of the body and notes.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.

        Raises:
            CallParseError: If the message ends there.
        """
        fence = yield from reader.skip(start + len(self.format.openers[0]))
        at = yield from reader.skip_inside(fence + len(_FENCE))
        return at, ()

    def end_of_malformed(self, reader: Reader, start: int, broke: int) -> Incremental[int]:
        """Return the end of the malformed call at `start`: the end of its fence.

        Args:
            reader: The message as read so far.
            start: Index of the opener in the text.
            broke: Index where reading failed.
        """
        fence = yield from reader.skip(start + len(self.format.openers[0]))
        return (yield from super().end_of_malformed(reader, start, max(broke, fence + len(_FENCE))))

    def write(self, call: ParsedCall) -> str:
        """Write a call without the list around it."""
        return dumps({"tool_name": call.tool, "parameters": call.args})

    def frame(self, name: str) -> Frame:
        """Return the text around the arguments of a call."""
        before, _, after = self.write(ParsedCall(name, {}, "call_0_0")).rpartition("{}")
        return Frame(before, after)

    def control_markers(self) -> tuple[str, ...]:
        """Return the markers of this format; `Action:` and the fence are one only together."""
        format = self.format
        others = [
            marker for marker in super().control_markers() if marker not in (*format.openers, format.closer)
        ]
        return (*others, *(f"{format.openers[0]}{between}{_FENCE}" for between in ("", " ", "\n")))
