"""`SelectedToolset`, a toolset of which only some tools are offered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchrl_agentic.errors import ConfigError
from torchrl_agentic.text import did_you_mean
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.tool_adapter import ensure_tool


@dataclass(eq=False)
class SelectedToolset(Toolset):
    """A toolset that offers its selected tools, under names that no other source of a configuration uses.

    Attributes:
        toolset: The toolset. `teardown` closes it, also after a `setup` that raised.
        source: Its place in the configuration.
        names: Tool name → its owner and place, shared by all sources of the configuration.
        wanted: Names of the selected tools, or None for all.
        required: Selected names that only this toolset can have → their places in the configuration.
    """

    toolset: Toolset
    source: str
    names: dict[str, tuple[object, str]] = field(repr=False)
    wanted: frozenset[str] | None = None
    required: Mapping[str, str] = field(default_factory=dict[str, str])

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
        for name, place in self.required.items():
            if name not in known:
                raise ConfigError(f"{place}: {unknown_tool(name, known, 'select')}")
        chosen = self._chosen(offered)
        others = {name: place for name, (owner, place) in self.names.items() if owner is not self}
        if taken := [tool.name for tool in chosen if tool.name in others]:
            raise ConfigError("\n".join(same_name(name, [others[name], self.source]) for name in taken))
        self.names.update({tool.name: (self, self.source) for tool in chosen})
        return chosen

    async def teardown(self) -> None:
        """Close the toolset."""
        await self.toolset.teardown()

    async def refresh(self) -> Sequence[Tool]:
        """Return the selected tools of those that the toolset offers now."""
        return self._chosen([ensure_tool(tool) for tool in await self.toolset.refresh()])

    def select(self, names: Iterable[str], required: Mapping[str, str]) -> SelectedToolset:
        """Return a toolset that offers only some of the tools.

        Args:
            names: Names of the tools to keep.
            required: Names that this toolset must offer → their places in the configuration.
        """
        wanted = frozenset(names) if self.wanted is None else self.wanted & frozenset(names)
        return replace(self, wanted=wanted, required={**self.required, **required})

    def _chosen(self, tools: Sequence[Tool]) -> list[Tool]:
        return [tool for tool in tools if self.wanted is None or tool.name in self.wanted]


def unknown_tool(name: str, known: Iterable[str], purpose: str, hint: str = "") -> str:
    """Return the message for the name of a tool that does not exist.

    Args:
        name: The name.
        known: Names of the tools that exist.
        purpose: What was to be done with the tool: a verb.
        hint: Text to add to the list of tools.
    """
    known = list(known)
    return f"no tool {name!r} to {purpose}{did_you_mean(name, known)} (tools: {', '.join(known)}{hint})"


def same_name(name: str, places: Sequence[object]) -> str:
    """Return the message for tools with one name.

    Args:
        name: The name.
        places: Where each of them is defined.
    """
    return "\n  ".join([f"{len(places)} tools are named {name!r}; rename all but one:", *map(str, places)])
