"""What a ToolCompose knows of the toolsets that were added to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torchrl_agentic.adapt import ensure_tool
from torchrl_agentic.limits import Limiter
from torchrl_agentic.tool import Tool, Toolset

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Added:
    """A toolset, the names of the tools that came from it, their limiters, and which revision they are."""

    toolset: Toolset
    names: tuple[str, ...] = ()
    limits: Mapping[str, Limiter] = field(default_factory=dict[str, Limiter])
    revision: int = 0

    @property
    def is_current(self) -> bool:
        """Whether the tools are what the toolset offers now."""
        return self.revision == self.toolset.revision


class Offer(Protocol):
    """What offers tools to a model."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in their order."""
        ...

    def pop(self, index: int | None = None) -> Tool:
        """Take a tool out."""
        ...


def check_limits(limits: Mapping[str, Limiter], tools: Sequence[Tool]) -> None:
    """Refuse a limit for a tool that is not there.

    Raises:
        ValueError: there is one.
    """
    known = [tool.name for tool in tools]
    for name in limits:
        if name not in known:
            raise ValueError(
                f"a rate limit for {name!r}, but the toolset has no such tool; its tools: "
                f"{', '.join(known) or 'none'}"
            )


def exchange(
    offer: Offer,
    added: Added,
    revision: int,
    tools: Sequence[Any],
    *,
    insert: Callable[[Tool, Limiter | None, Toolset], None],
    rebind: Callable[[Tool], None],
) -> Added:
    """Let an offer hold what a toolset has now; what is refused is logged and left out.

    Tools that stay keep their place and their limiter; new ones come last. One that was taken out by hand
    stays out.
    """
    found = {tool.name: tool for tool in map(ensure_tool, tools)}
    by_hand = set(added.names) - {tool.name for tool in offer.tools}
    for name in added.names:
        here = next((tool for tool in offer.tools if tool.name == name), None)
        if here is not None and here is not found.get(name):
            offer.pop(offer.tools.index(here))
    names = [name for name in added.names if name in by_hand and name in found]
    for name, tool in found.items():
        if name in by_hand:
            continue
        try:
            if any(tool is here for here in offer.tools):
                names.append(name)  # also if it is refused: then it stays as it was
                rebind(tool)
            else:
                insert(tool, added.limits.get(name), added.toolset)
                names.append(name)
        except Exception as error:
            logger.error("a tool that %r offers now is passed over: %s", added.toolset, error)
    return replace(added, names=tuple(names), revision=revision)
