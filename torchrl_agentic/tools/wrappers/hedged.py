"""`Hedged`, a tool without effects whose slow calls are made a second time; the first answer wins."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import replace
from typing import Any, cast

from torchrl_agentic.errors import InfrastructureError, check_seconds
from torchrl_agentic.messages import JSON, Status, ToolResult
from torchrl_agentic.tools.base import Tool, ToolContext, effects_of
from torchrl_agentic.tools.wrappers.base import Wrapped
from torchrl_agentic.tools.wrappers.cached import Cached
from torchrl_agentic.tools.wrappers.retrying import is_connection_error

LATENCIES_KEPT = 512
"""Number of the latest latencies that a percentile covers."""
LEAST_KNOWN = 20
"""Number of latencies before the first second call; more for percentiles above 90."""
LEAST_BURST = 20
"""Second calls that may start at once after a pause, if `max_extra` of the running calls are fewer."""
LEAST_SNOOZE_S = 0.01
"""Least time in seconds until a second call is considered again, after the share was used up."""

Outcome = ToolResult | BaseException


class Hedged(Wrapped):
    """A tool without effects; if a call is slow, a second one starts, and the first answer wins.

    An answer is a result with the status OK or ERROR. The other call is then cancelled. If one of the two
    fails with INFRA, TIMEOUT or a connection error, the other one may still answer; if both fail, the result
    is the failure of the first one. A call that fails before a second one has started is not repeated; see
    `Retrying`.

    After a second call, `metrics` has "hedged": 1, and "hedge_won", which is 1 if the second call answered.

    Second calls are bounded: at most the share `max_extra` of all calls so far, and at most 20 at once, or
    `max_extra` of the running calls if that is more. So a service that becomes slow as a whole does not get
    twice the load. A call whose second one the share forbids tries again after as much time. No second call
    starts after the deadline of the call, or while the first one waits in a queue of the tool. Under a
    `RateLimiter`, each second call takes a slot of its own, and starts only if one is free at that moment.

    A percentile is one of the tool's latest 512 latencies, without queueing. All trajectories, clones
    included, share these latencies; a pickled copy starts without any. Calls that begin before enough are
    known, 20 for "p90", are made once.

    Blocking functions run on threads: the dispatcher stops a cancelled one at its next bytecode, while a
    call into C goes on until it returns.

    Args:
        tool: A tool that changes nothing and may run twice at once. With sessions, both calls use the same
            one. Tools of a toolset with a world are hedged only if they declare their effects.
        after: When the second call starts: a percentile such as "p90", from "p1" to "p99", or seconds.
        max_extra: Upper bound on the second calls, as a share of all calls.

    Raises:
        TypeError: If `after` is neither a text nor a number.
        ValueError: If the tool changes things or caches its results, or an argument is out of range.
    """

    def __init__(self, tool: Any, after: str | float = "p90", *, max_extra: float = 0.15) -> None:
        super().__init__(tool)
        effects = effects_of(self)
        if effects.may_change:
            raise ValueError(
                f"{self.name!r} may change things ({effects}): a second call could do them twice. Only tools"
                " without effects can be hedged; declare the tool's effects if it only reads"
            )
        inner: Any = self.tool
        while isinstance(inner, Wrapped):
            if isinstance(inner, Cached):
                raise ValueError(
                    f"{self.name!r} is cached: a second call would wait for the first one. Write"
                    " Cached(Hedged(tool))"
                )
            inner = inner.tool
        self.hedging = Hedging(after, max_extra)
        self._calls: asyncio.TaskGroup | None = None  # of the trajectory

    async def run(self, args: Mapping[str, JSON], ctx: ToolContext) -> ToolResult:
        """Run the call, and once more if it is slow; return the first answer."""
        delay_s = self.hedging.begin()
        if ctx.world is not None and self.effects is None:  # the dispatcher takes it to write its world
            delay_s = None
        clock = _HedgeTimer(ctx)
        first = self._start(self._outcome(args, replace(ctx, clock=clock)))
        second: asyncio.Task[Outcome] | None = None
        try:
            await clock.wait(first, delay_s)
            while not first.done() and clock.has_time:
                if self.hedging.hedge():
                    second = self._second(args, replace(ctx, clock=None, deadline=clock.deadline))
                    break
                await clock.wait(first, max(LEAST_SNOOZE_S, delay_s or 0.0))
            while (is_second := choose(_found(first), _found(second), is_hedged=second is not None)) is None:
                running = [task for task in (first, second) if task is not None and not task.done()]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as stopped:
            for task in (first, second):
                if task is not None:
                    task.cancel(*stopped.args)
            raise
        finally:
            self.hedging.end(clock.ran_s, has_answered=first.done() and is_answer(first.result()))
        if second is not None:
            first.cancel()
            second.cancel()
        outcome = second.result() if second is not None and is_second else first.result()
        if not isinstance(outcome, ToolResult):
            raise outcome
        if second is None:
            return outcome
        metrics = {**(outcome.metrics or {}), "hedged": 1, "hedge_won": int(is_second)}
        return replace(outcome, metrics=metrics, timing=None if is_second else outcome.timing)

    async def _outcome(
        self, args: Mapping[str, JSON], ctx: ToolContext, until: float | None = None
    ) -> Outcome:
        """Run the tool; return exceptions, since SystemExit from a task would end the event loop."""
        try:
            async with asyncio.timeout_at(until):
                return await self.result(args, ctx)
        except GeneratorExit:
            raise
        except BaseException as error:
            return error

    def _second(self, args: Mapping[str, JSON], ctx: ToolContext) -> asyncio.Task[Outcome] | None:
        """Start the tool in a slot of its own; return None if no slot is free."""
        if ctx.limiter is None:
            return self._start(self._outcome(args, ctx))
        slot, is_free = ctx.limiter.slot(), False
        with contextlib.suppress(InfrastructureError):  # an open circuit
            is_free = slot.acquire_now()
        if not is_free:
            self.hedging.take_back()
            return None
        # The clock of the call may stand, while the first one waits for the slot that this one has.
        task = self._start(self._outcome(args, replace(ctx, slot=slot), ctx.deadline))
        task.add_done_callback(lambda _: slot.close())
        return task

    def _start(self, call: Coroutine[Any, Any, Outcome]) -> asyncio.Task[Outcome]:
        return (asyncio if self._calls is None else self._calls).create_task(call)

    @contextlib.asynccontextmanager
    async def _around(
        self, opening: contextlib.AbstractAsyncContextManager[Tool], trajectory: str, source: Any
    ) -> AsyncGenerator[Tool]:
        async with super()._around(opening, trajectory, source) as live, asyncio.TaskGroup() as calls:
            cast("Hedged", live)._calls = calls  # its session closes after the calls that were cancelled
            yield live


class Hedging:
    """Decides when a call is made a second time; it has no clock and knows no tasks. Usable from any thread.

    Args:
        after: A percentile, such as "p90", or seconds.
        max_extra: Upper bound on the second calls, as a share of all calls.

    Attributes:
        calls: Number of calls.
        extra: Number of second calls.
        delay_s: Seconds after which a second call may start; None if too few latencies are known.

    Raises:
        TypeError: If `after` is neither a text nor a number.
        ValueError: If an argument is out of range.
    """

    def __init__(self, after: str | float = "p90", max_extra: float = 0.15) -> None:
        percent = re.fullmatch(r"p([1-9]\d?)", after) if isinstance(after, str) else None
        if percent is None and isinstance(cast("object", after), str | None):
            raise ValueError(f"after is a percentile from 'p1' to 'p99', or seconds; got {after!r}")
        if percent is None:
            check_seconds("after", after)
        if not isinstance(cast("object", max_extra), int | float) or not 0 < max_extra <= 1:
            raise ValueError(f"max_extra is a share of the calls, above 0 and at most 1; got {max_extra!r}")
        self.after, self.max_extra = after, max_extra
        self.calls = self.extra = 0
        self.delay_s = float(after) if percent is None else None
        self._percent = None if percent is None else int(percent[1])
        self._latencies = deque[float](maxlen=LATENCIES_KEPT)
        self._running, self._budget = 0, 0.0
        self._lock = threading.Lock()

    def begin(self) -> float | None:
        """Count a call that begins, and return `delay_s`."""
        with self._lock:
            self.calls += 1
            self._running += 1
            most = max(LEAST_BURST, self.max_extra * self._running)
            self._budget = min(self._budget + self.max_extra, most)
            return self.delay_s

    def hedge(self) -> bool:
        """Return whether a second call may start now, and count it."""
        with self._lock:
            if self._budget < 1:
                return False
            self._budget -= 1
            self.extra += 1
            return True

    def take_back(self) -> None:
        """Undo `hedge`, because the second call did not start."""
        with self._lock:
            self._budget += 1
            self.extra -= 1

    def end(self, seconds: float, *, has_answered: bool) -> None:
        """Count a first call that has ended.

        A call that was stopped would have taken longer. Its time counts like a latency if it is not below the
        percentile, since any latency above changes the percentile as little. The other times of calls that
        failed or were stopped are left out.

        Args:
            seconds: Time that it ran, without queueing.
            has_answered: Whether it answered; otherwise it failed or was stopped.
        """
        with self._lock:
            self._running -= 1
            is_long = self.delay_s is not None and seconds >= self.delay_s
            if self._percent is None or not (has_answered or is_long):
                return
            self._latencies.append(seconds)
            known = sorted(self._latencies)
            # 2 of the latencies or more lie above the percentile.
            if len(known) >= max(LEAST_KNOWN, math.ceil(200 / (100 - self._percent))):
                self.delay_s = known[-(-self._percent * len(known) // 100) - 1]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Hedging, (self.after, self.max_extra))


class _HedgeTimer:
    """Clock of a first call, which measures its running time, without its queues.

    Args:
        ctx: Context of the call, whose clock this one also stops.
    """

    def __init__(self, ctx: ToolContext) -> None:
        self._now = asyncio.get_running_loop().time
        self._outer, self._deadline = ctx.clock, ctx.deadline
        self._stops, self._ran_s, self._since = 0, 0.0, self._now()
        self._bound: asyncio.Timeout | None = None
        self._bound_s: float | None = None

    @property
    def deadline(self) -> float | None:
        """Current deadline of the call."""
        return self._deadline if self._outer is None else self._outer.deadline

    @property
    def has_time(self) -> bool:
        """True if the deadline of the call has not passed."""
        return self.deadline is None or self._now() < self.deadline

    @property
    def ran_s(self) -> float:
        """Running time so far, in seconds."""
        return self._ran_s + (0.0 if self._stops else self._now() - self._since)

    async def wait(self, call: asyncio.Task[Outcome], seconds: float | None) -> None:
        """Wait until the call has ended, or has run for some more seconds; None: until it has ended."""
        self._bound_s = None if seconds is None else self.ran_s + seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as self._bound:
                self._reschedule()
                await asyncio.wait((call,))
        self._bound_s = None

    def stop(self) -> None:
        """Pause, because the call waits in a queue."""
        self._ran_s, self._stops = self.ran_s, self._stops + 1
        self._reschedule()
        if self._outer is not None:
            self._outer.stop()

    def go_on(self) -> float | None:
        """Resume, and return the new deadline."""
        self._stops -= 1
        if self._stops == 0:
            self._since = self._now()
            self._reschedule()
        return self._deadline if self._outer is None else self._outer.go_on()

    def _reschedule(self) -> None:
        if self._bound_s is not None and self._bound is not None and not self._bound.expired():
            self._bound.reschedule(None if self._stops else self._now() + self._bound_s - self.ran_s)


def choose(first: Outcome | None, second: Outcome | None, *, is_hedged: bool) -> bool | None:
    """Return whether the second of two calls has the result, or None to wait for the other one.

    Args:
        first: Outcome of the first call; None if it runs.
        second: Outcome of the second call; None if it runs.
        is_hedged: Whether there is a second call.

    Returns:
        False for the first call, True for the second one, None if the other one may still answer.
    """
    if first is not None and not (is_hedged and _has_failed(first)):
        return False
    if second is not None and is_answer(second):
        return True
    return False if first is not None and second is not None else None


def is_answer(outcome: Outcome) -> bool:
    """Return True if a call was answered: with a result of the status OK or ERROR."""
    return isinstance(outcome, ToolResult) and outcome.status in (Status.OK, Status.ERROR)


def _has_failed(outcome: Outcome) -> bool:
    """Return True if a call failed and another one may be answered."""
    if isinstance(outcome, ToolResult):
        return outcome.status in (Status.INFRA, Status.TIMEOUT)
    return isinstance(outcome, InfrastructureError) or is_connection_error(outcome)


def _found(task: asyncio.Task[Outcome] | None) -> Outcome | None:
    return task.result() if task is not None and task.done() else None
