"""Calls of Apertus: a JSON list in which the name of the tool is the key. Format: its chat template."""

from __future__ import annotations

from typing import ClassVar, cast

from torchrl_agentic.messages import JSON, ParsedCall, fields_of
from torchrl_agentic.parsers.engine.json_blocks import JSONListParser
from torchrl_agentic.parsers.engine.json_text import dumps
from torchrl_agentic.parsers.engine.partial_call import PartialCall


class ApertusParser(JSONListParser):
    """`<|tools_prefix|>[{"f": {…}}, …]<|tools_suffix|>`.

    The model may interrupt a thought with a call and continue it after the result. A call in a thought that
    has no end therefore runs.
    """

    name: ClassVar[str] = "apertus"
    aliases = ("apertus2509",)
    models = "Apertus"
    example = '<|tools_prefix|>[{"f": {…}}]<|tools_suffix|>'
    stop = ("<|tools_suffix|>", "<|assistant_end|>")
    openers = ("<|tools_prefix|>",)
    closer = "<|tools_suffix|>"
    think = ("<|inner_prefix|>", "<|inner_suffix|>")
    turn_end = ("<|assistant_end|>",)
    around = ("<|tools_prefix|>[", ", ", "]<|tools_suffix|>")
    shape = '<|tools_prefix|>[{"tool name": {"argument": "value"}}]<|tools_suffix|>'

    def attempts(
        self, value: JSON, notes: tuple[str, ...], first: int, *, is_checked: bool = True
    ) -> list[PartialCall]:
        """Return the calls of a block; `{"name": …, "arguments": {…}}` is read too, and noted.

        Raises:
            CallParseError: It holds a single one, which cannot be read, or none.
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
    """Write a call `{"f": {…}}` as `{"name": "f", "arguments": {…}}`; return other items unchanged."""
    fields = fields_of(item)
    if fields is None or len(fields) != 1:
        return item
    ((name, args),) = fields.items()
    return {"name": name, "arguments": args}
