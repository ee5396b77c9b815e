"""`load_tools`: the tools that a YAML file names, from wherever they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchrl_agentic.limits import Limiter
from torchrl_agentic.tool import Tool, Toolset
from torchrl_agentic.tool_config.collect import Collection, Source
from torchrl_agentic.tool_config.models import ToolsConfig
from torchrl_agentic.tool_config.spot import Spot


@dataclass(frozen=True, slots=True)
class LoadedTools:
    """What a configuration names, in its order; nothing is set up yet.

    toolsets: not opened; see `ToolCompose.add_toolset`. limits: for `rate_limits=`. sources: tool → where it
    comes from. parser, max_calls_per_turn: what verl's `multi_turn` says of them.
    """

    tools: tuple[Tool, ...] = ()
    toolsets: tuple[Toolset, ...] = ()
    limits: Mapping[str, Limiter] = field(default_factory=dict[str, Limiter])
    sources: Mapping[str, Source] = field(default_factory=dict[str, Source])
    parser: str | None = None
    max_calls_per_turn: int | None = None


def load_tools(path: str | Path) -> LoadedTools:
    """Make the tools that a YAML file names.

    The file runs code: classes and functions that it names are imported. Take such files from nobody whose
    programs you would not run, and put nothing of a data set into them.

    Raises:
        ConfigError: it does not say what it should; each mistake with file and line.
        MissingExtra: it names something whose extra is not installed.
        SandboxError: it names a tool that needs a sandbox, and none works here.
    """
    found = Collection()
    found.add_file(Path(path))
    return _loaded(found)


def load_config_tools(config: ToolsConfig, spot: Spot) -> LoadedTools:
    """Make the tools that a configuration names; see `load_tools`. spot: its root."""
    found = Collection()
    found.add(config, spot)
    return _loaded(found)


def _loaded(found: Collection) -> LoadedTools:
    found.finish()
    return LoadedTools(
        tuple(source.tool for source in found.sources),
        tuple(found.toolsets),
        found.limits,
        {source.tool.name: source for source in found.sources},
        found.parser,
        found.max_calls_per_turn,
    )
