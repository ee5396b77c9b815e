"""`create_tool`, which makes a tool from a class, a configuration and a schema, as verl does."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.text import did_you_mean
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.loading import error_with_place
from torchrl_agentic.tools.options import OptionError, create
from torchrl_agentic.tools.signatures import keywords_of
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.tools.verl.base_tool import OpenAIFunctionToolSchema
from torchrl_agentic.tools.verl.lifecycle import METHODS, LifecycleTool


def create_tool(
    kind: Any, config: Mapping[str, Any], function: Mapping[str, Any] | None = None
) -> Tool | Toolset:
    """Create a tool or toolset.

    Args:
        kind: Class of a `Tool`, of a look-alike, of a `Toolset`, or in the form of verl's `BaseTool`.
        config: Configuration. A class in verl's form gets it whole, another class its items as arguments,
            without "type".
        function: The "function" of a schema in the form of OpenAI's API, with "name" and "parameters", which
            replaces that of the tool; None for the tool's own.

    Raises:
        MissingExtra: If the class needs an extra that is not installed.
        OptionError: If `kind` is not such a class, or cannot be created with these arguments.
    """
    if not inspect.isclass(kind):
        name = getattr(kind, "__qualname__", f"an object of {type(kind).__qualname__}")
        hint = "; write it as '- function: …'" if callable(kind) else ""
        raise OptionError(
            f"{name} is not a class of a Tool, a Toolset or verl's BaseTool{hint}", "class_name"
        )
    is_toolset = issubclass(kind, Toolset)
    if is_toolset and function is not None:
        raise OptionError("a toolset provides the schemas of its tools; remove this one", "tool_schema")
    if callable(getattr(kind, "execute", None)) and not issubclass(kind, Tool):
        return _lifecycle_tool(kind, config, function)
    options = {key: value for key, value in config.items() if key != "type"}
    taken = keywords_of(kind).names - options.keys()
    own = {key: function.get(key) for key in ("name", "description", "strict")} if function else {}
    stated = {key: value for key, value in own.items() if key in taken and value}  # "" leaves the class's own
    try:
        made = create(kind, options, **stated)
    except OptionError as error:
        raise OptionError(str(error), "config", *error.steps) from error
    if is_toolset:
        return made
    try:
        tool = ensure_tool(made)
    except TypeError as error:
        raise OptionError(str(error), "class_name") from error
    if function is not None:
        try:
            _set_schema(tool, **function)
        except ValueError as error:
            raise OptionError(str(error), "tool_schema", "function", "parameters") from error
    elif not tool.name:
        raise OptionError(f"{kind.__name__} has no name; set one, or add a tool_schema")
    return tool


def _set_schema(
    tool: Tool, parameters: Mapping[str, Any], name: str, description: str = "", strict: bool | None = None
) -> None:
    """Set the name and schema of a tool; an empty description and `strict=None` leave the own ones."""
    known = cast("Mapping[str, Any]", parameters.get("properties") or {})
    for needed in cast("Sequence[str]", tool.input_schema.get("required") or ()):
        if "properties" in tool.input_schema and needed not in known:
            hint = did_you_mean(needed, known)
            raise ValueError(f"the tool needs a property {needed!r}, which is missing{hint}")
    try:
        tool.name, tool.description = name, description or tool.description
        tool.input_schema = dict(parameters)
        tool.is_strict = tool.is_strict if strict is None else strict
    except AttributeError as error:
        kind = type(tool).__name__
        raise ValueError(f"the schema of {kind} cannot be set ({error}); remove tool_schema") from None


def _lifecycle_tool(kind: Any, config: Mapping[str, Any], function: Mapping[str, Any] | None) -> Tool:
    if missing := [name for name in METHODS if not callable(getattr(kind, name, None))]:
        raise OptionError(f"{kind.__name__} has execute, but not {', '.join(missing)}", "class_name")
    stated = None if function is None else {"type": "function", "function": function}
    schema = None if stated is None else OpenAIFunctionToolSchema.model_validate(stated)
    try:
        made = kind(config=dict(config), tool_schema=schema)
        build = getattr(made, "get_openai_tool_schema", lambda: None)
        if schema is None and getattr(made, "tool_schema", None) is None and build() is None:
            raise NotImplementedError("no schema")
        return LifecycleTool(made)
    except MissingExtra:
        raise
    except Exception as error:  # of the user's code
        lacks_schema = isinstance(error, AssertionError | NotImplementedError | AttributeError) and not schema
        hint = "; add a tool_schema, or return one from get_openai_tool_schema()" if lacks_schema else ""
        message = f"cannot create {kind.__name__}: {error_with_place(error)}{hint}"
        raise OptionError(message, "class_name") from error
