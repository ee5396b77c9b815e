"""`LoadedTools`: what a configuration leads to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrl_agentic.limits import Limiter
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.function import place_of


@dataclass(frozen=True, slots=True)
class ToolSource:
    """The origin of a tool of a configuration.

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
    sources: Mapping[str, ToolSource] = field(default_factory=dict[str, ToolSource])
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
