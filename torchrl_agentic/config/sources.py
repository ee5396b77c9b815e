"""One function per kind of entry: each turns a part of a configuration into a tool or toolsets.

Looking up a class or function runs the code of its file. Names come from configurations, never from data.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import typing
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pydantic

from torchrl_agentic.config.document import ConfigError, Location, unknown_key
from torchrl_agentic.config.sections import ClassSection, FunctionSection, MCPSection
from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.repl import repl_in
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.text import did_you_mean
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.function import FunctionTool
from torchrl_agentic.tools.loading import error_with_place, load_module, load_object
from torchrl_agentic.tools.schema import shorten
from torchrl_agentic.tools.schema_lint import lint
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.tools.verl.base_tool import OpenAIFunctionToolSchema
from torchrl_agentic.tools.verl.lifecycle import LifecycleTool

Load = Callable[[Path], ModuleType]
NATIVE: Mapping[str, tuple[str, str | None]] = {
    "python": ("PythonTool", "repl"),
    "shell": ("ShellTool", "sandbox"),
    "file_read": ("FileReadTool", "sandbox"),
    "file_write": ("FileWriteTool", "sandbox"),
    "file_edit": ("FileEditTool", "sandbox"),
    "stop": ("StopTool", None),
    "http": ("HttpTool", None),
    "search": ("SearchTool", None),
    "sandbox_fusion": ("SandboxFusionTool", None),
}
"""Name → class in `torchrl_agentic.tools`, and its argument that gets the shared sandbox."""
VERL: Mapping[str, str] = {
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": "torchrl_agentic.tools.SandboxFusionTool",
    "verl.tools.search_tool.SearchTool": "torchrl_agentic.tools.SearchTool",
    "verl.tools.gsm8k_tool.Gsm8kTool": "torchrl_agentic.tools.Gsm8kTool",
    "verl.tools.geo3k_tool.Geo3kTool": "torchrl_agentic.tools.Geo3kTool",
    "verl.tools.image_zoom_in_tool.ImageZoomInTool": "torchrl_agentic.tools.ImageZoomTool",
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": "torchrl_agentic.interactions.Gsm8kInteraction",
}
"""Verl's classes → ours that do the same."""
_OBJECTS = ("repl", "sandbox", "patience", "files", "clock", "call_later", "over", "over_ray")
"""Arguments that no YAML value can be."""
_LIFECYCLE = ("create", "execute", "calc_reward", "release")
_EXPECTED = (
    "expected a subclass of torchrl_agentic.Tool or Toolset, a class with name, description, input_schema "
    f"and run, or one with async {', '.join(_LIFECYCLE)} as verl's BaseTool"
)


def native_tool(kind: str, options: Any, location: Location, sandbox: Callable[[], Sandbox]) -> Tool:
    """Create a tool of this package from its short form.

    Args:
        kind: Name of the tool, one of `NATIVE`.
        options: Arguments of the tool, or None.
        location: Position of the entry.
        sandbox: Function that returns the sandbox that all tools share.

    Raises:
        ConfigError: If there is no such tool, or its options are wrong.
    """
    known = (*NATIVE, "function", "mcp")
    if kind not in NATIVE:
        location.fail(
            f"no tool {kind!r}; expected one of {', '.join(known)}, or class_name{did_you_mean(kind, known)}"
        )
    if not isinstance(options, dict | None):
        location.at(kind).fail(f"expected options, such as {{name: …}}; got {shorten(options)}")
    name, argument = NATIVE[kind]
    given = {argument: repl_in(sandbox()) if argument == "repl" else sandbox()} if argument else {}
    made = getattr(importlib.import_module("torchrl_agentic.tools"), name)
    return create(made, cast("dict[str, Any]", options or {}), location.at(kind), given)


def function_tool(reference: Any, location: Location, load: Load) -> Tool:
    """Return a function as a tool.

    Args:
        reference: `file.py:name` or `package.module:name`.
        location: Position of the entry.
        load: Function that runs a Python file.

    Raises:
        ConfigError: If the function is not found, or cannot be a tool.
    """
    if not isinstance(reference, str):
        location.fail(f"expected 'file.py:name' or 'package.module:name'; got {shorten(reference)}")
    found = find_object(reference, location, load)
    if isinstance(found, type):
        location.fail(f"{reference!r} is a class; write '- class_name: {reference}'")
    try:
        made = ensure_tool(found)
    except (TypeError, ValueError) as error:
        location.fail(f"{reference!r}: {error}")
    path, _, name = reference.rpartition(":")
    if path.endswith(".py") and isinstance(made, FunctionTool) and made.reduced is None:
        made.reduced = (_function_again, (str(location.find_file(path)), name))
    return made


def _function_again(path: str, name: str) -> Tool:
    """Return a function of a file as a tool, in another process."""
    return ensure_tool(load_object(f"{path}:{name}"))


def class_tool(section: ClassSection, location: Location, load: Load) -> tuple[Tool | Toolset, Any]:
    """Create the tool or toolset of an entry in verl's form.

    Args:
        section: The entry.
        location: Its position.
        load: Function that runs a Python file.

    Returns:
        The tool or toolset, and its class.

    Raises:
        ConfigError: If the class is not found, is not a tool, or cannot be created.
    """
    named, schema = location.at("class_name"), section.tool_schema
    function = None if schema is None else schema.function
    if function is not None:
        _lint(function, location.at("tool_schema", "function", "parameters"))
    kind = find_object(section.class_name, named, load)
    if not inspect.isclass(kind):
        hint = f"; for a function write '- function: {section.class_name}'" if callable(kind) else ""
        named.fail(f"{section.class_name!r} is not a class{hint}; {_EXPECTED}")
    options = {key: value for key, value in section.config.items() if key != "type"}
    if issubclass(kind, Toolset):
        if function is not None:
            location.at("tool_schema").fail("a toolset provides the schemas of its tools; remove this one")
        return create(kind, options, location.at("config")), kind
    if callable(getattr(kind, "execute", None)) and not issubclass(kind, Tool):
        return _lifecycle_tool(kind, section, location), kind
    if missing := getattr(kind, "__abstractmethods__", None):
        named.fail(f"{kind.__name__} does not define {', '.join(sorted(missing))}")
    if not callable(getattr(kind, "run", None)):
        named.fail(f"{kind.__qualname__} is not a tool; {_EXPECTED}")
    stated = (
        function.model_dump(include={"name", "description", "strict"}, exclude_unset=True) if function else {}
    )
    takes = parameters_of(kind)[0].keys() - options.keys()
    given = {key: value for key, value in stated.items() if key in takes}
    try:
        tool = ensure_tool(create(kind, options, location.at("config"), given))
    except TypeError as error:
        named.fail(f"{kind.__name__}: {error}")
    if function is not None:
        _set_schema(tool, function, location.at("tool_schema"))
    elif not tool.name:
        location.fail(f"{kind.__name__} has no name; set one, or add a tool_schema")
    return tool, kind


def _lint(function: FunctionSection, location: Location) -> None:
    function.parameters, findings = lint(function.parameters)
    for finding in sorted(findings, key=lambda finding: not finding.is_error):
        where = location.at(*finding.path)
        if finding.is_error:
            where.fail(finding.message)
        warnings.warn(f"{where}: {finding.message}", stacklevel=2)


def _set_schema(tool: Tool, function: FunctionSection, location: Location) -> None:
    properties = cast("dict[str, Any]", function.parameters.get("properties") or {})
    for name in cast("list[str]", tool.input_schema.get("required") or []):
        if "properties" in tool.input_schema and name not in properties:
            where = location.at("function", "parameters")
            where.fail(
                f"the tool needs a property {name!r}, which is missing{did_you_mean(name, properties)}"
            )
    try:
        tool.name, tool.description = function.name, function.description or tool.description
        tool.input_schema = function.parameters
        tool.is_strict = tool.is_strict if function.strict is None else function.strict
    except AttributeError as error:
        location.fail(f"the schema of {type(tool).__name__} cannot be set ({error}); remove this one")


def _lifecycle_tool(kind: type[Any], section: ClassSection, location: Location) -> Tool:
    if missing := [name for name in _LIFECYCLE if not callable(getattr(kind, name, None))]:
        location.at("class_name").fail(
            f"{kind.__name__} has execute, but not {', '.join(missing)}; {_EXPECTED}"
        )
    stated = section.tool_schema and section.tool_schema.model_dump(exclude_none=True)
    schema = stated and OpenAIFunctionToolSchema.model_validate(stated)
    try:
        made = kind(config=section.config, tool_schema=schema)
        build = getattr(made, "get_openai_tool_schema", lambda: None)
        if schema is None and getattr(made, "tool_schema", None) is None and build() is None:
            raise NotImplementedError("no schema")
        return LifecycleTool(made)
    except MissingExtra:
        raise
    except Exception as error:  # of the user's code
        needs_schema = not schema and isinstance(error, AssertionError | NotImplementedError | AttributeError)
        hint = "; add a tool_schema, or return one from get_openai_tool_schema()" if needs_schema else ""
        raise ConfigError(
            f"{location}: cannot create {kind.__name__}: {error_with_place(error)}{hint}"
        ) from error


def server_toolsets(section: MCPSection, location: Location) -> dict[str, Toolset]:
    """Create a toolset for each MCP server of the files that a section names, without starting it.

    Args:
        section: The section.
        location: Its position.

    Returns:
        File and server name → toolset.

    Raises:
        ConfigError: If a file is missing or wrong, or an option is wrong.
    """
    from torchrl_agentic.tools.mcp import mcp_servers

    options = section.model_dump(exclude_unset=True)
    for key in ("mcp_servers_config_path", "tool_selected_list", "type", "num_workers"):
        options.pop(key, None)
    limits = {
        "rate_per_second": options.pop("rate_limit", None),
        "max_concurrent": options.pop("max_concurrent", None),
    }
    if "timeout" in options:
        options["request_timeout"] = options.pop("timeout")
    found: dict[str, Toolset] = {}
    named = location.at("mcp_servers_config_path")
    try:
        if limits != dict.fromkeys(limits):
            options["limiter"] = RateLimiter(**limits)
        for path in map(named.find_file, section.mcp_servers_config_path):
            servers = mcp_servers(path, **options)
            found |= {f"{path}, server {server!r}": toolset for server, toolset in servers.items()}
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        named.fail(str(error))
    return found


def find_object(reference: str, location: Location, load: Load = load_module) -> Any:
    """Return the object that a name refers to, or the equivalent of a class of verl.

    Args:
        reference: `package.module.Class`, `package.module:name` or `file.py:name`.
        location: Position of the name.
        load: Function that runs a Python file.

    Raises:
        ConfigError: If the object is not found.
    """
    if reference.startswith("verl.") and reference not in VERL and (hint := did_you_mean(reference, VERL)):
        location.fail(f"no class {reference!r}{hint}")
    found = VERL.get(reference, reference)
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        found = f"{location.find_file(place)}:{name}"
    try:
        return load_object(found, load=load)
    except ImportError as error:
        location.fail(f"{reference}: {error}")


@functools.lru_cache(maxsize=256)
def parameters_of(kind: Callable[..., Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the arguments of a callable with their type hints, and whether it takes others too."""
    try:
        found = inspect.signature(kind).parameters.values()
        hints = typing.get_type_hints(kind.__init__ if isinstance(kind, type) else kind)
    except (TypeError, ValueError, NameError):
        return {}, True
    named = {
        p.name: hints.get(p.name, Any) for p in found if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    return named, any(p.kind is p.VAR_KEYWORD for p in found)


def create(
    kind: Any, options: Mapping[str, Any], location: Location, given: Mapping[str, Any] | None = None
) -> Any:
    """Call a class with the options of a file, after checking their names and types.

    Args:
        kind: The class.
        options: Arguments from the file.
        location: Position of the options.
        given: Further arguments, which the file cannot set.

    Raises:
        ConfigError: If an option is unknown or has another type, or the class raises an error.
    """
    given = given or {}
    named, takes_others = parameters_of(kind)
    known = [name for name in named if name not in _OBJECTS and name not in given]
    for key, value in options.items():
        if key not in known and not takes_others:
            location.at(key).fail(unknown_key(key, known))
        if (wrong := _type_error(named.get(key, Any), value)) is not None:
            location.at(key).fail(f"{wrong}; got {shorten(value)}")
    try:
        return kind(**given, **options)
    except MissingExtra:
        raise
    except (TypeError, ValueError, OSError, ImportError) as error:
        about = [key for key in options if re.search(rf"\b{re.escape(key)}\b", str(error))]
        hint = "" if takes_others else f" (options: {', '.join(known) or 'none'})"
        raise ConfigError(f"{location.at(*about[:1])}: {error}{hint}") from error


def _type_error(hint: Any, value: Any) -> str | None:
    """Return the message for a value of another type; a list may stand for any collection."""
    try:
        _adapter(hint).validate_python(value, strict=not isinstance(value, list))
    except pydantic.ValidationError as error:
        return error.errors(include_url=False)[0]["msg"]
    except (pydantic.errors.PydanticUserError, TypeError):  # a type that pydantic does not know
        return None
    return None


_adapter = functools.lru_cache(maxsize=256)(pydantic.TypeAdapter[Any])
