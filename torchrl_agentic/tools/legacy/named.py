"""`SimpleToolTransform`, and what has `_execute_tool(name, args_json)`: functions by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from torchrl_agentic.messages import ToolResult
from torchrl_agentic.schema import Schema, schema_of
from torchrl_agentic.tools.legacy.base import ANY, Call, ThreadLayer
from torchrl_agentic.tools.legacy.outcome import outcome


class NamedLayer(ThreadLayer):
    """Calls `_execute_tool`; what its functions keep is shared by all rows, as it always was."""

    rows_have_state = False

    def answer(self, call: Call) -> ToolResult:
        """Call the function of that name."""
        return outcome(self.transform._execute_tool(call.name, json.dumps(call.args)))

    @property
    def names(self) -> list[str]:
        """The keys of `tools`."""
        tools = getattr(self.transform, "tools", None)
        return (
            list(map(str, cast("Mapping[str, Any]", tools))) if isinstance(tools, Mapping) else super().names
        )

    def offer(self, name: str) -> tuple[str, Schema]:
        """Read `tool_schemas`, or else the signature of the function."""
        known = _told(getattr(self.transform, "tool_schemas", None), name)
        if known is not None:
            return known
        function: Any = _item(getattr(self.transform, "tools", None), name)
        try:
            read = schema_of(cast("Callable[..., Any]", function))
        except TypeError:  # no function, or without annotations
            return "", ANY
        return read.description, read.input_schema


def _told(schemas: Any, name: str) -> tuple[str, Schema] | None:
    """Read a schema as people wrote them: of the arguments, or of a function with its parameters."""
    schema = _item(schemas, name)
    if not isinstance(schema, Mapping):
        return None
    fields = cast("Mapping[str, Any]", schema)
    if isinstance(fields.get("function"), Mapping):
        fields = cast("Mapping[str, Any]", fields["function"])
    parameters: Any = fields.get("parameters", fields)
    if not isinstance(parameters, Mapping) or cast("Schema", parameters).get("type") != "object":
        return None
    return str(fields.get("description", "")), cast("Schema", parameters)


def _item(mapping: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", mapping).get(name) if isinstance(mapping, Mapping) else None
