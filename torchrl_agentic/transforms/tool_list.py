"""What a ToolCompose knows of the toolsets that were added to it."""

# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false
# The elements of this Compose are tools; and the overload of Compose.__init__ hides that it takes any number.

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, Self

from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Compose, Transform

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.tool_adapter import ensure_tool, ensure_toolset
from torchrl_agentic.transforms.runtime import Runtime

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


def warn_if_undescribed(tool: Tool) -> None:
    """Log a warning if the model would read nothing about a tool but its name and arguments."""
    if not tool.description.strip():
        logger.warning(
            "tool %r has no description, so that the model cannot know what it does: give the function a"
            " docstring, or the tool a description",
            tool.name,
        )


class ToolList(Compose):
    """A `Compose` whose elements are tools; what dispatches their calls is up to the class below it.

    A tool is set up when it is added. Transforms that are added go outside, into an outer `Compose`.
    """

    parser: ToolCallParser
    _tools: list[Tool]
    _toolsets: list[Added]
    _options: dict[str, Any]
    _runtime: Runtime | None

    @abstractmethod
    def _live(self) -> Dispatcher:
        """Give the dispatcher of this process, which holds the same tools."""

    def with_toolsets(self, toolsets: Iterable[Any]) -> Self:
        """Open toolsets, add their tools and give this transform; it is closed if that fails."""
        try:
            for toolset in toolsets:
                self.add_toolset(toolset)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in their order."""
        return tuple(self._tools)

    @property
    def tool_specs(self) -> list[dict[str, JSON]]:
        """What the model is told about the tools, in the shape that chat templates take as `tools=`.

        Control tokens are escaped: the descriptions may come from a server.
        """
        return [self.parser.control_escaper.json(tool.spec()) for tool in self._tools]

    def append_tool(self, tool: Any) -> None:
        """Add a tool at the end."""
        self._insert_tool(len(self._tools), tool)

    def append(self, tool: Any) -> None:
        """Add a tool at the end.

        `env.append_transform(...)` arrives here too where this is `env.transform`; a transform then goes
        behind the tools, in an outer `Compose`.
        """
        if not self._make_room_for(tool, before=False):
            self.append_tool(tool)

    append_transform = append
    """The name that environments have for it. What is no tool is refused as by `append`."""

    def insert(self, index: int, tool: Any) -> None:
        """Add a tool before position `index`; a transform goes outside, as with `append`."""
        if not self._make_room_for(tool, before=index == 0):
            self._insert_tool(index, tool)

    def pop(self, index: int | None = None) -> Tool:
        """Take a tool out, the last one by default."""
        tool = self._tools.pop(-1 if index is None else index)
        self._live().remove(tool.name)
        self._options["rate_limits"].pop(tool.name, None)
        return tool

    def add_toolset(self, toolset: Any, *, rate_limits: Mapping[str, Limiter] | None = None) -> None:
        """Open a toolset and add its tools; it is closed with this transform.

        If its tools change later, the next step or reset offers the new ones.

        Args:
            toolset: A `Toolset`, or a look-alike: `setup` and `teardown`, or `open`, `close` and `tools`.
            rate_limits: Tool name → limiter, as for the tools that come with the constructor.

        Raises:
            TypeError: If it is no toolset; the message names what it lacks.
            ValueError: If two tools have one name, or a limit names a tool that is not there.
            Exception: Whatever its `setup` raises.
        """
        toolset = ensure_toolset(toolset)
        before, revision, limits = len(self._tools), toolset.revision, dict(rate_limits or {})
        try:
            for tool in run(toolset.setup()):
                tool = ensure_tool(tool)
                self._insert_tool(len(self._tools), tool, limits.get(tool.name), toolset)
            check_limits(limits, self._tools[before:])
        except BaseException:
            while len(self._tools) > before:
                self.pop()
            run(toolset.teardown())
            raise
        names = tuple(tool.name for tool in self._tools[before:])
        self._toolsets.append(Added(toolset, names, limits, revision))

    def _reopen_toolsets(self, runtime: Runtime) -> None:
        """Open them again after `close`; they may offer other tools now."""
        runtime.toolsets_open, toolsets, self._toolsets = True, self._toolsets, []
        for added in toolsets:
            for name in added.names:
                if name in self:
                    self.pop(self._tools.index(self[name]))
            self.add_toolset(added.toolset, rate_limits=added.limits)

    def _refresh_toolsets(self) -> None:
        """Open toolsets again after `close` or in another process; offer what open ones have now."""
        if not self._toolsets:
            return
        self._live()
        assert self._runtime is not None
        if not self._runtime.toolsets_open:
            self._reopen_toolsets(self._runtime)
            return
        for place, added in enumerate(self._toolsets):
            if added.is_current:
                continue
            revision, live = added.toolset.revision, self._live()
            try:
                tools = run(added.toolset.refresh())
            except Exception:
                logger.exception(
                    "%r cannot say what it offers now; its tools stay as they are", added.toolset
                )
                self._toolsets[place] = replace(added, revision=revision)
                continue
            self._toolsets[place] = exchange(
                self, added, revision, tools, insert=self._append_of_toolset, rebind=live.rebind
            )

    def _append_of_toolset(self, tool: Tool, limiter: Limiter | None, toolset: Toolset) -> None:
        self._insert_tool(len(self._tools), tool, limiter, toolset)

    def _insert_tool(
        self, index: int, item: Any, limiter: Limiter | None = None, toolset: Toolset | None = None
    ) -> None:
        tool = ensure_tool(item)
        live = self._live()
        live.add(tool, index=index, limiter=limiter, toolset=toolset)
        try:
            run(live.setup())
        except BaseException:
            live.remove(tool.name)
            raise
        warn_if_undescribed(tool)
        self._tools.insert(index, tool)

    def _make_room_for(self, transform: Any, *, before: bool) -> bool:
        """Put a transform beside the tools, in an outer Compose, where our environment asks for that."""
        env = self.container
        if not isinstance(transform, Transform) or hasattr(transform, "_process_batch_item"):
            return False
        if not isinstance(env, TransformedEnv) or env.transform is not self:
            return False
        env.transform = Compose(transform, self) if before else Compose(self, transform)
        return True

    def __getitem__(self, key: str | int | slice) -> Any:
        if not isinstance(key, str):
            return self._tools[key]
        for tool in self._tools:
            if tool.name == key:
                return tool
        raise KeyError(
            f"no tool named {key!r}; tools: {', '.join(tool.name for tool in self._tools) or 'none'}"
        )

    def __contains__(self, item: object) -> bool:
        return any(item is tool or item == tool.name for tool in self._tools)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def __delitem__(self, index: int | slice | list[int]) -> None:
        if not isinstance(index, int):
            raise TypeError("take tools out one at a time: del compose[i]")
        self.pop(index)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            "replace a tool by taking it out and putting another in: compose.pop(i); compose.insert(i, tool)"
        )
