"""Names of tools over all sources of a configuration: which are wanted, and that no two are one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torchrl_agentic.tool_config.mistakes import ConfigError, nearest
from torchrl_agentic.tool_config.spot import Spot
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.tool_adapter import ensure_tool


class Selection:
    """A `tool_selected_list`, and which of its names have been met so far.

    open: how many sources have not said yet what they offer.
    """

    def __init__(self, names: Sequence[str], spot: Spot) -> None:
        self.spot = spot
        self.names = tuple(names)
        self.open = 0
        self._met: dict[str, None] = {}

    def wanted(self, offered: Iterable[str]) -> set[str]:
        """Say which of the names a source offers are wanted."""
        names = list(offered)
        self._met.update(dict.fromkeys(names))
        return set(names) & set(self.names)

    def check(self) -> None:
        """See that all names have been met, once all sources have said what they offer.

        Raises:
            ConfigError: one has not.
        """
        for index, name in enumerate(self.names):
            if self.open <= 0 and name not in self._met:
                known = ", ".join(self._met) or "none"
                self.spot.at(index).fail(
                    f"no tool {name!r} to select{nearest(name, self._met)} (tools: {known})"
                )


class Names:
    """Who has which name."""

    def __init__(self) -> None:
        self._places: dict[str, list[tuple[object, object]]] = {}

    def claim(self, owner: object, claims: Iterable[tuple[str, object]]) -> None:
        """Take names, with the place that each comes from; what the owner had before is given up.

        A place is made a text only where it is shown: finding a line takes longer than all the rest.

        Raises:
            ConfigError: names that others have, or that are there twice; nothing is taken then.
        """
        kept = {name: [one for one in found if one[0] is not owner] for name, found in self._places.items()}
        taken: list[str] = []
        for name, place in claims:
            kept.setdefault(name, []).append((owner, place))
            if len(kept[name]) > 1 and name not in taken:
                taken.append(name)
        if taken:
            raise ConfigError("\n".join(_told(name, [place for _, place in kept[name]]) for name in taken))
        self._places = kept


def _told(name: str, places: Sequence[object]) -> str:
    return f"{len(places)} tools are named {name!r}; give all but one another name:\n" + "\n".join(
        f"  {place}" for place in places
    )


class ConfiguredToolset(Toolset):
    """A toolset of a configuration: offers what is selected, and no name that another source has."""

    def __init__(self, toolset: Toolset, source: str, names: Names, selections: Sequence[Selection]) -> None:
        self.toolset = toolset
        self.source = source
        self._names = names
        self._selections = tuple(selections)
        self._has_said = False
        self._users = 0
        for selection in selections:
            selection.open += 1

    @property
    def revision(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  read only
        """That of the toolset."""
        return getattr(self.toolset, "revision", 0)

    @property
    def world(self) -> Toolset | None:
        """That of the toolset."""
        return self.toolset.world

    async def setup(self) -> Sequence[Tool]:
        """Open it, and give those of its tools that are selected.

        Raises:
            ConfigError: another source has a tool of one of these names, or one that is selected is nowhere.
        """
        tools = [ensure_tool(tool) for tool in await self.toolset.setup()]
        try:
            chosen = self._chosen(tools)
            if not self._has_said:
                self._has_said = True
                for selection in self._selections:
                    selection.open -= 1
            for selection in self._selections:
                selection.check()
            self._names.claim(self, [(tool.name, self.source) for tool in chosen])
        except BaseException:
            await self.toolset.teardown()
            raise
        self._users += 1
        return chosen

    async def teardown(self) -> None:
        """Close it, if it is open: a `setup` that raised has left nothing open."""
        if self._users:
            self._users -= 1
            await self.toolset.teardown()

    async def refresh(self) -> Sequence[Tool]:
        """Give the selected ones of what it offers now."""
        toolset: Any = self.toolset
        return self._chosen([ensure_tool(tool) for tool in await toolset.refresh()])

    def _chosen(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        for selection in self._selections:
            wanted = selection.wanted(tool.name for tool in tools)
            tools = [tool for tool in tools if tool.name in wanted]
        return tools

    def __repr__(self) -> str:
        return f"{self.toolset!r} ({self.source})"
