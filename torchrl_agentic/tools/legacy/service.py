"""`ExecuteToolsInOrder`: the services of a `ToolRegistry`, each under its name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, cast

from torchrl_agentic.callee import keywords_of
from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import Status, ToolResult, jsonable
from torchrl_agentic.schema import Schema
from torchrl_agentic.tools.legacy.base import ANY, Call, ThreadLayer

logger = logging.getLogger(__name__)

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_UNRUN = "not run: an earlier call of this message failed, and stop_on_error is set"


class ServiceLayer(ThreadLayer):
    """Calls `registry.get(name)(**args)`, with `_state` where the service can take it."""

    rows_have_state = False

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self._failed: dict[int, tuple[str, int]] = {}  # row → trajectory and turn of its last failure

    def answer(self, call: Call) -> ToolResult:
        """Call the service, unless an earlier one of this message has failed and that stops the others."""
        here = call.ctx.trajectory, call.ctx.turn
        if self.transform.stop_on_error and self._failed.get(call.row) == here:
            return ToolResult.from_text(_UNRUN, status=Status.SKIPPED)
        try:
            result = self._answer(call)
        except BaseException:
            self._failed[call.row] = here
            raise
        if result.is_error:
            self._failed[call.row] = here
        return result

    def _answer(self, call: Call) -> ToolResult:
        registry, ctx = self.transform.registry, call.ctx
        if call.name not in registry:
            raise ToolError(f"the registry has no service named {call.name!r}")
        service = registry.get(call.name)
        state: dict[str, Any] = {}
        if self.transform.pass_state_to_tools and "_state" in keywords_of(service):
            state["_state"] = {} if ctx.state is None else ctx.state
        try:
            output = service(**call.args, **state)
        except (ToolError, StopSignal, InfrastructureError):
            raise
        except Exception as error:
            # The old transform showed the model what a service raised, and services were written for that.
            logger.warning("service %s raised (call %s)", call.name, ctx.call_id, exc_info=True)
            raise ToolError(f"{call.name} failed: {error}") from error
        if isinstance(output, Mapping) and "error" in cast("Mapping[str, Any]", output):
            return ToolResult.from_text(str(cast("Mapping[str, Any]", output)["error"]), is_error=True)
        return ToolResult.from_value(output)

    @property
    def names(self) -> list[str]:
        """The services of the registry, which has no public list of them."""
        return list(map(str, getattr(self.transform.registry, "_svc", ())))

    def offer(self, name: str) -> tuple[str, Schema]:
        """Read `schema_in`: a JSON Schema, or names with Python's types."""
        registry = self.transform.registry
        if name not in registry:
            return "", ANY
        service: Any = registry.get(name)
        told: Any = getattr(service, "description", None) or inspect.getdoc(service) or ""
        return str(told), _schema(getattr(service, "schema_in", None))


def _schema(told: Any) -> Schema:
    """Make a schema in which nothing is required: `schema_in` does not tell what has a default."""
    if not isinstance(told, Mapping):
        return ANY
    fields = cast("Mapping[str, Any]", told)
    if fields.get("type") == "object":
        return fields
    properties = {str(name): _property(kind) for name, kind in fields.items()}
    return {"type": "object", "properties": properties} if properties else ANY


def _property(kind: Any) -> dict[str, Any]:
    if isinstance(kind, Mapping):
        return dict(cast("Mapping[str, Any]", jsonable(kind)))
    return {"type": _TYPES[kind]} if isinstance(kind, type) and kind in _TYPES else {}
