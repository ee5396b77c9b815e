"""`as_tool`, which creates a `LegacyTool` from a TorchRL tool transform."""

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
from torchrl_agentic.tools.legacy.base import Layer, TransformCall
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
    """Create a tool from a TorchRL tool transform, or any object with `_process_batch_item(content, index)`.

    Several tools can be created from one transform; it serves one environment.

    Args:
        transform: `PythonInterpreter`, `SimpleToolTransform`, `BrowserTransform`, `MCPToolTransform`,
            `ExecuteToolsInOrder`, or your own class. It must not also be part of an environment.
        name: The name that the model calls. It selects one of several tools of the transform: a key of
            `SimpleToolTransform(tools=…)`, "server.tool" for MCP, or a service of a registry. None: the name
            of the transform's only tool; "python" and "browser" for TorchRL's own transforms.
        input_schema: JSON Schema of the arguments; None: that of the transform (`tool_schemas`, the signature
            of a function, `schema_in`, the MCP server), or else any object.
        description: The description that the model reads; "": that of the transform.
        wants_state: Whether a registry's service gets the environment's state, as `_state`.
        render_call: Writes the name and the arguments of a call as the text that the transform parses; for
            your own transforms whose syntax is not `<tool name="…" tag="…">{json}</tool>`.

    Returns:
        The tool.

    Raises:
        TypeError: If the object is not a tool transform, or no name is given and the transform has several
            tools or no name.
        ValueError: If the transform is part of an environment.
    """
    kind = type(transform).__name__
    if isinstance(transform, type):
        raise TypeError(
            f"{transform.__name__} is a class; a tool transform is an object: write {transform.__name__}(...)"
        )
    if not callable(getattr(transform, "_process_batch_item", None)):
        raise TypeError(f"{kind} has no _process_batch_item, so it is not a tool transform of TorchRL")
    _check_free(transform)
    role = getattr(transform, "tool_role", "tool")
    if role != "tool":
        warnings.warn(
            f"the role {role!r} of {kind} is ignored: write ToolCompose(..., tool_role={role!r})",
            stacklevel=2,
        )
    name = _only_name(transform, render_call) if name is None else name
    return LegacyTool(transform, name, input_schema, description, wants_state, render_call)


def _only_name(transform: Any, render_call: RenderCall | None) -> str:
    """Return the name of the only tool that a transform has.

    Raises:
        TypeError: If it has several tools, or its tool has no name.
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
    """A TorchRL tool transform behind the `Tool` interface; created by `as_tool`.

    The rows of a batch run concurrently, the calls of one row to one transform one after the other.

    Args:
        transform: The transform.
        name: The name that the model calls.
        input_schema: JSON Schema of the arguments; None: that of the transform.
        description: The description that the model reads; "": that of the transform.
        wants_state: Whether a registry's service gets the environment's state.
        render_call: Writes a call as the text that the transform parses; None: in TorchRL's tags.
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
        default, schema = self.layer.offer(name)
        self.description = description or default
        self.input_schema = input_schema or schema

    @property
    def effects(self) -> Effects:  # pyright: ignore[reportIncompatibleVariableOverride]  follows the transform
        """Writes the transform, so that the calls of a row to all its tools run one after the other."""
        return Effects(writes=[self.name, f"transform {id(self.transform)}"])

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run one call; on cancellation, end the processes that it started."""
        return await self.layer.run(TransformCall(self.name, args, ctx))

    @asynccontextmanager
    async def session(self, trajectory: str) -> AsyncGenerator[Tool]:
        """Own the rows from which a trajectory calls, until it ends."""
        del trajectory
        # A tool that is used by hand has no session; a new object takes its place.
        owner = current_session.get() or object()
        try:
            yield _Live(self, owner)
        finally:
            self.layer.release(owner)

    def branch(self, live: Tool, trajectory: str) -> AbstractAsyncContextManager[Tool]:
        """Open the session of a new trajectory, if the rows of the transform have no state.

        Raises:
            TypeError: If they have state, which cannot be copied.
        """
        if self.layer.rows_have_state:
            raise TypeError(
                f"{self.name!r} cannot be branched: {type(self.transform).__name__} cannot copy a row"
            )
        return self.session(trajectory)

    async def setup(self) -> None:
        """Reopen the transform if it was closed.

        Raises:
            ValueError: If the transform has become part of an environment.
        """
        _check_free(self.transform)
        await asyncio.to_thread(self.layer.open)

    async def teardown(self) -> None:
        """Close the transform after the last of its tools."""
        await asyncio.to_thread(self.layer.close)

    def reset_rows(self, tensordict: Any, tensordict_reset: Any) -> None:
        """Reset some rows of the transform; called by `ToolCompose`.

        Args:
            tensordict: TensorDict of the reset, with the mask "_reset", one row per conversation.
            tensordict_reset: TensorDict after the reset.
        """
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
"""Layers by the ids of transform and `render_call`, which a layer keeps alive; tools share them."""
_looking_up = threading.Lock()


def _layer_of(transform: Any, render_call: RenderCall | None) -> Layer:
    with _looking_up:
        key = id(transform), id(render_call)
        layer = _layers.get(key)
        if layer is None:
            layer = _layers[key] = _new_layer(transform, render_call)
        return layer


def _new_layer(transform: Any, render_call: RenderCall | None) -> Layer:
    """Return a layer for a transform, of the most specific class that fits."""
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
            f"this {kind} is part of an environment, which would run each call a second time: remove it from"
            " the environment, or pass as_tool a new one"
        )
