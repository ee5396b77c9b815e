"""`Cached`, a pure tool that remembers its results."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torchrl_agentic.errors import check_count
from torchrl_agentic.messages import JSON, Status, ToolResult
from torchrl_agentic.text import canonical_json
from torchrl_agentic.tools.base import Effects, ToolContext, effects_of
from torchrl_agentic.tools.wrappers.base import Wrapped

Scope = Literal["trajectory", "group", "global"]
Missing = Literal["failed", "cancelled"]


class Cached(Wrapped):
    """A pure tool that remembers its results by their arguments.

    Equal calls that overlap run once; a call that waits for another one holds no slot of a limiter. If the
    running call is cancelled, the next waiting call runs. If it fails or times out, each waiting call runs by
    itself, so that none waits for two timeouts. An ERROR result answers all waiting calls. Only OK results
    are cached, the most recently used ones. Each call gets a copy of its own, whose `meta` has "cached"; a
    result that cannot be copied is not shared.

    Args:
        tool: A tool without effects; it must return the same result for the same arguments.
        scope: "trajectory": each trajectory has its own cache. "group": the trajectories of a group of a
            collector share their results. "global": all trajectories do. Clones share too; other processes
            do not.
        max_entries: Number of results that a cache holds at most, those of all groups or trajectories that
            share it together.
        group: Returns the group of a trajectory from its name, for the scope "group" outside of a collector,
            where a trajectory shares with no other otherwise.

    Raises:
        ValueError: If the tool has effects, or reads the environment's state, or reads the data set's row
            with a scope whose trajectories have different ones; if it gives a final reward, which may count
            its calls, and trajectories share; if `scope` and `group` do not fit.
    """

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
        if scope not in ("trajectory", "group", "global") or (group is not None and scope != "group"):
            raise ValueError(
                f"expected scope 'trajectory', 'global', or 'group', perhaps with group=; got {scope!r}, "
                f"{group=}"
            )
        if self.needs_row and (scope == "global" or group is not None):
            raise ValueError(
                f"{self.name!r} reads the data set's row, which differs between trajectories: cache it with "
                f"scope='trajectory', or scope='group' without group="
            )
        if self.has_final_reward and scope != "trajectory":
            raise ValueError(
                f"{self.name!r} gives trajectories a final reward, which may count its calls: cache it with "
                f"scope='trajectory', not {scope!r}"
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
        key = (self._group_of(ctx), text) if self.scope == "group" else text
        store, loop = self.store, asyncio.get_running_loop()
        while True:
            if (found := store.get(key)) is not None:
                return _copied(found)
            flight = store.flights.get(key)
            if flight is None or flight.outcome.get_loop() is not loop:
                return await self._lead(key, args, ctx)
            if ctx.slot is not None:
                ctx.slot.release()
            found, ctx = await ctx.queue(flight.wait())
            if isinstance(found, ToolResult):
                return _copied(found)
            if ctx.slot is not None:
                _, ctx = await ctx.queue(ctx.slot.acquire())
            if found == "failed":
                return await self.result(args, ctx)

    def _group_of(self, ctx: ToolContext) -> Hashable:
        return self.group(ctx.trajectory) if self.group is not None else ctx.group or ctx.trajectory

    async def _lead(self, key: Hashable, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the tool for all that wait for the result."""
        store = self.store
        flight = store.flights[key] = Flight(ctx.deadline)
        shared: ToolResult | Missing = "failed"
        try:
            result = await self.result(args, ctx)
            shared = store.keep(key, result) or "failed"
            return result
        except asyncio.CancelledError:
            shared = "failed" if flight.is_late else "cancelled"
            raise
        finally:
            if store.flights.get(key) is flight:
                del store.flights[key]
            flight.outcome.set_result(shared)


def _copied(result: ToolResult) -> ToolResult:
    """Return a result of which no part is shared with another trajectory, which might change it."""
    parts, meta, metrics = copy.deepcopy((result.parts, result.meta, result.metrics))
    return replace(result, parts=parts, meta=meta, metrics=metrics)


class Flight:
    """A call that runs, for the equal calls that wait for it.

    Args:
        deadline: Time at which it is stopped, in seconds of the event loop's clock; None: never.

    Attributes:
        outcome: The result that waiting calls may share; "failed" or "cancelled" if the call left none.
    """

    def __init__(self, deadline: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self.outcome: asyncio.Future[ToolResult | Missing] = self._loop.create_future()

    @property
    def is_late(self) -> bool:
        """True if its time is over, whether it has stopped or not."""
        return self._deadline is not None and self._loop.time() >= self._deadline

    async def wait(self) -> ToolResult | Missing:
        """Wait for the outcome; "failed" if the call does not end in time."""
        timeout = None if self._deadline is None else self._deadline - self._loop.time()
        await asyncio.wait((self.outcome,), timeout=timeout)
        return self.outcome.result() if self.outcome.done() else "failed"


class Store:
    """Cache of the most recently used results, with the running calls; usable from several threads.

    Args:
        max_entries: Most results.
        source: Store whose results are copied; None: start empty.

    Attributes:
        flights: The running calls by key.

    Raises:
        TypeError: If `max_entries` is not a number.
        ValueError: If `max_entries` is below 1, or not whole.
    """

    def __init__(self, max_entries: int, source: Store | None = None) -> None:
        check_count("max_entries", max_entries, optional=False)
        self.max_entries = max_entries
        self.flights: dict[Hashable, Flight] = {}
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
            A copy of which waiting calls get copies, or None if they have to run themselves, also because
            the result holds what cannot be copied.
        """
        if result.status not in (Status.OK, Status.ERROR):
            return None
        try:
            shared = _copied(replace(result, timing=None, meta={**(result.meta or {}), "cached": True}))
        except Exception:  # values in `meta` are those of the tool
            return None
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
