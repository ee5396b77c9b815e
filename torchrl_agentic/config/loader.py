"""Load the tools of a YAML file: each file and section becomes a `Part`, and parts are joined."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torchrl_agentic.config.document import ConfigError, Location, read_yaml
from torchrl_agentic.config.sections import (
    VERL_DEFAULTS,
    ClassSection,
    FilesSection,
    MCPSection,
    MCPSettings,
    MultiTurnSection,
    ToolsConfig,
    read_section,
)
from torchrl_agentic.config.sources import class_tool, create, function_tool, native_tool, server_toolsets
from torchrl_agentic.limits import ClusterRateLimiter, Limiter, RateLimiter
from torchrl_agentic.sandbox import Sandbox, default_sandbox
from torchrl_agentic.text import did_you_mean, nearest
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.function import FunctionTool, place_of
from torchrl_agentic.tools.loading import load_function_tools, load_module
from torchrl_agentic.tools.tool_adapter import ensure_tool

logger = logging.getLogger(__name__)
_MCP_CLASSES = ("verl.tools.mcp_base_tool.MCPBaseTool", "verl.tools.mcp_search_tool.MCPSearchTool")


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of a tool.

    Attributes:
        tool: The tool.
        place: The `file:line` in the configuration that names it.
        target: The class or function behind it.
    """

    tool: Tool
    place: str
    target: Any

    @property
    def defined(self) -> str:
        """The `file:line` where the code begins."""
        return place_of(self.target)

    def __str__(self) -> str:
        return f"{self.place} ({self.defined})"


@dataclass(frozen=True, slots=True)
class LoadedTools:
    """The tools of a configuration in its order, and its settings for a rollout with them; nothing is set up.

    `ToolCompose.from_config` applies what concerns tools. The other fields are arguments of other transforms.

    Attributes:
        tools: The tools.
        toolsets: Toolsets, not opened; see `ToolCompose.add_toolset`.
        limits: Tool name → limiter, for `ToolCompose(rate_limits=…)`.
        sources: Tool name → its origin.
        parser: Verl's `multi_turn.format`.
        max_calls_per_turn: Verl's `multi_turn.max_parallel_calls`.
        max_turns: Verl's `max_assistant_turns`, for `EndTrajectory(max_turns=…)`.
        max_user_turns: Verl's key of this name, for `UserSimulator(max_turns=…)`.
        interaction_config_path: Verl's key of this name, for `load_interactions`.
        tokenizer_options: Arguments of `TurnTokenizer`. Empty unless the file has a section `multi_turn` or
            `actor_rollout_ref`; verl's defaults for the keys that these leave out.
    """

    tools: tuple[Tool, ...] = ()
    toolsets: tuple[Toolset, ...] = ()
    limits: Mapping[str, Limiter] = field(default_factory=dict[str, Limiter])
    sources: Mapping[str, Source] = field(default_factory=dict[str, Source])
    parser: str | None = None
    max_calls_per_turn: int | None = None
    max_turns: int | None = None
    max_user_turns: int | None = None
    interaction_config_path: Path | None = None
    tokenizer_options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def beyond_tools(self) -> list[str]:
        """Return the transforms that apply what `ToolCompose` cannot, as Python calls."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.tokenizer_options.items())
        path = self.interaction_config_path
        found = {
            f"EndTrajectory(max_turns={self.max_turns})": self.max_turns,
            f"TurnTokenizer({options})": options,
            f"UserSimulator(max_turns={self.max_user_turns})": self.max_user_turns,
            f"UserSimulator(load_interactions({str(path)!r}))": path,
        }
        return [call for call, is_set in found.items() if is_set]


@dataclass(eq=False)
class ConfiguredToolset(Toolset):
    """A toolset that offers its selected tools, under names that no other source of the configuration uses.

    Attributes:
        toolset: The toolset. `teardown` closes it, also after a `setup` that raised.
        source: Its place in the configuration.
        names: Tool name → its owner and place, shared by all sources of the configuration.
        wanted: Names of the selected tools, or None for all.
        required: Selected names that only this toolset can have → their positions.
    """

    toolset: Toolset
    source: str
    names: dict[str, tuple[object, str]] = field(repr=False)
    wanted: frozenset[str] | None = None
    required: Mapping[str, Location] = field(default_factory=dict[str, Location])

    @property
    def revision(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  read only
        """The revision of the toolset."""
        return getattr(self.toolset, "revision", 0)

    @property
    def world(self) -> Toolset | None:
        """The world of the toolset."""
        return self.toolset.world

    async def setup(self) -> Sequence[Tool]:
        """Open the toolset and return its selected tools.

        Raises:
            ConfigError: If a selected tool does not exist, or another source has a tool of the same name.
        """
        offered = [ensure_tool(tool) for tool in await self.toolset.setup()]
        known = [tool.name for tool in offered]
        for name, location in self.required.items():
            if name not in known:
                location.fail(_no_tool(name, known, "select"))
        chosen = self._chosen(offered)
        others = {name: place for name, (owner, place) in self.names.items() if owner is not self}
        if taken := [tool.name for tool in chosen if tool.name in others]:
            raise ConfigError("\n".join(_duplicate(name, [others[name], self.source]) for name in taken))
        self.names.update({tool.name: (self, self.source) for tool in chosen})
        return chosen

    async def teardown(self) -> None:
        """Close the toolset."""
        await self.toolset.teardown()

    async def refresh(self) -> Sequence[Tool]:
        """Return the selected tools of those that the toolset offers now."""
        return self._chosen([ensure_tool(tool) for tool in await self.toolset.refresh()])

    def select(self, names: Iterable[str], required: Mapping[str, Location]) -> ConfiguredToolset:
        """Return a toolset that offers only some of the tools.

        Args:
            names: Names of the tools to keep.
            required: Names that this toolset must offer → their positions.
        """
        wanted = frozenset(names) if self.wanted is None else self.wanted & frozenset(names)
        return replace(self, wanted=wanted, required={**self.required, **required})

    def _chosen(self, tools: Sequence[Tool]) -> list[Tool]:
        return [tool for tool in tools if self.wanted is None or tool.name in self.wanted]


@dataclass(frozen=True, slots=True)
class _Shared:
    """State that all files of one configuration share; sandbox and modules are created at their first use."""

    sandbox: Callable[[], Sandbox] = field(default_factory=lambda: functools.cache(default_sandbox))
    load: Callable[[Path], ModuleType] = field(default_factory=lambda: functools.cache(load_module))
    seen: set[Path] = field(default_factory=set[Path])
    names: dict[str, tuple[object, str]] = field(default_factory=dict[str, tuple[object, str]])


@dataclass(frozen=True, slots=True)
class _Part:
    """Tools and settings of a file, a section or an entry. `tokenizer` is None where verl has no say."""

    sources: Sequence[Source] = ()
    toolsets: Sequence[ConfiguredToolset] = ()
    limits: Sequence[tuple[str, Limiter, Location]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tokenizer: Mapping[str, Any] | None = None


def load_tools(path: str | Path) -> LoadedTools:
    """Create the tools that a YAML file names.

    Loading runs code: the file names classes and functions, which are imported. Treat it as a program.

    Args:
        path: The file.

    Returns:
        The tools and settings.

    Raises:
        ConfigError: If the file has a mistake; the message names file and line.
        MissingExtra: If it names a tool whose extra is not installed.
        SandboxError: If it names a tool that needs a sandbox, and none works here.
    """
    data, location = read_yaml(path)
    return load_config_tools(read_section(ToolsConfig, data, location), location)


def load_config_tools(config: ToolsConfig, location: Location) -> LoadedTools:
    """Create the tools of a configuration that has been read or made in Python; see `load_tools`.

    Args:
        config: The configuration.
        location: Its root.
    """
    shared = _Shared()
    if location.path is not None:
        shared.seen.add(location.path.resolve())
    part = _config_part(config, location, shared)
    places: dict[str, list[Source]] = {}
    for source in part.sources:
        places.setdefault(source.tool.name, []).append(source)
    if duplicates := [_duplicate(name, found) for name, found in places.items() if len(found) > 1]:
        raise ConfigError("\n".join(duplicates))
    limited: dict[str, Location] = {}
    for name, _, where in part.limits:
        if name in limited:
            where.fail(f"the limit of {name!r} is already set in {limited[name].place}")
        if name not in places:
            hint = "; set rate_limit of an MCP server in its config" if part.toolsets else ""
            where.fail(_no_tool(name, places, "limit", hint))
        limited[name] = where
    shared.names.update({name: (None, found[0].place) for name, found in places.items()})
    return LoadedTools(
        tools=tuple(source.tool for source in part.sources),
        toolsets=tuple(part.toolsets),
        limits={name: limiter for name, limiter, _ in part.limits},
        sources={name: found[0] for name, found in places.items()},
        tokenizer_options={} if part.tokenizer is None else {**VERL_DEFAULTS, **part.tokenizer},
        **part.settings,
    )


def _no_tool(name: str, known: Iterable[str], purpose: str, hint: str = "") -> str:
    return f"no tool {name!r} to {purpose}{did_you_mean(name, known)} (tools: {', '.join(known)}{hint})"


def _duplicate(name: str, places: Sequence[object]) -> str:
    return "\n  ".join([f"{len(places)} tools are named {name!r}; rename all but one:", *map(str, places)])


def _joined(parts: Iterable[_Part]) -> _Part:
    """Return the union of parts; later settings replace earlier ones."""
    parts = list(parts)
    tokenizers = [part.tokenizer for part in parts if part.tokenizer is not None]
    return _Part(
        [source for part in parts for source in part.sources],
        [toolset for part in parts for toolset in part.toolsets],
        [limit for part in parts for limit in part.limits],
        dict(chain.from_iterable(part.settings.items() for part in parts)),
        dict(chain.from_iterable(options.items() for options in tokenizers)) if tokenizers else None,
    )


def _selected(part: _Part, names: Sequence[str] | None, location: Location) -> _Part:
    """Return the part with only the selected tools."""
    if names is None:
        return part
    known = [source.tool.name for source in part.sources]
    required = {name: location.at(index) for index, name in enumerate(names) if name not in known}
    if required and not part.toolsets:
        name, where = next(iter(required.items()))
        where.fail(_no_tool(name, known, "select"))
    alone = required if len(part.toolsets) == 1 else {}
    sources = [source for source in part.sources if source.tool.name in names]
    return replace(part, sources=sources, toolsets=[each.select(names, alone) for each in part.toolsets])


def _config_part(config: ToolsConfig, location: Location, shared: _Shared) -> _Part:
    sections = {location.at(*steps): section for steps, section in config.multi_turn_sections().items()}
    for where, section in sections.items():
        if not section.enable:
            logger.warning("%s: false: the file's tools are not loaded", where.at("enable"))
            return _Part()
    parts = [_entry_part(entry, location.at("tools", n), shared) for n, entry in enumerate(config.tools)]
    parts.append(_files_part(config, location, shared))
    if config.mcp is not None:
        parts.append(_servers_part(config.mcp, location.at("mcp"), shared))
    rollout = config.actor_rollout_ref and config.actor_rollout_ref.rollout
    for owner, steps in ((config, ()), (rollout, ("actor_rollout_ref", "rollout"))):
        if owner and owner.tool_kwargs:
            parts.append(_files_part(owner.tool_kwargs, location.at(*steps, "tool_kwargs"), shared))
    parts += [_multi_turn_part(section, where, shared) for where, section in sections.items()]
    part = _selected(_joined(parts), config.tool_selected_list, location.at("tool_selected_list"))
    limits: list[tuple[str, Limiter, Location]] = []
    for name, arguments in config.limits.items():
        where = location.at("limits", name)
        kind = ClusterRateLimiter if "name" in arguments else RateLimiter
        limits.append((name, create(kind, arguments, where), where))
    return _joined([part, _Part(limits=limits)])


def _multi_turn_part(section: MultiTurnSection, location: Location, shared: _Shared) -> _Part:
    """Return the tools of verl's `multi_turn`; its settings replace those of the files that it names."""
    files = _files_part(section, location, shared)
    part = _selected(files, section.tool_selected_list, location.at("tool_selected_list"))
    settings, stated = section.settings(), section.tokenizer_options()
    if section.interaction_config_path:
        where = location.at("interaction_config_path")
        settings["interaction_config_path"] = where.find_file(section.interaction_config_path)
    if kept := {"left": "head", "right": "tail"}.get(section.tool_response_truncate_side or ""):
        where = location.at("tool_response_truncate_side")
        message = "%s: keeps the %s of a long result, as verl up to 0.7; later releases keep the other end"
        logger.warning(message, where, kept)
    return _joined([part, _Part(settings=settings, tokenizer=stated)])


def _files_part(section: FilesSection, location: Location, shared: _Shared) -> _Part:
    """Return the tools of the files that a section names, without files that have been read before."""
    parts: list[_Part] = []
    for name in section.function_tool_path:
        where = location.at("function_tool_path")
        if (path := where.find_file(name)) not in shared.seen:
            shared.seen.add(path)
            try:
                made = load_function_tools(path)
            except (ImportError, ValueError, TypeError) as error:
                where.fail(str(error))
            parts.append(_Part([Source(tool, where.place, tool.function) for tool in made]))
    for key in ("tools_config_file", "tool_config_path"):
        for name in getattr(section, key):
            if (path := location.at(key).find_file(name)) not in shared.seen:
                shared.seen.add(path)
                data, root = read_yaml(path)
                parts.append(_config_part(read_section(ToolsConfig, data, root), root, shared))
    if section.mcp_servers_config_path:
        servers = MCPSection(mcp_servers_config_path=section.mcp_servers_config_path)
        parts.append(_servers_part(servers, location, shared))
    return _joined(parts)


def _servers_part(section: MCPSection, location: Location, shared: _Shared) -> _Part:
    found = server_toolsets(section, location).items()
    part = _Part(toolsets=[_toolset(made, location, source, shared) for source, made in found])
    names = section.tool_selected_list
    shown = None if names is None else [section.name_prefix + name for name in names]
    return _selected(part, shown, location.at("tool_selected_list"))


def _toolset(toolset: Toolset, location: Location, source: str, shared: _Shared) -> ConfiguredToolset:
    return ConfiguredToolset(toolset, f"{location.place} ({source})", shared.names)


def _entry_part(entry: Any, location: Location, shared: _Shared) -> _Part:
    """Return the tools of one entry of `tools`."""
    if not isinstance(entry, str | dict) or not entry:
        location.fail(f"expected the name of a tool, 'name: {{options}}' or 'class_name: …'; got {entry!r}")
    fields = cast("dict[str, Any]", {entry: None} if isinstance(entry, str) else entry)
    if fields.keys() & {"class_name", "config", "tool_schema"} or nearest("class_name", fields) is not None:
        return _class_part(read_section(ClassSection, fields, location), location, shared)
    (kind, options), *others = fields.items()
    if others:
        message = f"unexpected key {others[0][0]!r} next to {kind!r}; indent the options of {kind!r} further"
        location.at(others[0][0]).fail(f"{message}, or begin another tool with '- '")
    if kind == "mcp":
        section = read_section(MCPSection, options, location.at("mcp"))
        return _servers_part(section, location.at("mcp"), shared)
    if kind == "function":
        tool = function_tool(options, location.at("function"), shared.load)
    else:
        tool = native_tool(kind, options, location, shared.sandbox)
    target = tool.function if isinstance(tool, FunctionTool) else type(tool)
    return _Part([Source(tool, location.place, target)])


def _class_part(section: ClassSection, location: Location, shared: _Shared) -> _Part:
    kind = section.config.get("type") or ("mcp" if section.mcp else "native")
    if kind not in ("native", "mcp"):
        hint = did_you_mean(kind, ("native", "mcp"))
        location.at("config", "type").fail(f"unknown type {kind!r}; expected native or mcp{hint}")
    if kind == "native":
        if section.mcp is not None:
            location.at("mcp").fail("an entry with 'mcp' is of type mcp; write 'config: {type: mcp}'")
        made, target = class_tool(section, location, shared.load)
        if isinstance(made, Toolset):
            found = Source(cast("Any", made), location.place, target)
            return _Part(toolsets=[_toolset(made, location, found.defined, shared)])
        return _Part([Source(made, location.place, target)])
    if section.class_name not in _MCP_CLASSES:
        expected = f"expected one of {', '.join(_MCP_CLASSES)}; wrap the tools to change their results"
        location.at("class_name").fail(f"{section.class_name!r} cannot run MCP tools; {expected}")
    if section.mcp is None:
        location.fail("missing 'mcp: {mcp_servers_config_path: servers.json}'")
    if section.tool_schema is not None:
        location.at("tool_schema").fail("MCP servers provide the schemas of their tools; remove this one")
    settings = read_section(MCPSettings, section.config, location.at("config"))
    servers = section.mcp.model_copy(update=settings.model_dump(exclude_unset=True))
    return _servers_part(servers, location.at("mcp"), shared)
