"""Going through a configuration, and through the files that it names, for tools."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_agentic.limits import ClusterRateLimiter, Limiter, RateLimiter
from torchrl_agentic.tool_config.classes import VERL_MCP, known_class, make_of_class
from torchrl_agentic.tool_config.entries import kind_of, read_entry, read_schema, read_section, read_servers
from torchrl_agentic.tool_config.lines import read_yaml
from torchrl_agentic.tool_config.mistakes import described, nearest
from torchrl_agentic.tool_config.models import (
    ClassSection,
    MCPSection,
    MultiTurnSection,
    ToolKwargsSection,
    ToolsConfig,
    foreign_keys,
)
from torchrl_agentic.tool_config.native import Workplace, make_native
from torchrl_agentic.tool_config.options import call
from torchrl_agentic.tool_config.references import References, defined_at
from torchrl_agentic.tool_config.servers import SETTINGS, open_servers
from torchrl_agentic.tool_config.spot import Spot
from torchrl_agentic.tool_config.toolsets import ConfiguredToolset, Names, Selection
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.function import FunctionTool
from torchrl_agentic.tools.loading import load_function_tools

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tool comes from. place: in the configuration. target: the class or function behind it."""

    tool: Tool
    place: str
    target: Any

    @property
    def defined(self) -> str:
        """Say where its code begins, as `file:line`."""
        return defined_at(self.target)

    def __str__(self) -> str:
        return f"{self.place} ({self.defined})"


class Collection:
    """What has been found so far in a configuration and in the files that it names.

    The attributes from `parser` on hold what sections `multi_turn` say; see `LoadedTools`.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.toolsets: list[ConfiguredToolset] = []
        self.limits: dict[str, Limiter] = {}
        self.parser: str | None = None
        self.max_calls_per_turn: int | None = None
        self.max_turns: int | None = None
        self.max_user_turns: int | None = None
        self.interaction_config_path: Path | None = None
        self.tokenizer_options: dict[str, Any] = {}
        self._names = Names()
        self._references, self._workplace = References(), Workplace()
        self._limit_spots: dict[str, Spot] = {}
        self._selections: list[Selection] = []
        self._reading: list[Path] = []
        self._read: set[Path] = set()

    def finish(self) -> None:
        """See that what was found goes together.

        Raises:
            ConfigError: tools of one name, or a limit for a tool that is not there.
        """
        self._names.claim(self, [(source.tool.name, source) for source in self.sources])
        known = [source.tool.name for source in self.sources]
        for name, spot in self._limit_spots.items():
            if name not in known:
                servers = (
                    "; for those of an MCP server, say rate_limit in its config" if self.toolsets else ""
                )
                spot.fail(f"a limit for {name!r}{nearest(name, known)} (tools: {', '.join(known)}{servers})")

    def add_file(self, path: Path) -> None:
        """Add what a file names; it is read once, whoever names it."""
        document = read_yaml(path)
        path = path.resolve()
        spot = Spot(path.parent, document)
        if path in self._read:
            return
        data: object = document.data
        if not isinstance(data, dict):
            spot.fail(f"expected keys, such as 'tools:'; got {described(data)}")
        self._read.add(path)
        self.add(read_section(ToolsConfig, data, spot), spot)

    def add(self, config: ToolsConfig, spot: Spot) -> None:
        """Add what a configuration names. spot: its root."""
        if spot.document is not None:
            self._reading.append(spot.document.path.resolve())
        self._add(config, spot)
        if spot.document is not None:
            self._reading.pop()

    def _add(self, config: ToolsConfig, spot: Spot) -> None:
        self._list_foreign_keys(type(config), spot)
        sections = [(spot.at(*steps), section) for steps, section in config.multi_turn_sections.items()]
        for where, section in sections:
            if not section.enable:
                logger.warning("%s: false: the file's tools are not loaded", where.at("enable"))
                return
        with self._selected(config.tool_selected_list, spot.at("tool_selected_list")):
            for index, entry in enumerate(config.tools):
                self._add_entry(entry, spot.at("tools", index))
            self._add_paths(config, spot)
            if config.mcp is not None:
                self._add_servers(config.mcp, {}, spot.at("mcp"), spot)
            self._add_tool_kwargs(config.tool_kwargs, spot.at("tool_kwargs"))
            if config.actor_rollout_ref is not None and config.actor_rollout_ref.rollout is not None:
                inner = spot.at("actor_rollout_ref", "rollout", "tool_kwargs")
                self._add_tool_kwargs(config.actor_rollout_ref.rollout.tool_kwargs, inner)
            for where, section in sections:
                self._add_multi_turn(section, where)
        for name, arguments in config.limits.items():
            self._add_limit(name, arguments, spot.at("limits", name))

    def _list_foreign_keys(self, kind: type[ToolsConfig], spot: Spot) -> None:
        """Log once which keys of a trainer's configuration have no meaning here."""
        if spot.document is not None and (names := list(foreign_keys(kind, spot.document.data))):
            logger.warning("%s: keys of the trainer without a meaning here: %s", spot, ", ".join(names))

    @contextmanager
    def _selected(self, names: Sequence[str] | None, spot: Spot) -> Generator[None]:
        """Keep only what is selected of what is added meanwhile."""
        if names is None:
            yield
            return
        begin, selection = len(self.sources), Selection(names, spot)
        self._selections.append(selection)
        yield
        self._selections.pop()
        wanted = selection.wanted(source.tool.name for source in self.sources[begin:])
        self.sources[begin:] = [source for source in self.sources[begin:] if source.tool.name in wanted]
        selection.check()

    def _add_paths(self, config: ToolsConfig | MultiTurnSection, spot: Spot) -> None:
        for name in config.function_tool_path:
            self._add_functions(name, spot.at("function_tool_path"))
        self._add_files(config.tool_config_path, spot.at("tool_config_path"))
        if config.mcp_servers_config_path:
            section = MCPSection(mcp_servers_config_path=config.mcp_servers_config_path)
            self._add_servers(section, {}, spot, spot)

    def _add_files(self, names: Sequence[str], spot: Spot) -> None:
        for name in names:
            path = spot.path(name)
            if path in self._reading:
                chain = " → ".join(map(str, [*self._reading[self._reading.index(path) :], path]))
                spot.fail(f"files that name each other: {chain}")
            self.add_file(path)

    def _add_tool_kwargs(self, section: ToolKwargsSection | None, spot: Spot) -> None:
        if section is not None:
            self._add_files(section.tools_config_file, spot.at("tools_config_file"))
            self._add_files(section.tool_config_path, spot.at("tool_config_path"))

    def _add_multi_turn(self, section: MultiTurnSection, spot: Spot) -> None:
        """Add the tools of a section; its settings go before those of the files that it names."""
        with self._selected(section.tool_selected_list, spot.at("tool_selected_list")):
            self._add_paths(section, spot)
        self.parser = section.format or self.parser
        self.max_calls_per_turn = section.max_parallel_calls or self.max_calls_per_turn
        self.max_turns = section.max_assistant_turns or section.max_turns or self.max_turns
        self.max_user_turns = section.max_user_turns or self.max_user_turns
        if section.interaction_config_path:
            where = spot.at("interaction_config_path")
            self.interaction_config_path = where.path(section.interaction_config_path)
        self.tokenizer_options = section.tokenizer_options(self.tokenizer_options)
        kept = {"left": "head", "right": "tail"}.get(section.tool_response_truncate_side or "")
        if kept:
            logger.warning(
                "%s: keeps the %s of a long result, as in verl up to 0.7; later releases keep the other end",
                spot.at("tool_response_truncate_side"),
                kept,
            )

    def _add_functions(self, name: str, spot: Spot) -> None:
        path = spot.path(name)
        if path in self._read:
            return
        self._read.add(path)
        try:
            made = load_function_tools(path)
        except (ImportError, ValueError, TypeError) as error:
            spot.fail(str(error))
        self.sources.extend(Source(tool, spot.place, tool.function) for tool in made)

    def _add_entry(self, entry: Any, spot: Spot) -> None:
        match read_entry(entry, spot):
            case ClassSection() as section:
                self._add_class(section, spot)
            case "function", str(reference):
                self._add_tool(self._references.function_tool(reference, spot.at("function")), spot)
            case "function", other:
                spot.at("function").fail(
                    f"expected 'file.py:name' or 'package.module:name'; got {described(other)}"
                )
            case "mcp", options:
                inner = spot.at("mcp")
                section, settings = read_servers(options, inner, SETTINGS)
                self._add_servers(section, settings, inner, inner)
            case kind, options:
                named = spot.at(kind) if isinstance(entry, dict) else spot
                self._add_tool(make_native(kind, options, named, self._workplace), spot)

    def _add_tool(self, tool: Tool, spot: Spot, target: Any = None) -> None:
        behind = tool.function if isinstance(tool, FunctionTool) else type(tool)
        self.sources.append(Source(tool, spot.place, target or behind))

    def _add_class(self, section: ClassSection, spot: Spot) -> None:
        if kind_of(section, spot) == "mcp":
            self._add_mcp_entry(section, spot)
            return
        schema = section.tool_schema
        if schema is not None:
            schema, notes = read_schema(schema, spot.at("tool_schema"))
            for note in notes:
                _note(note)
        named = spot.at("class_name")
        kind, _ = self._references.find(known_class(section.class_name, named), named)
        made = make_of_class(kind, section.config, schema, spot)
        if isinstance(made, Toolset):
            self._add_toolset(made, f"{spot.place} ({defined_at(kind)})")
        else:
            self._add_tool(made, spot, kind)

    def _add_mcp_entry(self, section: ClassSection, spot: Spot) -> None:
        if section.class_name not in VERL_MCP:
            spot.at("class_name").fail(
                f"no class of your own for tools of MCP servers; got {section.class_name!r}, expected one of "
                f"{', '.join(VERL_MCP)}. To change what such tools answer, wrap them"
            )
        if section.mcp is None:
            spot.fail("an entry of type mcp has a section 'mcp: {mcp_servers_config_path: servers.json}'")
        if section.tool_schema is not None:
            spot.at("tool_schema").fail("MCP servers say themselves what their tools take; leave it out")
        self._add_servers(section.mcp, section.config, spot.at("mcp"), spot.at("config"))

    def _add_servers(
        self, section: MCPSection, config: Mapping[str, Any], spot: Spot, config_spot: Spot
    ) -> None:
        names, own = section.tool_selected_list, []
        if names is not None:
            shown = [section.name_prefix + name for name in names]
            own = [Selection(shown, spot.at("tool_selected_list"))]
        for source, toolset in open_servers(section, config, spot, config_spot).items():
            self._add_toolset(toolset, f"{spot.place} ({source})", own)

    def _add_toolset(self, toolset: Toolset, source: str, own: Sequence[Selection] = ()) -> None:
        selections = [*own, *self._selections]
        self.toolsets.append(ConfiguredToolset(toolset, source, self._names, selections))

    def _add_limit(self, name: str, arguments: Mapping[str, Any], spot: Spot) -> None:
        if name in self._limit_spots:
            spot.fail(f"a limit for {name!r} is set already: {self._limit_spots[name].place}")
        kind = ClusterRateLimiter if "name" in arguments else RateLimiter
        self._limit_spots[name] = spot
        self.limits[name] = call(kind, arguments, lambda key: str(spot.at(key) if key else spot))


def _note(words: str) -> None:
    warnings.warn(words, stacklevel=2)
