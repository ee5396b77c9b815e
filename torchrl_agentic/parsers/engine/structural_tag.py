"""Build structural tags: xgrammar grammars under which a model cannot write a malformed call.

vLLM and SGLang take this format. It is built here without importing any of them.
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
    """The text around the arguments of a call, and the style of the arguments.

    Attributes:
        before: Text before the arguments.
        after: Text after the arguments.
        style: xgrammar's name of the style of arguments.
        infix: A pattern and a text between `before` and the arguments, or None.
    """

    before: str
    after: str
    style: str = "json"
    infix: tuple[str, str] | None = None

    def tag(self, schema: JSON) -> Tag:
        """Return the grammar of a call whose arguments have this schema."""
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
    """Return the JSON Schema, always of an object, of each tool's arguments by the tool's name.

    Raises:
        ValueError: If there are no tools.
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
    """Return the grammar of a message: free text, and calls after the trigger.

    Args:
        tags: Grammars of the calls, one per tool.
        around: Text before, between and after all calls; if the first is "", calls may occur anywhere in the
            text.
        trigger: String that begins a call.
        tool_choice: "auto", or "required" for at least one call.
        parallel: Whether a message may have several calls.

    Raises:
        ValueError: If `tool_choice` has another value.
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
