"""`ensure_tool`, which makes a `Tool` of whatever people bring."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from torchrl_agentic.callee import Callee, is_async
from torchrl_agentic.function import FunctionTool
from torchrl_agentic.messages import JSON
from torchrl_agentic.tool import Tool, ToolContext, Toolset


class DuckTool(Tool):
    """An object that has name, description, input_schema and run, but is no `Tool`."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.name = target.name
        self.description = getattr(target, "description", "") or ""
        self.input_schema = getattr(target, "input_schema", None) or {"type": "object"}
        self.output_schema = getattr(target, "output_schema", None)
        self.wants_state = bool(getattr(target, "wants_state", False))
        self.effects = getattr(target, "effects", None)
        self._callee = Callee(target.run)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> Any:
        """Hand the call on."""
        return await self._callee(ctx.in_thread, args, ctx)

    async def setup(self) -> None:
        """Set the object up, if it can be."""
        await self._maybe("setup")

    async def teardown(self) -> None:
        """Tear the object down, if it can be."""
        await self._maybe("teardown")

    async def _maybe(self, method: str) -> None:
        value = getattr(self.target, method, lambda: None)()
        if inspect.isawaitable(value):
            await value


class DuckSessionTool(DuckTool):
    """A look-alike that opens something per trajectory: its `session` is an async context manager."""

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Open what the object opens; that need not be a `Tool` either."""
        async with self.target.session(trajectory) as live:
            yield ensure_tool(live)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Let the object open a branch, if it can."""
        if not callable(getattr(self.target, "branch", None)):
            return super().branch(live, trajectory)
        return self._branch(live.target if isinstance(live, DuckTool) else live, trajectory)

    @asynccontextmanager
    async def _branch(self, live: Any, trajectory: str) -> AsyncGenerator[Tool]:
        async with self.target.branch(live, trajectory) as copy:
            yield ensure_tool(copy)


def ensure_tool(item: Any) -> Tool:
    """Make a `Tool` of whatever people bring: a Tool, a look-alike, a typed function.

    Raises:
        TypeError: it is none of these; the message says what to write instead.
    """
    kind = type(item).__name__
    if isinstance(item, Tool):
        if not is_async(item.run):
            raise TypeError(
                f"{kind}.run is no coroutine function: write 'async def run', and ctx.in_thread(...) inside"
            )
        return item
    if isinstance(item, type):
        raise TypeError(f"{item.__name__} is a class; a tool is an object: write {item.__name__}(...)")
    if isinstance(item, Toolset):
        raise TypeError(f"{kind} is a toolset: use compose.add_toolset(...)")
    if hasattr(item, "_process_batch_item"):
        raise TypeError(f"{kind} is a TorchRL tool transform: wrap it as as_tool({kind}(...), name='...')")
    if hasattr(item, "_step") and hasattr(item, "_reset"):
        raise TypeError(
            f"{kind} is a transform, not a tool: put it beside the tools, in an outer Compose:"
            f" TransformedEnv(env, Compose(ToolCompose(...), {kind}(...)))"
        )
    if isinstance(getattr(item, "name", None), str) and callable(getattr(item, "run", None)):
        return DuckSessionTool(item) if callable(getattr(item, "session", None)) else DuckTool(item)
    marked = getattr(item, "__tool__", None)
    if isinstance(marked, FunctionTool):
        return marked
    if callable(item):
        return FunctionTool(item)
    if callable(getattr(item, "execute", None)) and callable(getattr(item, "release", None)):
        raise TypeError(f"{kind} begins and ends with each trajectory: wrap it as LifecycleTool({kind}(...))")
    raise TypeError(f"a tool is a Tool, a typed function, or an object with name and run; got {kind}")
