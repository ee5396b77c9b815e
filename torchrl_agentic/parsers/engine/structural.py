"""Structural tags: grammars under which a model cannot write a malformed call.

Format: xgrammar's structural tags, as vLLM and SGLang take them. Built without importing any of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.base import Tools, schemas_of
from torchrl_agentic.tools.schema_simplify import simplify_schema

Tag = dict[str, JSON]


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the arguments of a call, and how they are written.

    style: xgrammar's name for it. infix: a pattern and a text between `before` and the arguments.
    """

    before: str
    after: str
    style: str = "json"
    infix: tuple[str, str] | None = None

    def tag(self, schema: JSON) -> Tag:
        """Give the grammar of the call with arguments of this schema."""
        content: Tag = {"type": "json_schema", "json_schema": schema}
        if self.style != "json":
            content["style"] = self.style
        if self.infix is not None:
            pattern, text = self.infix
            elements = [
                {"type": "regex", "pattern": pattern},
                {"type": "const_string", "value": text},
                content,
            ]
            content = {"type": "sequence", "elements": elements}
        return {"type": "tag", "begin": self.before, "content": content, "end": self.after}


def parameters(tools: Tools) -> dict[str, JSON]:
    """Give name → JSON Schema of the arguments, which is always one of an object.

    Raises:
        ValueError: there are no tools.
    """
    schemas = schemas_of(tools) or {}
    if not schemas:
        raise ValueError("a structural tag needs at least one tool")
    return {
        name: simplify_schema(schema) or {"type": "object", "properties": {}}
        for name, schema in schemas.items()
    }


def structural_tag(
    tags: Iterable[Tag],
    around: tuple[str, str, str],
    trigger: str,
    *,
    tool_choice: Literal["auto", "required"],
    parallel: bool,
) -> Tag:
    """Give the grammar of a message: free text, and calls wherever the trigger appears.

    around: what stands before, between and after all calls; where nothing does, calls stand in the text.

    Raises:
        ValueError: an unknown tool_choice.
    """
    if tool_choice not in ("auto", "required"):
        raise ValueError(f'tool_choice is "auto" or "required"; got {tool_choice!r}')
    begin, between, end = around
    tags = list(tags)
    if begin:
        inner = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": between,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        tags = [{"type": "tag", "begin": begin, "content": inner, "end": end}]
    found = {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": tags,
        "at_least_one": tool_choice == "required",
        "stop_after_first": not parallel,
    }
    return {"type": "structural_tag", "format": found}
