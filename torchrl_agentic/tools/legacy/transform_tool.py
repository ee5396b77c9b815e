"""`as_tool`, and the Tool that it makes."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from torchrl_agentic.messages import JSON, ToolResult
from torchrl_agentic.tools.base import Effects, Tool, ToolContext, current_session
from torchrl_agentic.tools.legacy.base import Call, Layer
from torchrl_agentic.tools.legacy.browser_transform import BrowserLayer
from torchrl_agentic.tools.legacy.layers import NamedLayer, PythonLayer, RenderCall, ServiceLayer, TextLayer
from torchrl_agentic.tools.legacy.mcp_transform import MCPLayer
from torchrl_agentic.tools.schema import Schema


def as_tool(
    transform: Any,
    *,
    name: str | None = None,
    input_schema: Schema | None = None,
    description: str = "",
    wants_state: bool = False,
    render_call: RenderCall | None = None,
) -> LegacyTool:
    """Make a tool of a TorchRL tool transform, or of anything with `_process_batch_item(content, index)`.

    One transform may be made into several tools; it serves one environment.

    Args:
        transform: `PythonInterpreter`, `SimpleToolTransform`, `BrowserTransform`, `MCPToolTransform`,
            `ExecuteToolsInOrder`, or one of your own. It must not be part of an environment as well.
        name: what the model calls it. Where the transform holds several tools, this is the one that is meant:
            the key of `SimpleToolTransform(tools=…)`, "server.tool" for MCP, the service of a registry. None:
            the name of the only tool that the transform has; "python" and "browser" for TorchRL's own.
        input_schema: what the model is told; None: what the transform knows (`tool_schemas`, the signature of
            a function, `schema_in`, what an MCP server says), or else any object.
        description: what the model is told; empty: what the transform knows.
        wants_state: whether the environment's state is passed on, as `_state`, to a registry's service.
        render_call: writes a call as the text that the transform parses; for transforms of your own whose
            syntax is not `<tool name="…" tag="…">{json}</tool>`.

    Raises:
        TypeError: it is no tool transform; or no name is given, and the transform has several tools, or no
            name.
        ValueError: it is part of an environment.
    """
    kind = type(transform).__name__
    if isinstance(transform, type):
        raise TypeError(
            f"{transform.__name__} is a class, no tool transform: write {transform.__name__}(...)"
        )
    if not callable(getattr(transform, "_process_batch_item", None)):
        raise TypeError(f"{kind} has no _process_batch_item: it is no tool transform of TorchRL")
    _check_free(transform)
    role = getattr(transform, "tool_role", "tool")
    if role != "tool":
        warnings.warn(
            f"the role {role!r} of {kind} is not used here: say ToolCompose(..., tool_role={role!r})",
            stacklevel=2,
        )
    name = _only_name(transform, render_call) if name is None else name
    return LegacyTool(transform, name, input_schema, description, wants_state, render_call)


def _only_name(transform: Any, render_call: RenderCall | None) -> str:
    """Return the name of the only tool that a transform has.

    Raises:
        TypeError: If it has several, or does not tell.
    """
    names = _layer_of(transform, render_call).names
    if len(names) == 1:
        return names[0]
    kind = type(transform).__name__
    known = f"{kind} has the tools {', '.join(names)}" if names else f"{kind} has no name of its own"
    raise TypeError(
        f"as_tool needs the name that the model calls, and {known}: as_tool({kind}(...), name='...')"
    )


class LegacyTool(Tool):
    """A TorchRL tool transform behind the Tool interface; made by `as_tool`.

    The rows of a batch run side by side, the calls of one row to one transform one after the other. What
    fails is marked as an error.
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
        self.render_call = render_call
        self.wants_state = wants_state
        self.layer = _layer_of(transform, render_call)
        told, schema = self.layer.offer(name)
        self.description = description or told
        self.input_schema = input_schema or schema

    @property
    def effects(self) -> Effects:  # pyright: ignore[reportIncompatibleVariableOverride]  follows the transform
        """Writes the transform: whichever tool stands for it, its calls in a row wait for each other."""
        return Effects(writes=[self.name, f"transform {id(self.transform)}"])

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run one call; when it is stopped, what it started is ended too."""
        return await self.layer.run(Call(self.name, args, ctx))

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Take the rows that a trajectory calls from, until it ends."""
        del trajectory
        # By hand there is no session, and what stands for the trajectory is this very use.
        owner = current_session.get() or object()
        try:
            yield _Live(self, owner)
        finally:
            self.layer.release(owner)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Let another trajectory go on from here, where rows keep nothing of their own.

        Raises:
            TypeError: they do.
        """
        if self.layer.rows_have_state:
            raise TypeError(
                f"{self.name!r} cannot be branched: {type(self.transform).__name__} cannot copy a row"
            )
        return self.session(trajectory)

    async def setup(self) -> None:
        """Open again what was closed.

        Raises:
            ValueError: the transform has become part of an environment.
        """
        _check_free(self.transform)
        await asyncio.to_thread(self.layer.open)

    async def teardown(self) -> None:
        """Close the transform, with the last of its tools."""
        await asyncio.to_thread(self.layer.close)

    def reset_rows(self, tensordict: Any, tensordict_reset: Any) -> None:
        """Hand on the reset of some rows; `ToolCompose` calls it with the mask, one row per conversation."""
        self.layer.reset(tensordict, tensordict_reset)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "layer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, layer=_layer_of(state["transform"], state["render_call"]))


class _Live(Tool):
    """A legacy tool in one trajectory."""

    def __init__(self, tool: LegacyTool, owner: object) -> None:
        self._tool = tool
        self._owner = owner
        self.name = tool.name

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        self._tool.layer.claim(ctx.batch_index, self._owner)
        return await self._tool.run(args, ctx)


_layers: WeakValueDictionary[tuple[int, int], Layer] = WeakValueDictionary()
"""By transform and `render_call`: tools of one transform share its layer. A layer keeps both alive."""
_looking_up = threading.Lock()


def _layer_of(transform: Any, render_call: RenderCall | None) -> Layer:
    with _looking_up:
        key = id(transform), id(render_call)
        layer = _layers.get(key)
        if layer is None:
            layer = _layers[key] = _new_layer(transform, render_call)
        return layer


def _new_layer(transform: Any, render_call: RenderCall | None) -> Layer:
    """Give the layer that a transform has, from the most particular on."""
    if render_call is not None:
        return TextLayer(transform, render_call)
    kinds: tuple[tuple[str, type[Layer]], ...] = (
        ("_execute_python_code", PythonLayer),
        ("_connect_servers", MCPLayer),
        ("_execute_browser_action_async", BrowserLayer),
        ("_execute_tool", NamedLayer),
        ("registry", ServiceLayer),
    )
    return next((kind for attribute, kind in kinds if hasattr(transform, attribute)), TextLayer)(transform)


def _check_free(transform: Any) -> None:
    if getattr(transform, "container", None) is not None:
        kind = type(transform).__name__
        raise ValueError(
            f"this {kind} is part of an environment, where it would run each call once more: leave it out of"
            " there, and give as_tool one of its own"
        )
