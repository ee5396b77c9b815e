"""Parser of Apertus: a JSON list in which the tool's name is the key."""

from __future__ import annotations

from typing import cast

from torchrl_agentic.messages import JSON, ParsedCall, fields_of
from torchrl_agentic.parsers.engine.json_blocks import JSONBlockParser, JSONFormat
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.partial_call import PartialCall


class ApertusParser(JSONBlockParser):
    """The format of Apertus: a JSON list of objects, each with the tool's name as its key.

        <|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>

    The model may interrupt its reasoning with a call and continue after the result, so a call in reasoning
    that has no end runs. Source: the chat template of Apertus-8B-Instruct-2509.
    """

    name = "apertus"
    aliases = ("apertus2509",)
    models = "Apertus"
    example = '<|tools_prefix|>[{"f": {…}}]<|tools_suffix|>'
    stop = ("<|tools_suffix|>", "<|assistant_end|>")
    format = JSONFormat(
        openers=("<|tools_prefix|>",),
        closer="<|tools_suffix|>",
        around=("<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
        think=("<|inner_prefix|>", "<|inner_suffix|>"),
        turn_end=("<|assistant_end|>",),
        is_list=True,
    )

    def attempts(
        self, value: JSON, notes: tuple[str, ...], first: int, *, is_checked: bool = True
    ) -> list[PartialCall]:
        """Return the calls of a block; `{"name": …, "arguments": {…}}` is read and noted.

        Raises:
            CallParseError: If the list is empty or holds a single, malformed call.
        """
        items = cast("list[JSON]", value) if isinstance(value, list) else [value]
        usual = [_usual(item) for item in items]
        found = super().attempts(
            usual if isinstance(value, list) else usual[0], notes, first, is_checked=is_checked
        )
        for item, same, attempt in zip(items, usual, found, strict=True):
            if item is same and attempt.error is None:
                attempt.notes += ("named_call",)
        return found

    def write(self, call: ParsedCall) -> str:
        """Write a call without the list around it."""
        return dumps({call.tool: call.args})


def _usual(item: JSON) -> JSON:
    """Return a call `{"f": {…}}` as `{"name": "f", "arguments": {…}}`, other items unchanged."""
    fields = fields_of(item)
    if fields is None or len(fields) != 1:
        return item
    ((name, args),) = fields.items()
    return {"name": name, "arguments": args}
