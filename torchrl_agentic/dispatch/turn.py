"""Run the calls of turns: check them, order them by their effects, start and stop them."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import pydantic_core

from torchrl_agentic.dispatch import model_messages
from torchrl_agentic.dispatch.crashes import Crashes
from torchrl_agentic.dispatch.event_loop import WorkerThreads
from torchrl_agentic.dispatch.session import Session
from torchrl_agentic.errors import SchemaValidationError, UnreadableResult
from torchrl_agentic.messages import JSON, ParsedCall, Status, TextPart, Timing, ToolResult, is_encodable
from torchrl_agentic.tools.base import Effects, Tool, ToolContext, Toolset
from torchrl_agentic.tools.row_data import NO_DATA

if TYPE_CHECKING:
    from torchrl_agentic.limits import Limiter, Slot
    from torchrl_agentic.tools.schema import Validator
    from torchrl_agentic.tools.schema_simplify import Schema

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""Seconds that a cancelled turn waits for its calls to end."""
MAX_CAUSE = 500
"""Characters of a cause that are logged."""
SHOWN = 3
"""Number of causes, and of ids, in the log line about the INFRA results of a step."""


@dataclass(frozen=True, slots=True)
class BoundTool:
    """A tool, and what is computed once when it is added.

    Attributes:
        tool: The tool.
        effects: Effects of its calls, which decide their order.
        has_sessions: True if each trajectory opens the tool for itself.
        validator: Checks arguments against the tool's schema.
        limiter: Limiter that each call waits for, or None.
        world: Toolset whose state the tool shares (see `Toolset.session`), or None.
        secret_args: Names of the arguments that its schema declares secret.
    """

    tool: Tool
    effects: Effects
    has_sessions: bool
    validator: Validator
    limiter: Limiter | None
    world: Toolset | None = None
    secret_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that may run.

    Attributes:
        bound: The tool.
        args: Arguments as the schema accepts them.
        notes: Notes of the parser and of the validation, for the result.
    """

    bound: BoundTool
    args: Mapping[str, JSON]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that does not run.

    Attributes:
        result: The result that tells the model why.
    """

    result: ToolResult


Resolved: TypeAlias = Ready | Refusal


def resolve(
    call: ParsedCall,
    number: int,
    tools: Mapping[str, BoundTool],
    *,
    allowed: Collection[str] | None = None,
    max_calls: int | None = None,
    validate: bool = True,
) -> Resolved:
    """Decide whether a call may run.

    Args:
        call: The call as the parser read it.
        number: Index of the call in its message, from 0.
        tools: Tools by name.
        allowed: Names of the tools that the trajectory may use in this turn, or None for all.
        max_calls: Number of calls that a message may contain, or None for no limit.
        validate: Whether arguments are checked against the schema of the tool.

    Returns:
        `Ready`, or `Refusal` with the result for the model. Nothing is changed and nothing is opened.
    """
    if call.error is not None:
        return Refusal(model_messages.unreadable_call(call.error))
    if max_calls is not None and number >= max_calls:
        return Refusal(model_messages.too_many_calls(max_calls))
    bound = tools.get(call.tool)
    if bound is None or (allowed is not None and call.tool not in allowed):
        available = [name for name in tools if allowed is None or name in allowed]
        return Refusal(model_messages.unknown_tool(call.tool, available))
    if not validate:
        return Ready(bound, call.args, call.notes)
    try:
        args, notes = bound.validator.accept(call.args)
    except SchemaValidationError as error:
        return Refusal(model_messages.invalid_arguments(call.tool, error))
    return Ready(bound, args, (*call.notes, *notes) if notes else call.notes)


def conflict(first: Effects, second: Effects) -> bool:
    """Return True if two calls of one trajectory must not overlap.

    Args:
        first: Effects of one call.
        second: Effects of the other call.
    """
    if first.exclusive or second.exclusive:
        return True
    return bool(first.writes & (second.reads | second.writes) or second.writes & first.reads)


def dependencies(effects: Sequence[Effects]) -> list[set[int]]:
    """Return for each call the earlier calls that it waits for, numbered in the order the model wrote them.

    Only the latest conflicts are listed, because the others follow: if 2 waits for 1 and 1 for 0, then 2
    lists only 1. The work is linear in the number of calls and resources.

    >>> write, read = Effects(writes=["file"]), Effects(reads=["file"])
    >>> dependencies([write, read, read, write])
    [set(), {0}, {0}, {1, 2}]

    Args:
        effects: Effects of the calls of one trajectory.
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


class _RunClock:
    """Stops a call at its own deadline; paused while the call waits in a queue of the tool itself.

    Attributes:
        queued_s: Seconds that the clock was paused.
        deadline: Time of the event loop's clock at which the call is stopped, by this clock or with its turn,
            or None.
    """

    __slots__ = (
        "_entry", "_expire", "_last", "_loop", "_own", "_stopped_at", "_stops", "_timer", "deadline",
        "queued_s",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own: float | None,
        last: float | None,
        expire: Callable[[_Entry], None],
        entry: _Entry,
    ) -> None:
        self._loop, self._expire, self._entry = loop, expire, entry
        self._stops = 0
        self.queued_s = 0.0
        self._own, self._last = own, last
        self.deadline = own if last is None else last if own is None else min(own, last)
        self._timer = None if own is None else loop.call_at(own, expire, entry)

    def stop(self) -> None:
        """Pause the clock; it goes on after as many calls of `go_on`."""
        self._stops += 1
        if self._stops == 1:
            self._stopped_at = self._loop.time()
            if self._timer is not None:
                self._timer.cancel()

    def go_on(self) -> float | None:
        """Resume the clock, and return the new deadline."""
        self._stops -= 1
        if self._stops == 0:
            self._count()
            self._timer = self._armed()
        return self.deadline

    def end(self) -> None:
        """End the clock, whether it runs or is paused."""
        if self._stops:
            self._count()
        self._own = self.deadline = None
        if self._timer is not None:
            self._timer.cancel()

    def _count(self) -> None:
        paused_s = self._loop.time() - self._stopped_at
        self.queued_s += paused_s
        if self._own is not None:
            self._own += paused_s
            self.deadline = self._own if self._last is None else min(self._own, self._last)

    def _armed(self) -> asyncio.TimerHandle | None:
        own = self._own
        return None if own is None else self._loop.call_at(own, self._expire, self._entry)


class _Entry:
    """A call between its resolution and its result."""

    __slots__ = (
        "began", "call", "clock", "dependents", "ready", "result", "slot", "task", "waits_for",
    )  # fmt: skip

    def __init__(self, call: ParsedCall) -> None:
        self.call = call
        self.ready: Ready | None = None
        self.result: ToolResult | None = None
        self.began: float | None = None
        self.slot: Slot | None = None
        self.task: asyncio.Task[None] | None = None
        self.clock: _RunClock | None = None
        self.waits_for = 0
        self.dependents: list[_Entry] = []


class TurnRun:
    """The calls of one turn of one trajectory.

    Args:
        runner: Its options.
        session: The trajectory.
        calls: Calls of the message, in the order the model wrote them.
        resolved: What `resolve` made of each call.
        state: View of the environment's row, for tools with `wants_state`.
        finished: Called once, when every call has its result.
        outages: Collects the INFRA results of the step.
    """

    def __init__(
        self,
        runner: TurnRunner,
        session: Session,
        calls: Sequence[ParsedCall],
        resolved: Sequence[Ready | Refusal],
        state: Any,
        finished: Callable[[], None],
        outages: Outages,
    ) -> None:
        self._runner = runner
        self._session = session
        self._resolved = resolved
        self._state = state
        self._finished = finished
        self._outages = outages
        self._loop = asyncio.get_running_loop()
        self._entries = [_Entry(call) for call in calls]
        self._open = len(self._entries)
        self._turn = session.turn
        self._started_at = self._loop.time()
        seconds = runner.per_turn_timeout
        self._last = None if seconds is None else self._started_at + seconds
        self._started = time.time()
        session.turn += 1

    def start(self) -> None:
        """Refuse the calls that may not run, order the others, and start those that wait for no other."""
        if not self._entries:
            self._finished()
            return
        runnable, effects = list[_Entry](), list[Effects]()
        for entry, resolved in zip(self._entries, self._resolved, strict=True):
            if isinstance(resolved, Ready):
                entry.ready = resolved
                runnable.append(entry)
                effects.append(resolved.bound.effects)
            else:
                self._finish(entry, resolved.result)
        if any(effect is not Effects.PURE for effect in effects):
            for entry, earlier in zip(runnable, dependencies(effects), strict=True):
                entry.waits_for = len(earlier)
                for index in earlier:
                    runnable[index].dependents.append(entry)
        for entry in runnable:
            if entry.waits_for == 0:
                entry.task = self._loop.create_task(self._perform(entry))

    def results(self) -> list[ToolResult]:
        """Return the results in the order of the calls, once the turn has finished."""
        return [entry.result for entry in self._entries if entry.result is not None]

    def expire(self) -> None:
        """Set TIMEOUT results for all calls that have not finished, because the time of the turn is over."""
        for entry in self._entries:
            if entry.result is None:
                seconds = self._runner.per_turn_timeout
                self._stop(entry, model_messages.turn_timeout(entry.call.tool, seconds))

    def cancel(self) -> None:
        """Cancel every call that has not finished; their tasks are among those that linger."""
        for entry in self._entries:
            if entry.result is None:
                self._stop(entry, model_messages.cancelled(entry.call.tool))

    async def _perform(self, entry: _Entry) -> None:
        """Run one call, and store its result."""
        self._finish(entry, await self._run(entry))

    async def _run(self, entry: _Entry) -> ToolResult | str:
        """Wait for the limiter of a call, open its session, and call the tool."""
        ready = entry.ready
        assert ready is not None
        bound = ready.bound
        try:
            if bound.limiter is not None:
                entry.slot = bound.limiter.slot()
                await entry.slot.acquire()
            entry.began = self._loop.time()
            seconds = self._runner.per_call_timeout
            own = None if seconds is None else entry.began + seconds
            entry.clock = _RunClock(self._loop, own, self._last, self._expire_call, entry)
            live = await self._session.live(bound.tool) if bound.has_sessions else bound.tool
            world = None if bound.world is None else await self._session.live(bound.world)
            value = await live.run(ready.args, self._context(entry, bound, live, world, entry.clock))
            is_plain = type(value) is str and is_encodable(value)
            return value if is_plain else _result(value)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and entry.result is not None:
                raise  # stopped by us, and its result is set
            try:
                return self._result_of(entry, error)
            except BaseException:  # an exception whose text cannot be read either
                return self._crash(entry, error)

    def _result_of(self, entry: _Entry, error: BaseException) -> ToolResult:
        """Return the result of a call that raised."""
        name = entry.call.tool
        if isinstance(error, pydantic_core.ValidationError):
            from torchrl_agentic.tools.schema import refusal_of

            error = refusal_of(error, entry.call.args if entry.ready is None else entry.ready.args) or error
        if (result := ToolResult.from_error(error, name)) is not None:
            return result.checked()
        if isinstance(error, asyncio.CancelledError):
            if entry.slot is not None and entry.slot.is_lost:
                from torchrl_agentic.limits.base import LOST

                return model_messages.unavailable(name, LOST)
            return model_messages.cancelled(name)
        return self._crash(entry, error)

    def _crash(self, entry: _Entry, error: BaseException) -> ToolResult:
        """Log a bug of a tool once; SystemExit counts, because it must not end the loop that all share."""
        if entry.result is None:
            count = self._runner.crashes.count(entry.call.tool, error)
            if count == 1:
                logger.error("tool %s crashed %s", entry.call.tool, self._where(entry), exc_info=error)
            elif set(str(count)[1:]) == {"0"}:
                kind = type(error).__name__
                logger.error("tool %s crashed %d times with this %s", entry.call.tool, count, kind)
        return model_messages.crashed(entry.call.tool, error)

    def _context(
        self, entry: _Entry, bound: BoundTool, live: Any, world: Any, clock: _RunClock
    ) -> ToolContext:
        session = self._session
        return ToolContext(
            entry.call.call_id,
            entry.call.tag,
            self._state if bound.tool.wants_state else None,
            getattr(live, "sandbox", None),
            getattr(live, "repl", None),
            self._runner.compose,
            session.row,
            session.trajectory,
            self._turn,
            clock.deadline,
            self._runner.threads,
            session.data if bound.tool.needs_row or bound.world is not None else NO_DATA,
            clock,
            world,
            bound.limiter,
            entry.slot,
            session.group,
        )

    def _expire_call(self, entry: _Entry) -> None:
        self._stop(entry, model_messages.call_timeout(entry.call.tool, self._runner.per_call_timeout))

    def _stop(self, entry: _Entry, result: ToolResult) -> None:
        """Set the result of a call that has not finished, and cancel its task."""
        task = entry.task if entry.task is not None and not entry.task.done() else None
        if task is not None:
            self._session.lingering.add(task)
            task.add_done_callback(self._session.lingering.discard)
            task.add_done_callback(_mark_retrieved)
            # Calls that depend on this one start when its task ends, or after a grace if it does not.
            dependents, entry.dependents = entry.dependents, []
            release = functools.partial(self._release, dependents)
            task.add_done_callback(lambda _: release())
            self._loop.call_later(CANCEL_GRACE_S, release)
        self._finish(entry, result)
        if task is not None:
            task.cancel(entry.result)  # so that a recorder inside the task can read what the model was told

    def _release(self, dependents: list[_Entry]) -> None:
        """Start calls that waited for another one; may be called again."""
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
            entry.clock = None  # breaks the cycle between the two, which only the collector would find
        if isinstance(answer, ToolResult) and answer.timing is not None:  # the tool queued the call itself
            queued_s = max(queued_s, answer.timing.queue_s)
        began = min(now, began + queued_s)
        timing = Timing(self._started, began - self._started_at, now - began)
        notes = entry.call.notes if entry.ready is None else entry.ready.notes
        if isinstance(answer, str):
            result = ToolResult((TextPart(answer),), timing=timing, notes=notes)
        else:
            result = answer.timed(timing, (*notes, *answer.notes))
        entry.result = result
        if result.status is Status.INFRA:
            self._outages.add(entry.call.tool, result.text, self._where(entry))
        if entry.slot is not None:
            if result.status is Status.INFRA:
                entry.slot.record(has_answered=False, reason=result.text)
            elif result.status is Status.OK and not (result.meta or {}).get("cached"):
                entry.slot.record(has_answered=True)
            entry.slot.close()
        self._release(entry.dependents)
        self._open -= 1
        if self._open == 0:
            self._finished()

    def _where(self, entry: _Entry) -> str:
        return f"(trajectory {self._session.trajectory}, turn {self._turn}, call {entry.call.call_id})"


class Outages:
    """The INFRA results of one step, logged in one line per tool, because a dead service fails every row."""

    def __init__(self) -> None:
        self._of_tools: dict[str, tuple[Counter[str], list[str]]] = {}

    def add(self, tool: str, text: str, where: str) -> None:
        """Count a result.

        Args:
            tool: Name of the tool.
            text: Text of the result.
            where: Ids of the trajectory, the turn and the call, for the log.
        """
        causes, places = self._of_tools.setdefault(tool, (Counter(), []))
        causes[" ".join(text.removeprefix("Error: ").split())[:MAX_CAUSE]] += 1
        if len(places) < SHOWN:
            places.append(where)

    def log(self) -> None:
        """Log for each tool the number of calls, the most frequent causes, and the first ids."""
        for tool, (causes, places) in self._of_tools.items():
            total, most = causes.total(), causes.most_common(SHOWN)
            if total == 1:
                logger.warning("tool %s: %s %s", tool, most[0][0], places[0])
                continue
            reasons = "; ".join(f"{count} x {cause}" for cause, count in most)
            others = len(causes) - len(most)
            more = f"; and {others} other causes" if others else ""
            logger.warning(
                "tool %s: %s calls got INFRA: %s%s; first: %s",
                tool,
                total,
                reasons,
                more,
                ", ".join(places),
            )


def _result(value: Any) -> ToolResult:
    """Return the result of a tool that has run.

    Raises:
        UnreadableResult: If what it returned cannot be read, whatever the reason.
    """
    try:
        return ToolResult.from_value(value).checked()
    except Exception as error:
        raise UnreadableResult(f"a tool returned a {type(value).__name__}: {error!r:.500}") from error


def _mark_retrieved(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a task, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()


class TurnRunner(ABC):
    """Runs the calls of turns, of any number of trajectories at once.

    Args:
        threads: Threads for blocking tools.
        per_call_timeout: Seconds that one run of any tool may take, or None.
        per_turn_timeout: Seconds that all calls of a turn may take, or None.
        validate_inputs: Whether arguments are checked against the tool's schema before it runs.
        max_calls_per_turn: Number of calls that a message may contain, or None.
        compose: Object that tools find as `ToolContext.compose`.

    Attributes:
        bound: The tools by name, in order.
        crashes: Counts the crashes of tools, so that each place is logged once.
    """

    def __init__(
        self,
        threads: WorkerThreads,
        *,
        per_call_timeout: float | None,
        per_turn_timeout: float | None,
        validate_inputs: bool,
        max_calls_per_turn: int | None,
        compose: Any,
    ) -> None:
        self.threads = threads
        self.per_call_timeout, self.per_turn_timeout = per_call_timeout, per_turn_timeout
        self.validate_inputs, self.max_calls_per_turn = validate_inputs, max_calls_per_turn
        self.compose = compose
        self.bound: dict[str, BoundTool] = {}
        self.crashes = Crashes()
        self._sessions: set[Session] = set()  # those of all forks
        self._schemas: Mapping[str, Schema] | None = None
        self._set_up: dict[int, Tool] = {}  # by identity, in the order of their set-up; shared with forks
        self._teardowns = [0]  # number of teardowns, in a list so that forks share it
        # Tools and number of teardowns at which all tools were last found set up.
        self._seen_ready: tuple[dict[str, BoundTool], int] | None = None

    @property
    def schemas(self) -> Mapping[str, Schema]:
        """JSON Schemas of the arguments by the names of the tools; parsers of untyped values read them."""
        if self._schemas is None:
            self._schemas = {name: entry.validator.schema for name, entry in self.bound.items()}
        return self._schemas

    def secret_args(self, tool: str) -> tuple[str, ...]:
        """Return the names of the arguments that the schema of a tool declares secret.

        Args:
            tool: Name of the tool, which may be unknown.
        """
        return self.bound[tool].secret_args if tool in self.bound else ()

    async def run(
        self,
        batch: Sequence[tuple[Session, Sequence[ParsedCall], Any]],
        *,
        places: Sequence[Sequence[int]] | None = None,
    ) -> list[list[ToolResult]]:
        """Run one turn of several trajectories at once.

        Args:
            batch: (session, calls, state) of each trajectory; `Session.begin_turn` has returned the calls.
            places: Place of each call in its message, if other calls of the message run elsewhere.

        Returns:
            The results of each trajectory, in the order of `batch` and of its calls.
        """
        if not self.is_ready:
            await self.setup()
        loop = asyncio.get_running_loop()
        all_done: asyncio.Future[None] = loop.create_future()
        open_turns = 0

        def one_finished() -> None:
            nonlocal open_turns
            open_turns -= 1
            if open_turns == 0 and not all_done.done():
                all_done.set_result(None)

        self._sessions.update(session for session, _, _ in batch)
        outages = Outages()
        turns: list[TurnRun] = []
        for number, (session, calls, state) in enumerate(batch):
            resolved = [
                resolve(
                    call,
                    index,
                    self.bound,
                    allowed=session.allowed,
                    max_calls=self.max_calls_per_turn,
                    validate=self.validate_inputs,
                )
                for index, call in zip(
                    range(len(calls)) if places is None else places[number], calls, strict=True
                )
            ]
            turns.append(TurnRun(self, session, calls, resolved, state, one_finished, outages))
        open_turns = len(turns) + 1  # one more until all have started
        for turn in turns:
            turn.start()
        one_finished()
        deadline = None
        if self.per_turn_timeout is not None:
            deadline = loop.call_later(self.per_turn_timeout, lambda: [turn.expire() for turn in turns])
        try:
            await all_done
        except asyncio.CancelledError:
            for turn in turns:  # before any await, which a second cancellation would end
                turn.cancel()
            if ending := {task for session, _, _ in batch for task in session.lingering}:
                await asyncio.wait(ending, timeout=CANCEL_GRACE_S)
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
            outages.log()
        return [turn.results() for turn in turns]

    @property
    def is_ready(self) -> bool:
        """True if every tool is set up; the answer is kept, because every turn asks."""
        seen = self._seen_ready
        if seen is not None and seen[0] is self.bound and seen[1] == self._teardowns[0]:
            return True
        found = all(id(bound.tool) in self._set_up for bound in self.bound.values())
        self._seen_ready = (self.bound, self._teardowns[0]) if found else None
        return found

    @abstractmethod
    async def setup(self) -> None:
        """Set up each tool that is not set up yet, one after the other.

        Raises:
            Exception: Any error of a tool's `setup`; the tools before it are torn down again.
        """
