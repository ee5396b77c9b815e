"""`load_tools`: the tools that a YAML file names, from wherever they come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_agentic.limits import Limiter
from torchrl_agentic.tool_config.collect import Collection, Source
from torchrl_agentic.tool_config.models import ToolsConfig
from torchrl_agentic.tool_config.spot import Spot
from torchrl_agentic.tools.base import Tool, Toolset


@dataclass(frozen=True, slots=True)
class LoadedTools:
    """The tools that a configuration names, in its order, and what it says about a rollout with them.

    Nothing is set up yet. `ToolCompose.from_config` takes it, and applies what concerns tools; the other
    fields are arguments of the transforms behind it.

    Attributes:
        tools: The tools.
        toolsets: Not opened; see `ToolCompose.add_toolset`.
        limits: Tool name → limiter, for `ToolCompose(rate_limits=…)`.
        sources: Tool name → the place it comes from.
        parser: Verl's `multi_turn.format`.
        max_calls_per_turn: Verl's `multi_turn.max_parallel_calls`.
        max_turns: Verl's `max_assistant_turns`, for `EndTrajectory(max_turns=…)`.
        max_user_turns: Verl's key of that name, for `UserSimulator(max_turns=…)`.
        interaction_config_path: Verl's key of that name, for `load_interactions`.
        tokenizer_options: Keyword arguments of `TurnTokenizer`: the bound on tool results, the side that it
            keeps, the sanity check and the inference template. Empty unless the file has a section
            `multi_turn` or `actor_rollout_ref`; verl's defaults for what these leave out.
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
        """Return the transforms that apply what `ToolCompose` cannot, as they would be written in Python."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.tokenizer_options.items())
        found = {
            f"EndTrajectory(max_turns={self.max_turns})": self.max_turns,
            f"TurnTokenizer({options})": self.tokenizer_options,
            f"UserSimulator(max_turns={self.max_user_turns})": self.max_user_turns,
            f"UserSimulator(load_interactions({str(self.interaction_config_path)!r}))": (
                self.interaction_config_path
            ),
        }
        return [call for call, value in found.items() if value]


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
        found.max_turns,
        found.max_user_turns,
        found.interaction_config_path,
        found.tokenizer_options,
    )
