"""Load the tools of a YAML file: files, sections and entries yield tools, toolsets, limits and settings.

Loading runs the code of the files and modules that a configuration names. Names never come from data.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torchrl_agentic.config import sections
from torchrl_agentic.config.document import Location, read_yaml
from torchrl_agentic.config.sections import read_section
from torchrl_agentic.errors import ConfigError
from torchrl_agentic.limits import ClusterRateLimiter, Limiter, RateLimiter
from torchrl_agentic.sandbox import Sandbox, default_sandbox
from torchrl_agentic.text import did_you_mean, nearest, shorten
from torchrl_agentic.tools.base import Toolset
from torchrl_agentic.tools.function import FunctionTool
from torchrl_agentic.tools.loaded_tools import LoadedTools, ToolSource
from torchrl_agentic.tools.loading import find_file, load_function_tools, load_module, load_object, load_tool
from torchrl_agentic.tools.native_tool import TOOLS, native_tool
from torchrl_agentic.tools.options import create
from torchrl_agentic.tools.selected_toolset import SelectedToolset, same_name, unknown_tool
from torchrl_agentic.tools.verl.create_tool import create_tool
from torchrl_agentic.tools.verl.equivalents import DEFAULTS
from torchrl_agentic.tools.verl.stated_schema import checked_parameters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Limit:
    tool: str
    limiter: Limiter
    location: Location


_Item = ToolSource | SelectedToolset | _Limit | dict[str, Any]
"""What a file, a section or an entry leads to; a dict holds settings of verl's `multi_turn`."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """State that all files of one configuration share; sandbox and modules are created at their first use."""

    sandbox: Callable[[], Sandbox] = field(default_factory=lambda: functools.cache(default_sandbox))
    load: Callable[[Path], ModuleType] = field(default_factory=lambda: functools.cache(load_module))
    seen: set[Path] = field(default_factory=set[Path])
    names: dict[str, tuple[object, str]] = field(default_factory=dict[str, tuple[object, str]])


def load_tools(path: str | Path) -> LoadedTools:
    """Return the tools and settings of a YAML file.

    Loading runs code: the file names classes and functions, which are imported. Treat it as a program.

    Args:
        path: The file.

    Raises:
        ConfigError: If the file has a mistake; the message names file and line.
        MissingExtra: If it names a tool whose extra is not installed.
        SandboxError: If it names a tool that needs a sandbox, and none works here.
    """
    data, location = read_yaml(path)
    return load_config_tools(read_section(sections.ToolsConfig, data, location), location)


def load_config_tools(config: sections.ToolsConfig, location: Location) -> LoadedTools:
    """Create the tools of a configuration that has been read or made in Python; see `load_tools`.

    Args:
        config: The configuration.
        location: Its root.
    """
    shared = _Shared(seen={location.path.resolve()} if location.path else set())
    items = list(_config_items(config, location, shared))
    sources: dict[str, list[ToolSource]] = {}
    limits: dict[str, _Limit] = {}
    for source in (item for item in items if isinstance(item, ToolSource)):
        sources.setdefault(source.tool.name, []).append(source)
    if duplicates := [same_name(name, found) for name, found in sources.items() if len(found) > 1]:
        raise ConfigError("\n".join(duplicates))
    toolsets = tuple(item for item in items if isinstance(item, SelectedToolset))
    for limit in (item for item in items if isinstance(item, _Limit)):
        if (first := limits.setdefault(limit.tool, limit)) is not limit:
            limit.location.fail(f"the limit of {limit.tool!r} is already set in {first.location.place}")
        if limit.tool not in sources:
            hint = "; set rate_limit of an MCP server in its config" if toolsets else ""
            limit.location.fail(unknown_tool(limit.tool, sources, "limit", hint))
    shared.names.update({name: (None, found[0].place) for name, found in sources.items()})
    stated = [item for item in items if isinstance(item, dict)]  # later ones replace earlier ones
    settings = dict(DEFAULTS if stated else {})
    for each in stated:
        settings.update(each)
    return LoadedTools(
        tools=tuple(found[0].tool for found in sources.values()),
        toolsets=toolsets,
        limits={name: limit.limiter for name, limit in limits.items()},
        sources={name: found[0] for name, found in sources.items()},
        tokenizer_options={name: settings[name] for name in DEFAULTS if stated},
        **{name: value for name, value in settings.items() if name not in DEFAULTS},
    )


def _config_items(config: sections.ToolsConfig, location: Location, shared: _Shared) -> Iterator[_Item]:
    """Yield the tools, limits and settings of a configuration; none if it is switched off."""
    for steps, section in config.inner_sections().items():
        if isinstance(section, sections.MultiTurnSection) and not section.enable:
            logger.warning("%s: false: the file's tools are not loaded", location.at(*steps, "enable"))
            return
    items = _tool_items(config, location, shared)
    yield from _selected(items, config.tool_selected_list, location)
    for name, arguments in config.limits.items():
        where = location.at("limits", name)
        kind = ClusterRateLimiter if "name" in arguments else RateLimiter
        yield _Limit(name, where.call(create, kind, arguments), where)


def _tool_items(config: sections.ToolsConfig, location: Location, shared: _Shared) -> Iterator[_Item]:
    for index, entry in enumerate(config.tools):
        yield from _entry_items(entry, location.at("tools", index), shared)
    yield from _file_items(config, location, shared)
    if config.mcp is not None:
        yield from _server_items(config.mcp, location.at("mcp"), shared)
    for steps, section in config.inner_sections().items():
        where = location.at(*steps)
        yield from _selected(_file_items(section, where, shared), section.tool_selected_list, where)
        if isinstance(section, sections.MultiTurnSection):
            yield section.settings(where)


def _selected(items: Iterable[_Item], names: Sequence[str] | None, location: Location) -> Iterable[_Item]:
    """Return the items with only the tools that the `tool_selected_list` of a section names."""
    if names is None:
        return items
    items, location = list(items), location.at("tool_selected_list")
    toolsets = [item for item in items if isinstance(item, SelectedToolset)]
    known = [item.tool.name for item in items if isinstance(item, ToolSource)]
    required = {name: location.at(index) for index, name in enumerate(names) if name not in known}
    if required and not toolsets:
        name, where = next(iter(required.items()))
        where.fail(unknown_tool(name, known, "select"))
    alone = {name: str(where) for name, where in required.items() if len(toolsets) == 1}
    kept = [item for item in items if not isinstance(item, ToolSource) or item.tool.name in names]
    return [item.select(names, alone) if isinstance(item, SelectedToolset) else item for item in kept]


def _file_items(section: sections.FilesSection, location: Location, shared: _Shared) -> Iterator[_Item]:
    """Yield the tools of the files that a section names, without files that have been read before."""
    for key in ("function_tool_path", "tools_config_file", "tool_config_path"):
        where = location.at(key)
        for name in getattr(section, key):
            if (path := where.find(find_file, name)) in shared.seen:
                continue
            shared.seen.add(path)
            if key == "function_tool_path":
                for tool in where.call(load_function_tools, path):
                    yield ToolSource(tool, where.place, tool.function)
            else:
                data, root = read_yaml(path)
                yield from _config_items(read_section(sections.ToolsConfig, data, root), root, shared)
    if section.mcp_servers_config_path:
        servers = sections.MCPSection(mcp_servers_config_path=section.mcp_servers_config_path)
        yield from _server_items(servers, location, shared)


def _server_items(section: sections.MCPSection, location: Location, shared: _Shared) -> Iterable[_Item]:
    """Return a toolset for each MCP server of the files that a section names, without starting it."""
    from torchrl_agentic.tools.mcp import mcp_servers

    keys = {"name_prefix", "sessions", "start_timeout", "max_result_bytes", "on_change", "fingerprints"}
    options = section.model_dump(exclude_unset=True, by_alias=True, include={"timeout", *keys})
    toolsets: list[SelectedToolset] = []
    where = location.at("mcp_servers_config_path")
    limits: Any = {"rate_per_second": section.rate_limit, "max_concurrent": section.max_concurrent}
    if limits != dict.fromkeys(limits):
        options["limiter"] = location.call(RateLimiter, **limits)
    for file in section.mcp_servers_config_path:
        path = where.find(find_file, file)
        for name, toolset in where.call(mcp_servers, path, **options).items():
            source = f"{location.place} ({path}, server {name!r})"
            toolsets.append(SelectedToolset(toolset, source, shared.names))
    names = section.tool_selected_list
    return _selected(toolsets, names and [section.name_prefix + name for name in names], location)


def _entry_items(entry: Any, location: Location, shared: _Shared) -> Iterable[_Item]:
    """Return the tools of one entry of `tools`."""
    if not isinstance(entry, str | dict) or not entry:
        location.fail(f"expected the name of a tool, 'name: {{options}}' or 'class_name: …'; got {entry!r}")
    fields = cast("dict[str, Any]", {entry: None} if isinstance(entry, str) else entry)
    if fields.keys() & {"class_name", "config", "tool_schema"} or nearest("class_name", fields) is not None:
        return _class_items(fields, location, shared)
    (kind, options), *others = fields.items()
    where, known = location.at(kind), ("class_name", "function", "mcp", *TOOLS)
    if kind not in known:
        hint = f"; a function is 'function: {kind}'" if ".py:" in kind else did_you_mean(kind, known)
        location.fail(f"no tool {kind!r}; expected one of {', '.join(known)}{hint}")
    if others:
        hint = f"indent the options of {kind!r} further, or begin another tool with '- '"
        location.at(others[0][0]).fail(f"unexpected key {others[0][0]!r} next to {kind!r}; {hint}")
    if kind == "mcp":
        return _server_items(read_section(sections.MCPSection, options, where), where, shared)
    if kind != "function":
        tool = where.call(native_tool, kind, options, shared.sandbox)
    elif isinstance(options, str):
        tool = where.find(load_tool, options, load=shared.load)
    else:
        where.fail(f"expected 'file.py:name' or 'package.module:name'; got {shorten(options)}")
    return [ToolSource(tool, location.place, tool.function if isinstance(tool, FunctionTool) else type(tool))]


def _class_items(fields: Mapping[str, Any], location: Location, shared: _Shared) -> Iterable[_Item]:
    """Return the tool or toolsets of an entry in verl's form."""
    config = cast("Any", fields.get("config"))
    kind = config.get("type") if hasattr(config, "get") else None
    if kind == "mcp" or (kind is None and "mcp" in fields):
        servers = read_section(sections.MCPClassSection, fields, location)
        section = servers.mcp.model_copy(update=servers.config.model_dump(exclude_unset=True))
        return _server_items(section, location.at("mcp"), shared)
    section = read_section(sections.ClassSection, fields, location)
    function = section.tool_schema and section.tool_schema.function
    if function is not None:
        where = location.at("tool_schema", "function", "parameters")
        function.parameters, remarks = where.call(checked_parameters, function.parameters)
        for path, remark in remarks:
            warnings.warn(f"{where.at(*path)}: {remark}", stacklevel=2)
    target = location.at("class_name").find(load_object, section.class_name, load=shared.load)
    options = section.config.model_dump(exclude_unset=True)
    made = location.call(create_tool, target, options, function and function.model_dump(exclude_none=True))
    source = ToolSource(cast("Any", made), location.place, target)
    return [SelectedToolset(made, str(source), shared.names) if isinstance(made, Toolset) else source]
