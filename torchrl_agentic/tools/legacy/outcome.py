"""What a legacy transform answered, as a `ToolResult`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torchrl_agentic.messages import Status, ToolResult


def outcome(report: Mapping[str, Any]) -> ToolResult:
    """Read the transform's own report, `{"success", "result" or "error"}`, perhaps one inside another."""
    result: Any = report.get("result")
    if report.get("success") and isinstance(result, Mapping) and "success" in result:
        return outcome(cast("Mapping[str, Any]", result))
    if report.get("success"):
        try:
            return ToolResult.from_value(result)
        except TypeError:
            return ToolResult.from_text(str(cast("object", result)))
    text = str(report.get("error", "failed"))
    is_timeout = text.startswith("Tool execution timed out after ")
    return ToolResult.from_text(text, status=Status.TIMEOUT if is_timeout else Status.ERROR)
