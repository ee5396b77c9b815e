"""`CallCache`: the results of identical calls, which the trajectories of one group share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeAlias

from torchrl_agentic.dispatch.resolve import BoundTool
from torchrl_agentic.messages import ParsedCall, Status, TextPart, ToolResult
from torchrl_agentic.text import canonical_json
from torchrl_agentic.tools.base import Effects, has_sessions
from torchrl_agentic.tools.row_data import check_names
from torchrl_agentic.tools.wrappers.base import Wrapped
from torchrl_agentic.tools.wrappers.cached import Store

Answer: TypeAlias = ToolResult | str
Ended: TypeAlias = Callable[[Answer], None]
"""Takes the answer of a call that has run or was stopped."""

_ANSWERED = (Status.OK, Status.ERROR)
_UNKNOWN = object()  # version of a resource that a call which was stopped may still change


class CallCache:
    """Results of calls that the trajectories of one group share; for one event loop.

    Equal calls that overlap run once, and later ones get the result of the first. Calls are equal if they go
    to one tool with the same JSON as arguments, and if the resources that they read have the same version. A
    call of the cache takes no slot of a limiter and opens no session. Only OK results are kept; an ERROR
    result answers all waiting calls. If the running call is cancelled, the next waiting call runs; if it
    fails otherwise, each waiting call runs by itself, so that none waits for two timeouts.

    Args:
        names: Names of the tools; None: all tools whose results depend on their arguments and the data set's
            row alone, see `why_not_cached`.
        on_hit: Called for each call that the cache answers.
        max_entries: Number of results that are kept, the most recently used ones.
    """

    def __init__(
        self,
        names: Collection[str] | None = None,
        *,
        on_hit: Callable[[], object] = lambda: None,
        max_entries: int = 1024,
    ) -> None:
        self._names = names
        self._on_hit = on_hit
        self._store = Store(max_entries)
        # By identity, kept alive so that no other tool gets it. A tool that changes is bound anew.
        self._tools: dict[int, tuple[BoundTool, bool]] = {}

    def of(self, trajectory: str) -> TrajectoryCache:
        """Return the cache as a trajectory that begins sees it.

        Args:
            trajectory: Name of the trajectory, unique in the group.
        """
        return TrajectoryCache(self, trajectory)

    def covers(self, bound: BoundTool) -> bool:
        """Return True if the calls of a tool may be answered from the cache."""
        entry = self._tools.get(id(bound))
        if entry is None:
            is_named = self._names is not None and bound.tool.name in self._names
            is_covered = (is_named or self._names is None) and not why_not_cached(bound, is_named=is_named)
            entry = self._tools[id(bound)] = bound, is_covered
        return entry[1]

    async def begin(self, key: Hashable) -> ToolResult | Ended | None:
        """Find the result of a call, wait for an equal call, or let this one run for all that will wait.

        Args:
            key: Equal for equal calls.

        Returns:
            The result; or a function that takes the answer once the call has run; or None for a call that
            runs by itself, since an equal one failed while it waited.
        """
        while True:
            found = self._store.get(key)
            if found is None:
                flight = self._store.flights.get(key)
                if flight is None:
                    return self._lead(key)
                found = await asyncio.shield(flight)
            if found is None:  # the other call was cancelled
                continue
            if found.status not in _ANSWERED:
                return None
            self._on_hit()
            return found

    def _lead(self, key: Hashable) -> Ended:
        flight = asyncio.get_running_loop().create_future()
        self._store.flights[key] = flight

        def ended(answer: Answer) -> None:
            result = ToolResult((TextPart(answer),)) if isinstance(answer, str) else answer
            del self._store.flights[key]
            shared = self._store.keep(key, result)
            flight.set_result(None if result.status is Status.CANCELLED else shared or result)

        return ended


class TrajectoryCache:
    """A `CallCache` as one trajectory sees it, with the versions of the resources that its tools read.

    The resources of all trajectories of a group begin equal. A call that writes a resource, or is exclusive,
    gives the trajectory a version of its own; a branch inherits the versions of its source. Once such a call
    was stopped or failed with INFRA or TIMEOUT, it may go on to change things, so that calls which read the
    resource are not cached any more.

    Args:
        cache: The cache of the group.
        trajectory: Name of the trajectory.
    """

    def __init__(self, cache: CallCache, trajectory: str) -> None:
        self._cache, self._trajectory = cache, trajectory
        self._n_writes = 0
        self._all: Hashable = 0  # version of the resources that are not in `_versions`
        self._versions: dict[str, Hashable] = {}

    def branch(self, trajectory: str) -> TrajectoryCache:
        """Return the cache of a trajectory that continues this one.

        Args:
            trajectory: Name of the new trajectory.
        """
        twin = TrajectoryCache(self._cache, trajectory)
        twin._all, twin._versions = self._all, dict(self._versions)
        return twin

    def forget(self) -> None:
        """Take all resources as changed, because the trajectory has run elsewhere before."""
        self._set(Effects.EXCLUSIVE, _UNKNOWN)

    async def begin(
        self, bound: BoundTool, call: ParsedCall, args: Mapping[str, Any]
    ) -> ToolResult | Ended | None:
        """Find the result of a call, or let the call run.

        Args:
            bound: The tool.
            call: The call as the model wrote it.
            args: Its arguments as the tool gets them.

        Returns:
            The result from the cache; or a function that takes the answer once the call has run or was
            stopped; or None for a call that has nothing to do with the cache.
        """
        effects = bound.effects
        if effects.may_change:
            return self._write(effects)
        key = self._key(bound, call, args)
        return None if key is None else await self._cache.begin(key)

    def _key(self, bound: BoundTool, call: ParsedCall, args: Mapping[str, Any]) -> Hashable:
        """Return what equal calls have in common, or None if the call cannot be cached."""
        if not self._cache.covers(bound):
            return None
        versions = tuple((name, self._versions.get(name, self._all)) for name in sorted(bound.effects.reads))
        text = canonical_json(args)
        if text is None or any(version is _UNKNOWN for _, version in versions):
            return None
        return id(bound), text, call.tag, versions

    def _write(self, effects: Effects) -> Ended:
        """Note that a call changes things; the dispatcher lets no call overlap that reads them."""
        self._n_writes += 1
        self._set(effects, (self._trajectory, self._n_writes))

        def ended(answer: Answer) -> None:
            if not isinstance(answer, str) and answer.status not in (*_ANSWERED, Status.CRASH):
                self._set(effects, _UNKNOWN)

        return ended

    def _set(self, effects: Effects, version: Hashable) -> None:
        """Set the version of the resources that a call writes, unless it is unknown for good."""
        if effects.exclusive:
            self._versions = {name: known for name, known in self._versions.items() if known is _UNKNOWN}
            self._all = self._all if self._all is _UNKNOWN else version
        for name in effects.writes:
            if self._versions.get(name, self._all) is not _UNKNOWN:
                self._versions[name] = version


def why_not_cached(bound: BoundTool, *, is_named: bool) -> str:
    """Return why a `CallCache` cannot answer the calls of a tool, or "" if it can.

    Args:
        bound: The tool.
        is_named: Whether the user named it, and thereby said that all trajectories of a group begin with the
            same sessions, worlds and resources. Other tools must have none of these.
    """
    tool, effects = bound.tool, bound.effects
    if effects.may_change:
        return f"it may change things ({effects})"
    if tool.wants_state:
        return "it reads the environment's state"
    while isinstance(tool, Wrapped):
        if tool.keeps_state if tool.sees_every_call is None else tool.sees_every_call:
            return f"its wrapper {type(tool).__name__} has to see every call"
        tool = tool.tool
    if tool.has_final_reward or (bound.world is not None and bound.world.has_final_reward):
        return "it gives trajectories a final reward, which may count its calls"
    if not is_named and (has_sessions(tool) or bound.world is not None or effects.reads):
        return "it reads more than its arguments; name it if all trajectories of a group begin with the same"
    return ""


def check_cached(names: Collection[str], tools: Mapping[str, BoundTool]) -> None:
    """Check that a `CallCache` can answer the calls of named tools.

    Args:
        names: The names.
        tools: All tools, by name.

    Raises:
        ValueError: If a tool does not exist, or cannot be cached.
    """
    check_names("group_cache", names, tools)
    for name in sorted(names):
        if reason := why_not_cached(tools[name], is_named=True):
            raise ValueError(f"group_cache names {name!r}, which cannot be cached: {reason}")
