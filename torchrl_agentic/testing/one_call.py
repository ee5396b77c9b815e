"""`call_tool`: one call of one tool, for unit tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.messages import JSON, ParsedCall, ToolResult
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.row_data import RowData
from torchrl_agentic.tools.tool_adapter import ensure_tool, ensure_toolset


def call_tool(
    tool: Any,
    args: Mapping[str, JSON] | None = None,
    *,
    name: str | None = None,
    state: Any = None,
    row: Mapping[str, Any] | None = None,
    trajectory: str = "test",
    timeout: float | None = 30.0,
) -> ToolResult:
    """Call a tool once, as `ToolCompose` would, and return its result.

    The arguments are checked against the tool's schema, the tool is set up, and its session is opened and
    closed. Errors of the call are results, not exceptions. Works with and without a running event loop.

    >>> result = call_tool(add, {"a": 20, "b": 22})
    >>> assert result.status is Status.OK and result.text == "42"

    Args:
        tool: A Tool, a look-alike or a typed function; or a toolset that has the tool `name`.
        args: Arguments by name, as a model would write them.
        name: Name of the tool in the toolset.
        state: Value of `ToolContext.state`, for tools with `wants_state`.
        row: Columns of the data set's row that the trajectory begins with, such as `tools_kwargs`.
        trajectory: Name of the trajectory.
        timeout: Time limit of the call in seconds; None: no limit.

    Returns:
        The result; its `status` names the kind of an error. If the tool crashed, the log has the traceback.

    Raises:
        TypeError: If `tool` is not a tool, or `args` is not a mapping.
        ValueError: If the row lacks what the tool needs, or a toolset has no tool of that name.
        Exception: If `setup` of the tool or toolset fails; it may raise any type.
    """
    if not isinstance(cast("object", args), Mapping | None):
        raise TypeError(f"args maps names of arguments to values; got {args!r} ({type(args).__name__})")
    data = RowData.of(row or {})

    async def call(called: Tool, toolset: Toolset | None = None) -> ToolResult:
        dispatcher = Dispatcher(per_call_timeout=timeout)
        dispatcher.add(called, toolset=toolset)
        called.check_row(data)
        try:
            async with dispatcher.session(trajectory) as session:
                session.data = data
                if called.open_at_reset:
                    await session.open([called])
                (result,) = await session.run([ParsedCall(called.name, args or {}, "call_0_0")], state=state)
                return result
        finally:
            await dispatcher.close()

    async def call_one_of(toolset: Any) -> ToolResult:
        opened = ensure_toolset(toolset)
        try:
            tools = {each.name: each for each in map(ensure_tool, await opened.setup())}
            if name not in tools:
                raise ValueError(f"the toolset has no tool {name!r}; its tools: {', '.join(tools) or 'none'}")
            return await call(tools[name], opened)
        finally:
            await opened.teardown()

    return run(call_one_of(tool) if name is not None else call(ensure_tool(tool)))
