"""`ToolList`: a `Compose` whose elements are tools, with the toolsets that some of them come from."""

# pyright: reportIncompatibleMethodOverride=false, reportCallIssue=false
# The elements of this Compose are tools; and the overload of Compose.__init__ hides that it takes any number.

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, cast

from torchrl.data import Composite, TensorSpec
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import Compose, Transform

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.dispatch.dispatcher import limits_by_tool
from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.tools.base import Tool, Toolset
from torchrl_agentic.tools.tool_adapter import ensure_tool, ensure_toolset
from torchrl_agentic.trajectory.calls import CallsStage
from torchrl_agentic.transforms import specs
from torchrl_agentic.transforms.pipeline import tokenizer_of

if TYPE_CHECKING:
    from pathlib import Path

    from torchrl_agentic.limits import Limiter
    from torchrl_agentic.tools.loaded_tools import LoadedTools
    from torchrl_agentic.transforms.episode_rows import EpisodeRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Added:
    """A toolset that was added.

    Attributes:
        toolset: The toolset.
        names: Names of its tools.
        limits: Limiters by the names of its tools.
        revision: Revision of the toolset that the tools belong to.
    """

    toolset: Toolset
    names: tuple[str, ...] = ()
    limits: Mapping[str, Limiter] = field(default_factory=dict[str, "Limiter"])
    revision: int = 0

    @property
    def is_current(self) -> bool:
        """True if the tools are those that the toolset offers now."""
        return self.revision == self.toolset.revision


class Offer(Protocol):
    """A list of tools that a model may call."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in order."""
        ...

    def pop(self, index: int | None = None) -> Tool:
        """Remove and return a tool."""
        ...


def check_limits(limits: Mapping[str, Limiter], tools: Sequence[Tool]) -> None:
    """Check that every limit names a tool of a toolset.

    Args:
        limits: Limiters by the names of tools.
        tools: Tools of the toolset.

    Raises:
        ValueError: If a limit names another tool.
    """
    known = [tool.name for tool in tools]
    for name in limits:
        if name not in known:
            raise ValueError(
                f"rate_limits names {name!r}, but the toolset has no such tool; its tools: "
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
    """Replace the tools of a toolset by those that it offers now; log and leave out what is refused.

    Tools that stay keep their position and limiter, new tools come last, and a tool that was removed by hand
    stays removed.

    Args:
        offer: The list of tools.
        added: The toolset as it was.
        revision: Revision of the toolset now.
        tools: Tools of the toolset now.
        insert: Called with tool, limiter and toolset to add a tool to the list.
        rebind: Called with a tool whose schema or effects may have changed.

    Returns:
        The toolset as it is now.
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
            logger.error("%r offers a tool that cannot be added: %s", added.toolset, error)
    return replace(added, names=tuple(names), revision=revision)


def warn_of(tool: Tool, parser: Any) -> None:
    """Log a warning if a tool has no description, or a name that the API of the parser's format refuses.

    Args:
        tool: The tool.
        parser: The parser of its calls.
    """
    names: str = getattr(parser, "tool_names", "")
    if names and not re.fullmatch(names, tool.name):
        logger.warning(
            "the API of the format %s refuses the name of the tool %r, though some servers accept it; it"
            " takes %s: Renamed(tool, 'new_name')",
            parser.name,
            tool.name,
            names,
        )
    if not tool.description.strip():
        logger.warning(
            "tool %r has no description, so that the model cannot know what it does: give the function a"
            " docstring, or pass description= to the tool or to as_tool",
            tool.name,
        )


class ToolList(Compose):
    """A `Compose` whose elements are tools, for an environment in history mode; base of `ToolCompose`.

    A tool is set up when it is added. Other transforms that are added go into an outer `Compose`.
    """

    stage: CallsStage
    _toolsets: list[Added]
    _rows: EpisodeRows
    knows_tokenizer: bool
    _met_tokenizer: int = 0

    @property
    def _tools(self) -> list[Tool]:
        return self._rows.tools

    @classmethod
    def from_config(
        cls, config: str | Path | LoadedTools, parser: ToolCallParser | str | None = None, **options: Any
    ) -> Self:
        """Create it from the tools that a YAML file names, in our form or verl's.

        A file of verl's trainer also configures other transforms. Given a path, one log line names them; call
        `load_tools` yourself, pass its result, and read their arguments off it.

        Args:
            config: A YAML file, or the result of `load_tools`.
            parser: A parser or the name of a registered one; None: the file's `multi_turn.format`, or
                "hermes".
            **options: As for the constructor; limiters in `rate_limits` replace those of the file.

        Raises:
            ConfigError: If the file is invalid.
            Exception: Any error of the constructor or of `add_toolset`.
        """
        from torchrl_agentic.config import load_tools
        from torchrl_agentic.tools.loaded_tools import LoadedTools

        loaded = config if isinstance(config, LoadedTools) else load_tools(config)
        if loaded is not config and (others := loaded.beyond_tools()):
            logger.warning("%s: not applied by ToolCompose; add %s", config, ", ".join(others))
        options["rate_limits"] = {**loaded.limits, **limits_by_tool(options.get("rate_limits"))}
        options.setdefault("max_calls_per_turn", loaded.max_calls_per_turn)
        created = cls(loaded.tools, parser or loaded.parser or "hermes", **options)
        return created.with_toolsets(loaded.toolsets)

    def with_toolsets(self, toolsets: Iterable[Any]) -> Self:
        """Add the tools of toolsets, and return this transform; close it if that fails.

        Args:
            toolsets: Toolsets, as `add_toolset` takes them.
        """
        try:
            for toolset in toolsets:
                self.add_toolset(toolset)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools, in order."""
        return tuple(self._tools)

    @property
    def tool_specs(self) -> list[dict[str, JSON]]:
        """Descriptions of the tools for the model, in the form that chat templates take as `tools=`.

        Control tokens are escaped, because descriptions may come from a server.
        """
        return [self.stage.parser.control_escaper.json(tool.spec()) for tool in self._tools]

    def new_dispatcher(self) -> Dispatcher:
        """Return a dispatcher with these tools, limiters and threads, and with sessions of its own.

        A collector runs the calls of its trajectories with it.
        """
        self._refresh_toolsets()
        return self._rows.dispatcher.fork(weakref.proxy(self))

    def append_tool(self, tool: Any) -> None:
        """Add a tool at the end."""
        self._insert_tool(len(self._tools), tool)

    def append(self, tool: Any) -> None:
        """Add a tool at the end.

        If this is `env.transform`, then `env.append_transform(...)` calls this method too; a transform goes
        behind the tools, into an outer `Compose`.

        Raises:
            TypeError: If `tool` is neither a tool nor such a transform.
        """
        if not self._make_room_for(tool, before=False):
            self.append_tool(tool)

    append_transform = append
    """The name that environments use; the same as `append`."""

    def insert(self, index: int, tool: Any) -> None:
        """Add a tool before a position; a transform goes outside, as with `append`.

        Args:
            index: Position of the tool.
            tool: A tool, a look-alike or a typed function.
        """
        if not self._make_room_for(tool, before=index == 0):
            self._insert_tool(index, tool)

    def pop(self, index: int | None = None) -> Tool:
        """Remove and return a tool, the last one by default."""
        tool = self._tools.pop(-1 if index is None else index)
        self._rows.dispatcher.remove(tool.name)
        self._rows.options["rate_limits"].pop(tool.name, None)
        return tool

    def add_toolset(self, toolset: Any, *, rate_limits: Mapping[str, Limiter] | None = None) -> None:
        """Open a toolset and add its tools; the toolset is closed with this transform.

        If its tools change later, the next step or reset offers the new tools.

        Args:
            toolset: A `Toolset`, or a look-alike: `setup` and `teardown`, or `open`, `close` and `tools`.
            rate_limits: Limiters by the names of its tools.

        Raises:
            TypeError: If it is not a toolset; the message lists the missing methods.
            ValueError: If two tools have one name, or a limit names an unknown tool.
            Exception: Any error of its `setup`.
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
        if not self._toolsets:
            self._rows.are_toolsets_open = True
        self._toolsets.append(Added(toolset, names, limits, revision))

    @property
    def _has_worlds(self) -> bool:
        return any(added.toolset.world is not None for added in self._toolsets)

    def _meet_tokenizer(self) -> None:
        """Set the parser up for the tokenizer of the environment, unless the constructor got one."""
        if self.knows_tokenizer:
            return
        tokenizer, kwargs = tokenizer_of(self.container)
        if tokenizer is not None and id(tokenizer) != self._met_tokenizer:
            self.stage.parser = self.stage.parser.with_tokenizer(tokenizer, **kwargs)
            self._met_tokenizer = id(tokenizer)

    def _reopen_toolsets(self) -> None:
        """Open the toolsets again after `close`; they may offer other tools now."""
        toolsets, self._toolsets = self._toolsets, []
        for added in toolsets:
            for name in added.names:
                if name in self:
                    self.pop(self._tools.index(self[name]))
            self.add_toolset(added.toolset, rate_limits=added.limits)

    def _refresh_toolsets(self) -> None:
        """Open the toolsets again after `close` or in another process; else update the tools that changed."""
        if not self._rows.are_toolsets_open:
            self._reopen_toolsets()
            return
        for place, added in enumerate(self._toolsets):
            if added.is_current:
                continue
            revision = added.toolset.revision
            try:
                tools = run(added.toolset.refresh())
            except Exception:
                logger.exception("%r could not refresh its tools; they stay as they are", added.toolset)
                self._toolsets[place] = replace(added, revision=revision)
                continue
            self._toolsets[place] = exchange(
                self,
                added,
                revision,
                tools,
                insert=self._append_of_toolset,
                rebind=self._rows.dispatcher.rebind,
            )

    def _append_of_toolset(self, tool: Tool, limiter: Limiter | None, toolset: Toolset) -> None:
        self._insert_tool(len(self._tools), tool, limiter, toolset)

    def _insert_tool(
        self, index: int, item: Any, limiter: Limiter | None = None, toolset: Toolset | None = None
    ) -> None:
        tool = ensure_tool(item)
        live = self._rows.dispatcher
        live.add(tool, index=index, limiter=limiter, toolset=toolset)
        try:
            run(live.setup())
        except BaseException:
            live.remove(tool.name)
            raise
        warn_of(tool, self.stage.parser)
        self._tools.insert(index, tool)

    def _make_room_for(self, transform: Any, *, before: bool) -> bool:
        """Move into an outer `Compose` with a transform that our environment appends.

        Return False otherwise.
        """
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
            raise TypeError("remove tools one at a time: del compose[i]")
        self.pop(index)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            "replace a tool by removing it and inserting another: compose.pop(i); compose.insert(i, tool)"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast("Any", super()).__setstate__(state)
        self._rows.bind(self)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Describe the output; `Compose` would ask its children, and the elements here are tools."""
        return Transform.transform_output_spec(self, output_spec)

    def transform_input_spec(self, input_spec: TensorSpec) -> TensorSpec:
        """Describe the input."""
        return Transform.transform_input_spec(self, input_spec)

    def transform_action_spec(self, action_spec: TensorSpec) -> TensorSpec:
        """Remove the fields of messages that only some messages have."""
        return specs.action(action_spec)

    def set_container(self, container: Any) -> None:
        """Set the environment.

        Raises:
            ValueError: If the environment keeps no history.
        """
        super().set_container(container)
        base = getattr(container, "base_env", None)
        if isinstance(base, ChatEnv) and base.input_mode != "history":
            raise ValueError(specs.NO_HISTORY.format(mode=base.input_mode))

    def __repr__(self) -> str:
        tools = ", ".join(tool.name for tool in self._tools)
        return f"{type(self).__name__}([{tools}], parser={self.stage.parser!r})"
