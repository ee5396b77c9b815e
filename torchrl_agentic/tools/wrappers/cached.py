"""`Cached`, a pure tool that remembers its results."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torchrl_agentic.messages import JSON, Status, ToolResult
from torchrl_agentic.text import canonical_json
from torchrl_agentic.tools.base import Effects, ToolContext, effects_of
from torchrl_agentic.tools.wrappers.base import Wrapped

Scope = Literal["trajectory", "group", "global"]


class Cached(Wrapped):
    """A pure tool that remembers its results by their arguments.

    Equal calls that overlap run once. If the running call is cancelled or fails with INFRA, TIMEOUT or
    SKIPPED, the next waiting call runs; an ERROR result answers all waiting calls. Only OK results are
    cached, the most recently used ones. The `meta` of a result from the cache has "cached".

    Args:
        tool: A tool without effects; it must return the same result for the same arguments.
        scope: "trajectory": each trajectory has its own cache. "group" or "global": all trajectories of a
            group, or all trajectories, share a cache, clones included; other processes do not.
        max_entries: Number of results that a cache holds at most.
        group: Returns the group of a trajectory, for the scope "group".

    Raises:
        ValueError: If the tool has effects, or reads the environment's state, or reads the data set's row
            with a scope other than "trajectory"; if `scope` and `group` do not fit.
    """

    sees_every_call = False

    def __init__(
        self,
        tool: Any,
        scope: Scope = "trajectory",
        max_entries: int = 1024,
        *,
        group: Callable[[str], Hashable] | None = None,
    ) -> None:
        self.keeps_state = scope == "trajectory"
        super().__init__(tool)
        if effects_of(self) != Effects.PURE or self.wants_state:
            raise ValueError(
                f"{self.name!r} cannot be cached: its results depend on more than its arguments, or it "
                f"changes things ({effects_of(self)}, wants_state={self.wants_state}); only pure tools can"
            )
        if self.needs_row and scope != "trajectory":
            raise ValueError(
                f"{self.name!r} reads the data set's row, which differs between trajectories: cache it with "
                f"scope='trajectory', not {scope!r}"
            )
        if scope not in ("trajectory", "group", "global") or (scope == "group") is (group is None):
            raise ValueError(
                f"expected scope 'trajectory', 'global', or 'group' with group=; got {scope!r}, {group=}"
            )
        self.scope: Scope = scope
        self.group = group
        self.store = Store(max_entries)

    def begin(self, trajectory: str, source: Any) -> None:
        """Create the cache of the trajectory; that of a branch starts with the results of its source."""
        if self.scope == "trajectory":
            self.store = Store(self.store.max_entries, None if source is None else source.store)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Return the cached result, wait for an equal call, or run the tool."""
        text = canonical_json(args)
        if text is None:
            return await self.result(args, ctx)
        key = text if self.group is None else (self.group(ctx.trajectory), text)
        store, loop = self.store, asyncio.get_running_loop()
        while True:
            if (found := store.get(key)) is not None:
                return found
            flight = store.flights.get(key)
            if flight is None or flight.get_loop() is not loop:
                break
            if (found := await asyncio.shield(flight)) is not None:
                return found
        flight = store.flights[key] = loop.create_future()
        shared = None
        try:
            result = await self.result(args, ctx)
            shared = store.keep(key, result)
            return result
        finally:
            if store.flights.get(key) is flight:
                del store.flights[key]
            flight.set_result(shared)


class Store:
    """Cache of the most recently used results, with the running calls; usable from several threads.

    Args:
        max_entries: Most results.
        source: Store whose results are copied; None: start empty.

    Attributes:
        flights: The running calls by key, as futures of the result that waiting calls may share.

    Raises:
        ValueError: If `max_entries` is below 1.
    """

    def __init__(self, max_entries: int, source: Store | None = None) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries must be 1 or more; got {max_entries}")
        self.max_entries = max_entries
        self.flights: dict[Hashable, asyncio.Future[ToolResult | None]] = {}
        self._results: OrderedDict[Hashable, ToolResult] = OrderedDict(source._results if source else ())
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> ToolResult | None:
        """Return the cached result, or None."""
        with self._lock:
            found = self._results.get(key)
            if found is not None:
                self._results.move_to_end(key)
            return found

    def keep(self, key: Hashable, result: ToolResult) -> ToolResult | None:
        """Cache a result if its status is OK.

        Args:
            key: Key of the call.
            result: Result of the call.

        Returns:
            A copy that waiting calls may share, or None if they have to run themselves.
        """
        if result.status not in (Status.OK, Status.ERROR):
            return None
        shared = replace(result, timing=None, meta={**(result.meta or {}), "cached": True})
        if result.status is Status.OK:
            with self._lock:
                self._results[key] = shared
                if len(self._results) > self.max_entries:
                    self._results.popitem(last=False)
        return shared

    def __len__(self) -> int:
        return len(self._results)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Store, (self.max_entries,))
