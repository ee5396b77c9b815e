"""From effects to order, as a pure function."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrl_agentic.limits import Slot
from torchrl_agentic.limits.base import LOST
from torchrl_agentic.messages import (
    JSON,
    ParsedCall,
    Status,
    TextPart,
    Timing,
    ToolResult,
    encodable,
    is_encodable,
)
from torchrl_agentic.tools.base import Effects, ToolContext
from torchrl_agentic.tools.row_data import NO_DATA
from torchrl_agentic.tools.schema import SchemaValidationError

if TYPE_CHECKING:
    from torchrl_agentic.dispatch.dispatcher import BoundTool, Dispatcher
    from torchrl_agentic.dispatch.session import Session

logger = logging.getLogger(__name__)


def conflict(first: Effects, second: Effects) -> bool:
    """Whether two calls of one trajectory must not overlap."""
    if first.exclusive or second.exclusive:
        return True
    return bool(first.writes & (second.reads | second.writes) or second.writes & first.reads)


def dependencies(effects: Sequence[Effects]) -> list[set[int]]:
    """Give for each call the earlier calls it has to wait for, numbered in the order the model wrote them.

    Only the latest conflicts are given, the others follow: if 2 waits for 1 and 1 for 0, 2 names only 1. The
    work is linear in the calls and their resources.
    """
    waits: list[set[int]] = []
    barrier: int | None = None  # the latest exclusive call
    since_barrier: list[int] = []
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}  # since that resource was last written
    for index, effect in enumerate(effects):
        if effect.exclusive:
            waits.append(set(since_barrier) or ({barrier} if barrier is not None else set()))
            barrier, since_barrier = index, []
            writer.clear()
            readers.clear()
            continue
        found: set[int] = set()
        for name in effect.reads | effect.writes:
            if name in writer:
                found.add(writer[name])
        for name in effect.writes:
            found.update(readers.get(name, ()))
        if not found and barrier is not None:
            found.add(barrier)
        for name in effect.writes:
            writer[name] = index
            readers[name] = []
        for name in effect.reads - effect.writes:
            readers.setdefault(name, []).append(index)
        waits.append(found)
        since_barrier.append(index)
    return waits


CANCEL_GRACE_S = 1.0
"""How long a cancelled turn waits for its calls to end."""
MAX_CAUSE = 500
"""How many characters of a cause are logged."""
SHOWN = 3
"""How many causes, and ids, the line about the INFRA results of a step names at most."""


class _RunClock:
    """Bounds the run of one call; stands still while the call waits in a line of the tool's own.

    queued_s: how long it has stood still.
    """

    __slots__ = ("_entry", "_expire", "_loop", "_stopped_at", "_stops", "_timer", "deadline", "queued_s")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deadline: float | None,
        expire: Callable[[_Entry], None],
        entry: _Entry,
    ) -> None:
        self._loop, self._expire, self._entry = loop, expire, entry
        self._stops = 0
        self.queued_s = 0.0
        self.deadline = deadline
        self._timer = None if deadline is None else loop.call_at(deadline, expire, entry)

    def stop(self) -> None:
        """Stop it; it goes on after as many calls of `go_on`."""
        self._stops += 1
        if self._stops == 1:
            self._stopped_at = self._loop.time()
            if self._timer is not None:
                self._timer.cancel()

    def go_on(self) -> float | None:
        """Let it run again, and return the new deadline."""
        self._stops -= 1
        if self._stops == 0:
            self._count()
            self._timer = self._armed()
        return self.deadline

    def end(self) -> None:
        """End it, whether it runs or not."""
        if self._stops:
            self._count()
        self.deadline = None
        if self._timer is not None:
            self._timer.cancel()

    def _count(self) -> None:
        stood_still = self._loop.time() - self._stopped_at
        self.queued_s += stood_still
        if self.deadline is not None:
            self.deadline += stood_still

    def _armed(self) -> asyncio.TimerHandle | None:
        deadline = self.deadline
        return None if deadline is None else self._loop.call_at(deadline, self._expire, self._entry)


class _Entry:
    """A call on its way to its result."""

    __slots__ = (
        "args", "began", "bound", "call", "clock", "dependents", "notes", "result", "slot", "task",
        "waits_for",
    )  # fmt: skip

    def __init__(self, call: ParsedCall) -> None:
        self.call = call
        self.bound: BoundTool | None = None
        self.args: Mapping[str, JSON] = call.args
        self.notes = call.notes
        self.result: ToolResult | None = None
        self.began: float | None = None
        self.slot: Slot | None = None
        self.task: asyncio.Task[None] | None = None
        self.clock: _RunClock | None = None
        self.waits_for = 0
        self.dependents: list[_Entry] = []


class TurnRun:
    """The calls of one turn. `start` it; `finished` is called once every call has its result."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        session: Session,
        calls: Sequence[ParsedCall],
        state: Any,
        finished: Callable[[], None],
        outages: Outages,
    ) -> None:
        self._outages = outages
        self._dispatcher = dispatcher
        self._session = session
        self._state = state
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._entries = [_Entry(call) for call in calls]
        self._open = len(self._entries)
        session.begin_turn()
        self._turn = session.turn
        self._started_at = self._loop.time()
        self._started = time.time()
        session.turn += 1

    def start(self) -> None:
        """Answer what cannot run, work out the order of the rest, and start what waits for nothing."""
        if not self._entries:
            self._finished()
            return
        runnable: list[_Entry] = []
        for number, entry in enumerate(self._entries):
            refusal = self._refuse(entry, number)
            if refusal is None:
                runnable.append(entry)
            else:
                self._finish(entry, refusal)
        effects = [entry.bound.effects for entry in runnable if entry.bound is not None]
        if any(effect is not Effects.PURE for effect in effects):
            for entry, earlier in zip(runnable, dependencies(effects), strict=True):
                entry.waits_for = len(earlier)
                for index in earlier:
                    runnable[index].dependents.append(entry)
        for entry in runnable:
            if entry.waits_for == 0:
                entry.task = self._loop.create_task(self._perform(entry))

    def results(self) -> list[ToolResult]:
        """The results in the order of the calls, once finished."""
        return [entry.result for entry in self._entries if entry.result is not None]

    def expire(self) -> None:
        """The time of the turn is over: what runs or waits gets a TIMEOUT result now."""
        seconds = self._dispatcher.per_turn_timeout
        for entry in self._entries:
            if entry.result is None:
                text = f"Error: the turn's {seconds:g} s were over before {entry.call.tool!r} had finished"
                self._stop(entry, _failure(Status.TIMEOUT, text))

    async def cancel(self) -> None:
        """Cancel what runs and wait a moment for it to end."""
        for entry in self._entries:
            if entry.result is None:
                self._stop(entry, _failure(Status.CANCELLED, "Error: cancelled"))
        if self._session.lingering:
            await asyncio.wait(set(self._session.lingering), timeout=CANCEL_GRACE_S)

    def _refuse(self, entry: _Entry, number: int) -> ToolResult | None:
        """Look the tool up and check the arguments. None: the call may run."""
        call, most = entry.call, self._dispatcher.max_calls_per_turn
        if call.error is not None:
            over = call.error.code == "over_limit"
            return _failure(Status.SKIPPED if over else Status.MALFORMED, f"Error: {call.error.message}")
        if most is not None and number >= most:
            return _failure(Status.SKIPPED, f"Error: not run, one message may hold {most} calls at most")
        entry.bound = self._dispatcher.bound.get(call.tool)
        allowed = self._session.allowed
        if entry.bound is None or (allowed is not None and call.tool not in allowed):
            known = ", ".join(name for name in self._dispatcher.bound if allowed is None or name in allowed)
            known = known or "none"
            return _failure(Status.UNKNOWN_TOOL, f"Error: no tool named {call.tool!r}; available: {known}")
        if self._dispatcher.validate_inputs:
            try:
                entry.args, passed_over = entry.bound.validator.accept(call.args)
            except SchemaValidationError as error:
                return _failure(Status.INVALID_ARGS, f"Error: {call.tool}: {error}")
            if passed_over:
                entry.notes += passed_over
        return None

    async def _perform(self, entry: _Entry) -> None:
        assert entry.bound is not None
        bound, dispatcher = entry.bound, self._dispatcher
        try:
            if bound.limiter is not None:
                entry.slot = bound.limiter.slot()
                await entry.slot.acquire()
            entry.began = self._loop.time()
            seconds = dispatcher.per_call_timeout
            deadline = None if seconds is None else entry.began + seconds
            entry.clock = _RunClock(self._loop, deadline, self._expire_call, entry)
            live = await self._session.live(bound.tool) if bound.has_sessions else bound.tool
            world = None if bound.world is None else await self._session.live(bound.world)
            value = await live.run(entry.args, self._context(entry, bound, live, world, entry.clock))
            is_plain = type(value) is str and is_encodable(value)
            answer = value if is_plain else sound(ToolResult.from_value(value))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and entry.result is not None:
                raise  # stopped by us, and answered already
            try:
                answer = self._answer(entry, error)
            except BaseException:  # an exception whose text cannot be read either
                answer = self._crash(entry, error)
        self._finish(entry, answer)

    def _answer(self, entry: _Entry, error: BaseException) -> ToolResult:
        """Say what became of a call that raised."""
        name = entry.call.tool
        if (result := ToolResult.from_error(error, name)) is not None:
            return sound(result)
        if isinstance(error, asyncio.CancelledError):
            if entry.slot is not None and entry.slot.is_lost:
                return _failure(Status.INFRA, f"Error: {name} is not available at the moment: {LOST}")
            return _failure(Status.CANCELLED, f"Error: {name} was cancelled")
        return self._crash(entry, error)

    def _crash(self, entry: _Entry, error: BaseException) -> ToolResult:
        """Log a bug, once; SystemExit counts as one too: it must not end the loop that all share."""
        name = entry.call.tool
        if entry.result is None:
            logger.error("tool %s crashed %s", name, self._where(entry), exc_info=error)
        return _failure(Status.CRASH, f"Error: {name} crashed ({type(error).__name__}); it did not finish")

    def _context(
        self, entry: _Entry, bound: BoundTool, live: Any, world: Any, clock: _RunClock
    ) -> ToolContext:
        call, session = entry.call, self._session
        return ToolContext(
            call.call_id,
            call.tag,
            self._state if bound.tool.wants_state else None,
            getattr(live, "sandbox", None),
            getattr(live, "repl", None),
            self._dispatcher.compose,
            session.row,
            session.trajectory,
            self._turn,
            clock.deadline,
            self._dispatcher.threads,
            session.data if bound.tool.needs_row or bound.world is not None else NO_DATA,
            clock,
            world,
        )

    def _expire_call(self, entry: _Entry) -> None:
        seconds = self._dispatcher.per_call_timeout
        text = f"Error: {entry.call.tool} did not finish within {seconds:g} s and was stopped"
        self._stop(entry, _failure(Status.TIMEOUT, text))

    def _stop(self, entry: _Entry, result: ToolResult) -> None:
        """Give a call that has not finished its result, and cancel its task."""
        task = entry.task if entry.task is not None and not entry.task.done() else None
        if task is not None:
            self._session.lingering.add(task)
            task.add_done_callback(self._session.lingering.discard)
            task.add_done_callback(_looked_at)
            # Calls that depend on this one start when its task ends, or after a grace if it does not.
            dependents, entry.dependents = entry.dependents, []
            release = functools.partial(self._release, dependents)
            task.add_done_callback(lambda _: release())
            self._loop.call_later(CANCEL_GRACE_S, release)
        self._finish(entry, result)
        if task is not None:
            task.cancel(entry.result)  # so that a recorder inside the task can read what the model was told

    def _release(self, dependents: list[_Entry]) -> None:
        """Let go of calls that waited for one; may come again."""
        while dependents:
            dependent = dependents.pop()
            dependent.waits_for -= 1
            if dependent.waits_for == 0 and dependent.result is None:
                dependent.task = self._loop.create_task(self._perform(dependent))

    def _finish(self, entry: _Entry, answer: ToolResult | str) -> None:
        """Set the result of a call, made of a result without timing or of the text that the tool returned."""
        if entry.result is not None:
            return
        now = self._loop.time()
        began = entry.began if entry.began is not None else now
        queued_s = 0.0
        if entry.clock is not None:
            entry.clock.end()
            queued_s = entry.clock.queued_s
            entry.clock = None  # each knows the other: no garbage that only the collector finds
        if isinstance(answer, ToolResult) and answer.timing is not None:  # the tool queued the call itself
            queued_s = max(queued_s, answer.timing.queue_s)
        began = min(now, began + queued_s)
        timing = Timing(self._started, began - self._started_at, now - began)
        if isinstance(answer, str):
            result = ToolResult((TextPart(answer),), timing=timing, notes=entry.notes)
        else:
            result = replace(answer, timing=timing, notes=(*entry.notes, *answer.notes))
        entry.result = result
        if result.status is Status.INFRA:
            self._outages.add(entry.call.tool, result.text, self._where(entry))
        if entry.slot is not None:
            entry.slot.release()
        self._release(entry.dependents)
        self._open -= 1
        if self._open == 0:
            self._finished()

    def _where(self, entry: _Entry) -> str:
        return f"(trajectory {self._session.trajectory}, turn {self._turn}, call {entry.call.call_id})"


class Outages:
    """The INFRA results of one step, logged in one line per tool: a dead service fails every row."""

    def __init__(self) -> None:
        self._of_tools: dict[str, tuple[Counter[str], list[str]]] = {}

    def add(self, tool: str, text: str, where: str) -> None:
        """Count a result."""
        causes, places = self._of_tools.setdefault(tool, (Counter(), []))
        causes[" ".join(text.removeprefix("Error: ").split())[:MAX_CAUSE]] += 1
        if len(places) < SHOWN:
            places.append(where)

    def log(self) -> None:
        """Log what was counted: for each tool how many calls, the commonest causes, and the first ids."""
        for tool, (causes, places) in self._of_tools.items():
            total, most = causes.total(), causes.most_common(SHOWN)
            if total == 1:
                logger.warning("tool %s: %s %s", tool, most[0][0], places[0])
                continue
            told = "; ".join(f"{count} x {cause}" for cause, count in most)
            others = len(causes) - len(most)
            more = f"; and {others} other causes" if others else ""
            logger.warning(
                "tool %s: %s calls got INFRA: %s%s; first: %s", tool, total, told, more, ", ".join(places)
            )


def sound(result: ToolResult) -> ToolResult:
    """Return the result with text that can be written as UTF-8 and a reward that is a float.

    Raises:
        TypeError: If a part has no text, or the reward is not a number.
        ValueError: If the reward is not a number.
    """
    text = result.text
    if not (text.isascii() or is_encodable(text)):
        parts = tuple(TextPart(encodable(str(part))) for part in result.parts)
        result = replace(result, parts=parts)
    if result.reward is None or type(result.reward) is float:
        return result
    return replace(result, reward=float(result.reward))


def _failure(status: Status, text: str) -> ToolResult:
    return ToolResult.from_text(text, status=status)


def _looked_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
