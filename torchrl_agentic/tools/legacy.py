"""Old TorchRL tool transforms as tools: `as_tool(PythonInterpreter(persistent=True), name="python")`.

A legacy transform parses the message again; here its execution layer is called instead, so that the arguments
arrive as the model wrote them: a code fence in the code, for one, cannot cut it. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from torchrl_agentic.errors import ToolError
from torchrl_agentic.messages import JSON, JsonPart, Status, TextPart, ToolResult, jsonable
from torchrl_agentic.schema import Schema
from torchrl_agentic.tool import Effects, Tool, ToolContext

RenderCall = Callable[[str, Mapping[str, JSON]], str]
_CODE: Schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


def as_tool(
    transform: Any,
    *,
    name: str,
    input_schema: Schema | None = None,
    description: str = "",
    wants_state: bool = False,
    render_call: RenderCall | None = None,
) -> LegacyTool:
    """Make a tool of a TorchRL tool transform, or of anything with `_process_batch_item(content, index)`.

    Args:
        transform: `PythonInterpreter`, `SimpleToolTransform`, `BrowserTransform`, `MCPToolTransform`,
            `ExecuteToolsInOrder`, or one of your own. It must not be part of an environment as well.
        name: what the model calls it. Where the transform holds several tools, this is the one that is meant:
            the key of `SimpleToolTransform(tools=…)`, "server.tool" for MCP, the service of a registry.
        input_schema: what the model is told; None: any object, or `{"code": string}` for the interpreter.
        description: what the model is told.
        wants_state: whether the environment's state is passed on, as `_state`, to a registry's service.
        render_call: writes a call as the text that the transform parses; for transforms of your own whose
            syntax is not `<tool name="…">{json}</tool>`.

    Raises:
        TypeError: it is no tool transform.
    """
    if not callable(getattr(transform, "_process_batch_item", None)):
        raise TypeError(
            f"{type(transform).__name__} has no _process_batch_item: it is no tool transform of TorchRL"
        )
    return LegacyTool(transform, name, input_schema, description, wants_state, render_call)


class LegacyTool(Tool):
    """A TorchRL tool transform behind the Tool interface; made by `as_tool`.

    The rows of a batch run side by side, the calls of one row one after the other. What fails is marked as an
    error.
    """

    def __init__(
        self,
        transform: Any,
        name: str,
        input_schema: Schema | None,
        description: str,
        wants_state: bool,
        render_call: RenderCall | None,
    ) -> None:
        self.transform = transform
        self.name = name
        self.layer = _layer(transform) if render_call is None else "text"
        self.input_schema = input_schema or (_CODE if self.layer == "python" else {"type": "object"})
        self.description = description
        self.wants_state = wants_state
        self.effects = Effects(writes=[name])
        self.render_call = render_call or _render
        self.lock = threading.Lock()

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run one call on a thread; when it is stopped, what it started is ended too."""
        call = _Call(self, args, ctx)
        try:
            return await ctx.in_thread(call.run)
        except BaseException:
            call.end()
            raise

    async def teardown(self) -> None:
        """Close the transform."""
        close = getattr(self.transform, "close", None)
        if callable(close):
            close()

    def reset_rows(self, tensordict: Any, tensordict_reset: Any) -> None:
        """Hand on the reset of some rows; `ToolCompose` calls it with the mask, one row per conversation."""
        reset = getattr(self.transform, "_reset", None)
        if reset is not None:
            with self.lock:
                reset(tensordict, tensordict_reset)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.Lock())


class _Call:
    """One call on its way through a transform, on a thread."""

    _alone: ClassVar[frozenset[str]] = frozenset({"page"})  # transforms with one page for all rows

    def __init__(self, tool: LegacyTool, args: Mapping[str, JSON], ctx: ToolContext) -> None:
        self.tool = tool
        self.transform = tool.transform
        self.args = args
        self.ctx = ctx
        self.row = ctx.batch_index
        self.thread: int | None = None

    def run(self) -> ToolResult:
        self.thread = threading.get_native_id()
        try:
            lock = self.tool.lock if any(hasattr(self.transform, mark) for mark in self._alone) else None
            with lock or contextlib.nullcontext():
                return getattr(self, f"_{self.tool.layer}")()
        finally:
            self.thread = None

    def end(self) -> None:
        """End the processes that this call waits for, so that its thread comes back."""
        if self.thread is not None:
            for child in _children(self.thread):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            if self.tool.layer == "python" and self.transform.persistent:
                with self.tool.lock:
                    process, self.transform.processes[self.row] = self.transform.processes[self.row], None
                    if process is not None and process.process is not None:
                        process.process.kill()

    def _python(self) -> ToolResult:
        transform = self.transform
        if transform.persistent and transform.python_service is None:
            # Under a lock: processes are made by counting, and rows that start together would make too many.
            with self.tool.lock:
                transform._ensure_processes(max(self.row + 1, len(transform.processes)))
        done = transform._execute_python_code(str(self.args.get("code", "")), self.row)
        parts = (done.get("stdout", ""), done.get("stderr", ""))
        text = "\n".join(part.rstrip("\n") for part in parts if part and part.strip())
        if "timed out" in done.get("stderr", ""):
            return ToolResult.from_text(text, status=Status.TIMEOUT)
        return ToolResult.from_text(text, is_error=not done["success"])

    def _named(self) -> ToolResult:
        return _outcome(self.transform._execute_tool(self.tool.name, json.dumps(self.args)))

    def _mcp(self) -> ToolResult:
        server, dot, tool = self.tool.name.partition(".")
        if not dot:
            server, tool = next(iter(self.transform.server_configs), ""), self.tool.name
        return _outcome(self.transform._execute_tool_sync(server, tool, json.dumps(self.args)))

    def _service(self) -> ToolResult:
        if self.tool.name not in self.transform.registry:
            raise ToolError(f"the registry has no service named {self.tool.name!r}")
        state: dict[str, Any] = (
            {"_state": {} if self.ctx.state is None else self.ctx.state}
            if self.transform.pass_state_to_tools
            else {}
        )
        output = self.transform.registry.get(self.tool.name)(**self.args, **state)
        failed = isinstance(output, Mapping) and "error" in cast("Mapping[str, Any]", output)
        return ToolResult((JsonPart(jsonable(output)),), failed)

    def _text(self) -> ToolResult:
        rendered = self.tool.render_call(self.tool.name, self.args)
        found: Any = self.transform._process_batch_item(rendered, self.row)
        if found is None:
            raise ToolError(
                f"the transform found no call in {rendered[:80]!r}; give as_tool a render_call that suits it"
            )
        texts: list[str] = [found] if isinstance(found, str) else [str(item) for item in found]
        failed = any(" failed:\n" in text[:200] for text in texts)
        return ToolResult(tuple(map(TextPart, texts)), failed)


def _layer(transform: Any) -> str:
    """Which execution layer a transform has, from the most particular on."""
    layers = (
        ("_execute_python_code", "python"),
        ("_execute_tool_sync", "mcp"),
        ("_execute_tool", "named"),
        ("registry", "service"),
    )
    return next((layer for attribute, layer in layers if hasattr(transform, attribute)), "text")


def _outcome(done: Mapping[str, Any]) -> ToolResult:
    """Read the transform's own report, `{"success", "result" or "error"}`, perhaps one inside another."""
    result = done.get("result")
    if done.get("success") and isinstance(result, Mapping) and "success" in result:
        return _outcome(cast("Mapping[str, Any]", result))
    if done.get("success"):
        return ToolResult.from_value(result)
    text = str(done.get("error", "failed"))
    return ToolResult.from_text(text, status=Status.TIMEOUT if "timed out" in text else Status.ERROR)


def _render(name: str, args: Mapping[str, JSON]) -> str:
    return f'<tool name="{name}">{json.dumps(args, ensure_ascii=False)}</tool>'


def _children(thread: int) -> list[int]:
    """The processes that a thread of ours has started and that still run; known on Linux only."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()]
    except OSError:
        return []
