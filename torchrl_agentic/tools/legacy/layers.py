"""Layers for TorchRL's text, function, Python and service transforms, and the conversion of their results."""

from __future__ import annotations

import html
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, cast

from torchrl_agentic.errors import InfrastructureError, StopSignal, ToolError
from torchrl_agentic.messages import JSON, Status, TextPart, ToolResult, jsonable
from torchrl_agentic.tools.legacy.base import ANY, ThreadLayer, TransformCall, end_trees
from torchrl_agentic.tools.schema import Schema, schema_of
from torchrl_agentic.tools.signatures import keywords_of

logger = logging.getLogger(__name__)


def outcome(report: Mapping[str, Any]) -> ToolResult:
    """Convert a transform's report, `{"success", "result" or "error"}`, which may be nested, to a result."""
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


RenderCall = Callable[[str, Mapping[str, JSON]], str]


class TextLayer(ThreadLayer):
    """Writes a call as text, which the transform parses.

    Args:
        transform: The transform.
        render_call: Writes the name and the arguments of a call as text; None: in TorchRL's tags.
    """

    def __init__(self, transform: Any, render_call: RenderCall | None = None) -> None:
        super().__init__(transform)
        self.render_call = render_call

    def answer(self, call: TransformCall) -> ToolResult:
        """Run a call that the transform parses."""
        rendered = self.render_call(call.name, call.args) if self.render_call else _rendered(call)
        found: Any = self.transform._process_batch_item(rendered, call.row)
        if found is None:
            raise ToolError(
                f"the transform found no call in {rendered[:80]!r}; pass as_tool a render_call in its syntax"
            )
        written = getattr(self.transform, "_format_result", str)
        texts: list[str] = [written(item) for item in ([found] if isinstance(found, str) else found)]
        failed = any(" failed:\n" in text[:200] for text in texts)
        return ToolResult(tuple(map(TextPart, texts)), failed)


def _rendered(call: TransformCall) -> str:
    tag = f' tag="{html.escape(call.ctx.tag)}"' if call.ctx.tag else ""
    return f'<tool name="{call.name}"{tag}>{json.dumps(call.args, ensure_ascii=False)}</tool>'


class NamedLayer(ThreadLayer):
    """Calls `_execute_tool`; all rows share the state of its functions, as in the transform itself."""

    rows_have_state = False

    def answer(self, call: TransformCall) -> ToolResult:
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
        """Return the tool's entry of `tool_schemas`, or else the schema of the function's signature."""
        known = _known_schema(getattr(self.transform, "tool_schemas", None), name)
        if known is not None:
            return known
        tools = getattr(self.transform, "tools", None)
        if isinstance(tools, Mapping) and name not in self.names:
            kind = type(self.transform).__name__
            raise ValueError(f"this {kind} has no tool {name!r}; it has {', '.join(self.names) or 'none'}")
        function: Any = _item(tools, name)
        try:
            read = schema_of(cast("Callable[..., Any]", function))
        except TypeError:  # not a function, or without annotations
            return "", ANY
        return read.description, read.input_schema


def _known_schema(schemas: Any, name: str) -> tuple[str, Schema] | None:
    """Return the description and schema in an entry, which has the form of arguments or of a function."""
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


_CODE: Schema = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python code. Use print() to see values."}},
    "required": ["code"],
}
_TIMED_OUT = ("Code execution timed out", "Code execution timed out - process restarted")
_RESTARTED = "The interpreter had ended. This code ran in a new one; all variables from before are lost."


class PythonLayer(ThreadLayer):
    """Calls `_execute_python_code(code, row)`; a row whose interpreter has ended gets a new one.

    Args:
        transform: The transform.
    """

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.rows_have_state = bool(transform.persistent) and transform.python_service is None

    def answer(self, call: TransformCall) -> ToolResult:
        """Run code."""
        was_lost = self.rows_have_state and self._make_process(call)
        done = self.transform._execute_python_code(str(call.args.get("code", "")), call.row)
        parts = (_RESTARTED if was_lost else "", done.get("stdout", ""), done.get("stderr", ""))
        text = "\n".join(part.rstrip("\n") for part in parts if part and part.strip())
        if done.get("stderr") in _TIMED_OUT:
            return ToolResult.from_text(text, status=Status.TIMEOUT)
        return ToolResult.from_text(text, is_error=not done["success"])

    @property
    def names(self) -> list[str]:
        """The name "python"."""
        return ["python"]

    def offer(self, name: str) -> tuple[str, Schema]:
        """Return the schema of the code."""
        return "Run Python code and return its output.", _CODE

    def _make_process(self, call: TransformCall) -> bool:
        """Start a process for the row unless one runs; return whether an earlier one was lost.

        The transform starts its processes one after the other and counts them, so rows that start at the same
        time would start too many. A clone of the transform starts this one, and only this row waits for it.
        """
        with self.lock:
            process = self._slots(call.row)[call.row]
        if process is not None and process.process is not None and process.process.poll() is None:
            return False
        maker = self.transform.clone()
        maker._ensure_processes(1)
        made, maker.processes = maker.processes[0], []
        with self.lock:
            if not call.is_over:
                self._slots(call.row)[call.row] = made
        if call.is_over:
            made.cleanup()
            raise ToolError("the call was cancelled")
        return process is not None

    def _slots(self, row: int) -> list[Any]:
        processes: list[Any] = self.transform.processes
        processes.extend([None] * (row + 1 - len(processes)))
        return processes

    def stop(self, call: TransformCall) -> None:
        """End the row's process; without the lock, because this runs on the event loop."""
        processes: list[Any] = self.transform.processes or []
        if not self.rows_have_state or call.row >= len(processes):
            return
        process, processes[call.row] = processes[call.row], None
        if process is not None and process.process is not None:
            end_trees([process.process.pid])


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_NAMED = {kind.__name__: name for kind, name in _TYPES.items()} | {name: name for name in _TYPES.values()}
_SKIPPED = "not run, because an earlier call of the same message failed"


class ServiceLayer(ThreadLayer):
    """Calls `registry.get(name)(**args)`, with `_state` if the service has this parameter.

    Args:
        transform: The transform.
    """

    rows_have_state = False

    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self._failed: dict[int, tuple[str, int]] = {}  # row → trajectory and turn of its last failure

    def answer(self, call: TransformCall) -> ToolResult:
        """Call the service, unless `stop_on_error` is set and an earlier call of this message has failed."""
        here = call.ctx.trajectory, call.ctx.turn
        if self.transform.stop_on_error and self._failed.get(call.row) == here:
            return ToolResult.from_text(_SKIPPED, status=Status.SKIPPED)
        try:
            result = self._answer(call)
        except BaseException:
            self._failed[call.row] = here
            raise
        if result.is_error:
            self._failed[call.row] = here
        return result

    def _answer(self, call: TransformCall) -> ToolResult:
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
            # The transform shows exceptions of services to the model, and services were written for that.
            logger.warning("service %s raised (call %s)", call.name, ctx.call_id, exc_info=True)
            raise ToolError(f"{call.name} failed: {error}") from error
        if isinstance(output, Mapping) and "error" in cast("Mapping[str, Any]", output):
            return ToolResult.from_text(str(cast("Mapping[str, Any]", output)["error"]), is_error=True)
        return ToolResult.from_value(output)

    @property
    def names(self) -> list[str]:
        """Names of the services, from a private attribute, because the registry has no public list."""
        return list(map(str, getattr(self.transform.registry, "_svc", ())))

    def offer(self, name: str) -> tuple[str, Schema]:
        """Return the description of a service and its `schema_in`, a JSON Schema or names with types."""
        registry = self.transform.registry
        if name not in registry:
            return "", ANY
        service: Any = registry.get(name)
        description: Any = getattr(service, "description", None) or inspect.getdoc(service) or ""
        return str(description), _schema(getattr(service, "schema_in", None))


def _schema(schema_in: Any) -> Schema:
    """Return a schema without required properties, because `schema_in` does not tell which have a default."""
    if not isinstance(schema_in, Mapping):
        return ANY
    fields = cast("Mapping[str, Any]", schema_in)
    if fields.get("type") == "object":
        return fields
    properties = {str(name): _property(kind) for name, kind in fields.items()}
    return {"type": "object", "properties": properties} if properties else ANY


def _property(kind: Any) -> dict[str, Any]:
    if isinstance(kind, Mapping):
        return dict(cast("Mapping[str, Any]", jsonable(kind)))
    found = _TYPES.get(kind) if isinstance(kind, type) else _NAMED.get(str(kind))
    return {} if found is None else {"type": found}
