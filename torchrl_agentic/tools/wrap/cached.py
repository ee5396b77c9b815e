"""A pure tool that does not do twice what it has done once."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torchrl_agentic.messages import JSON, Status, ToolResult
from torchrl_agentic.tools.base import Effects, ToolContext, effects_of
from torchrl_agentic.tools.wrap.base import Wrapped
from torchrl_agentic.tools.wrap.encoding import canonical

Scope = Literal["trajectory", "group", "global"]


class Cached(Wrapped):
    """A pure tool that remembers its results by their arguments.

    Equal calls that overlap run once. One that was cancelled, or failed for reasons of its own (INFRA,
    TIMEOUT, SKIPPED), hands over to the next that waits for it; an error that the model made (ERROR) holds
    for all that wait. Only OK results are kept, those that were used last. A result from the cache says
    "cached" in its `meta`.

    Args:
        tool: a tool without effects; it must give the same for the same arguments.
        scope: "trajectory": each has a cache of its own. "group", "global": the cache is shared by all
            trajectories of a group, or by all, and with clones; it does not travel to other processes.
        max_entries: how many results are kept, in each trajectory or in all.
        group: trajectory → group, for the scope "group".

    Raises:
        ValueError: the tool has effects, or looks at the environment's state, which is no argument, or at the
            data set's row, which trajectories do not share; a scope without its group, or the other way
            round.
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
                f"{self.name!r} cannot be cached: its results depend on more than its arguments or it changes"
                f" things ({effects_of(self)}, wants_state={self.wants_state}); only pure tools can"
            )
        if self.wants_row and scope != "trajectory":
            raise ValueError(
                f"{self.name!r} takes something from the data set's row, which is another one in each "
                f"trajectory: cache it with scope='trajectory', not {scope!r}"
            )
        if scope not in ("trajectory", "group", "global") or (scope == "group") is (group is None):
            raise ValueError(
                f"scope is 'trajectory', 'global', or 'group' with group=; got {scope!r}, group={group!r}"
            )
        self.scope: Scope = scope
        self.group = group
        self.store = Store(max_entries)

    def begin(self, trajectory: str, source: Any) -> None:
        """Give the trajectory a cache of its own; a branch knows what was known before it."""
        if self.scope == "trajectory":
            self.store = Store(self.store.max_entries, None if source is None else source.store)

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Look it up, wait for somebody who is at it, or run it."""
        text = canonical(args)
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
    """Results by key, those used last, and the calls under way. May be used from several threads."""

    def __init__(self, max_entries: int, source: Store | None = None) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries must be 1 or more; got {max_entries}")
        self.max_entries = max_entries
        self.flights: dict[Hashable, asyncio.Future[ToolResult | None]] = {}
        self._results: OrderedDict[Hashable, ToolResult] = OrderedDict(source._results if source else ())
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> ToolResult | None:
        """Give what is known."""
        with self._lock:
            found = self._results.get(key)
            if found is not None:
                self._results.move_to_end(key)
            return found

    def keep(self, key: Hashable, result: ToolResult) -> ToolResult | None:
        """Give the result as others may have it, None if they may not; keep it if it is one for later."""
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
