"""Entries in verl's form: a class, what it is told, and the schema that the model sees."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.tool_config.mistakes import ConfigError, nearest
from torchrl_agentic.tool_config.models import SchemaSection
from torchrl_agentic.tool_config.options import call, parameters_of
from torchrl_agentic.tool_config.references import raised_at
from torchrl_agentic.tool_config.spot import Spot
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.function import FunctionTool
from torchrl_agentic.tools.schema import Schema
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.tools.verl.base_tool import OpenAIFunctionToolSchema
from torchrl_agentic.tools.verl.lifecycle import LifecycleTool

_OURS = "torchrl_agentic.tools."
VERL: Mapping[str, str] = {
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": f"{_OURS}sandbox_fusion:SandboxFusionTool",
    "verl.tools.search_tool.SearchTool": f"{_OURS}search:SearchTool",
    "verl.tools.gsm8k_tool.Gsm8kTool": f"{_OURS}verl.graders:Gsm8kTool",
    "verl.tools.geo3k_tool.Geo3kTool": f"{_OURS}verl.graders:Geo3kTool",
    "verl.tools.image_zoom_in_tool.ImageZoomInTool": f"{_OURS}verl.image_zoom:ImageZoomTool",
}
"""Verl's tools → ours that do the same; found when they are named."""
VERL_MCP = ("verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool")
LIFECYCLE = ("create", "execute", "calc_reward", "release")
EXPECTED = (
    "expected a subclass of torchrl_agentic.Tool or Toolset, a class with name, description, input_schema"
    f" and run, or one with async {', '.join(LIFECYCLE)} as verl's BaseTool has them"
)


def known_class(name: str, spot: Spot) -> str:
    """Give the class that a name of verl's stands for here.

    Raises:
        ConfigError: it is none that verl has, but nearly.
    """
    if name in VERL or not name.startswith("verl.tools."):
        return VERL.get(name, name)
    if near := nearest(name, VERL):
        spot.fail(f"no class {name!r}{near}")
    return name


def make_of_class(
    kind: Any, config: Mapping[str, Any], schema: SchemaSection | None, spot: Spot
) -> Tool | Toolset:
    """Make an object of a class, and a tool of it.

    spot: the entry's.

    Raises:
        ConfigError: it is no class of tools, or cannot be made.
    """
    named = spot.at("class_name")
    if not inspect.isclass(kind):
        if callable(kind) or isinstance(kind, FunctionTool):
            named.fail(
                "this is a function, not a class; write '- function: \"file.py:name\"' in place of class_name"
            )
        named.fail(f"this is an object of {type(kind).__name__}, not a class; {EXPECTED}")
    options = {key: value for key, value in config.items() if key != "type"}
    if issubclass(kind, Tool):
        return _our_tool(kind, options, schema, spot)
    if issubclass(kind, Toolset):
        if schema is not None:
            spot.at("tool_schema").fail("a toolset says itself what its tools are; leave it out")
        return call(kind, options, _place(spot))
    if callable(getattr(kind, "execute", None)):
        return _lifecycle_tool(kind, dict(config), schema, spot)
    if callable(getattr(kind, "run", None)):
        try:
            return _told(ensure_tool(call(kind, options, _place(spot))), schema, spot)
        except TypeError as error:
            named.fail(f"{kind.__name__}: {error}")
    return named.fail(f"{kind.__module__}.{kind.__qualname__} is no tool; {EXPECTED}")


def _place(spot: Spot) -> Any:
    return lambda key="": str(spot.at("config", key) if key else spot)


def _our_tool(kind: type[Tool], options: Mapping[str, Any], schema: SchemaSection | None, spot: Spot) -> Tool:
    missing = getattr(kind, "__abstractmethods__", None)
    if missing:
        spot.at("class_name").fail(
            f"{kind.__name__} has no {', '.join(sorted(missing))}: write 'async def run'"
        )
    given: dict[str, Any] = {}
    if schema is not None:
        takes, _ = parameters_of(kind)
        said = schema.function.model_dump(include={"name", "description", "strict"}, exclude_unset=True)
        given = {key: value for key, value in said.items() if key in takes and key not in options}
    return _told(call(kind, options, _place(spot), given=given), schema, spot)


def _told(tool: Tool, schema: SchemaSection | None, spot: Spot) -> Tool:
    """Let a tool be called what the file says, and take what the file says."""
    if schema is None:
        if not tool.name:
            spot.fail("no tool_schema, and the class says no name; give one of them")
        return tool
    function = schema.function
    own = cast("list[str]", tool.input_schema.get("required") or [])
    properties = cast("Schema", function.parameters.get("properties") or {})
    for name in own:
        if "properties" in tool.input_schema and name not in properties:
            spot.at("tool_schema", "function", "parameters").fail(
                f"the tool takes {name!r}, and this schema has no such property{nearest(name, properties)}"
            )
    try:
        tool.name, tool.description = function.name, function.description or tool.description
        tool.input_schema = function.parameters
        tool.is_strict = tool.is_strict if function.strict is None else function.strict
    except AttributeError as error:
        spot.at("tool_schema").fail(
            f"{type(tool).__name__} cannot be told its schema ({error}); leave it out"
        )
    return tool


def _lifecycle_tool(
    kind: type[Any], config: dict[str, Any], schema: SchemaSection | None, spot: Spot
) -> Tool:
    missing = [name for name in LIFECYCLE if not callable(getattr(kind, name, None))]
    if missing:
        spot.at("class_name").fail(f"{kind.__name__} has execute, but no {', '.join(missing)}; {EXPECTED}")
    told = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema.spec())
    try:
        made = kind(config=config, tool_schema=told)
        if told is None and not _has_schema(made):
            raise NotImplementedError("there is none")
        return LifecycleTool(made)
    except MissingExtra:
        raise
    except Exception as error:  # whatever it does there
        if told is None and isinstance(error, AssertionError | NotImplementedError | AttributeError):
            raise ConfigError(
                f"{spot}: no tool_schema, and {kind.__name__} makes none: give one here, or let its "
                f"get_openai_tool_schema() return one ({type(error).__name__}: {error})"
            ) from error
        where = raised_at(error)
        at = f"{where}: " if where else ""
        raise ConfigError(f"{spot}: {at}{kind.__name__}: {type(error).__name__}: {error}") from error


def _has_schema(made: Any) -> bool:
    if getattr(made, "tool_schema", None) is not None:
        return True
    build = getattr(made, "get_openai_tool_schema", None)
    return callable(build) and build() is not None
