"""`SpeculativeCalls`: start the calls of a message while the model is still writing it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from torchrl_agentic.dispatch import Dispatcher, Session
from torchrl_agentic.messages import ParsedCall, ToolResult
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.streaming import CallFailed, CallReady
from torchrl_agentic.tokens.encoding import decode
from torchrl_agentic.tools.base import Effects

logger = logging.getLogger(__name__)


class Detokenizer:
    """Decodes ids piece by piece; characters that later ids may change are held back.

    Args:
        tokenizer: A tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._read = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Append ids, and return the text that they complete.

        Args:
            ids: Token ids.
        """
        self._ids += ids
        known = decode(self._tokenizer, self._ids[self._start : self._read])
        text = decode(self._tokenizer, self._ids[self._start :])
        if len(text) <= len(known) or text.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return text[len(known) :]


class SpeculativeCalls:
    """Starts the calls of one message as soon as each is complete, if its tool has no effects.

    A call starts only if nothing can come between it and its result: its tool has neither effects nor a
    session, and no call before it is exclusive. Every other call runs once the message is complete. Each call
    runs once: the results of early calls are those of the turn.

    Args:
        dispatcher: Runs the calls.
        session: Session of the trajectory, before the turn.
        parser: Reads the message.
        tokenizer: Tokenizer of the engine.
        stop_ids: Ids that end an answer, which are not part of the message.

    Attributes:
        n_started: Number of calls that were started.
        starts: Loop times at which they were started, by their number in the message.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        session: Session,
        parser: ToolCallParser,
        *,
        tokenizer: Any,
        stop_ids: Sequence[int],
    ) -> None:
        self._dispatcher, self._session = dispatcher, session
        self._stream = parser.stream(tools=dispatcher.schemas, turn=session.turn)
        self._text = Detokenizer(tokenizer)
        self._stop_ids = frozenset(stop_ids)
        self._ids = session.copy_ids()
        self._n_seen = 0
        self._may_start = True
        self._started: dict[int, tuple[ParsedCall, asyncio.Task[ToolResult]]] = {}
        self.n_started = 0
        self.starts: dict[int, float] = {}

    def feed(self, ids: Sequence[int]) -> None:
        """Read further ids of the message, and start the calls that they complete.

        Args:
            ids: Sampled token ids.
        """
        if not self._may_start:
            return
        try:
            events = self._stream.feed(self._text.feed([one for one in ids if one not in self._stop_ids]))
        except Exception:
            logger.exception("a stream of %r raised; no more calls start early", self._session.trajectory)
            self._may_start = False
            return
        for event in events:
            if isinstance(event, CallReady | CallFailed):
                self._see(event.call, has_failed=isinstance(event, CallFailed))

    def _see(self, call: ParsedCall, *, has_failed: bool) -> None:
        """Start a call if it may start, and count it."""
        number, self._n_seen = self._n_seen, self._n_seen + 1
        call = Session.with_unique_id(call, self._ids)
        bound = self._dispatcher.bound.get(call.tool)
        if bound is not None and bound.effects.exclusive:
            self._may_start = False
        if has_failed or bound is None or not self._may_start:
            return
        limit = self._dispatcher.max_calls_per_turn
        if limit is not None and number >= limit:
            return
        is_pure = bound.effects is Effects.PURE and not bound.has_sessions and bound.world is None
        if not is_pure or bound.tool.wants_state:
            return
        self._session.choose_tools()
        allowed = self._session.allowed
        if allowed is not None and call.tool not in allowed:
            return
        self.n_started += 1
        self.starts[number] = asyncio.get_running_loop().time()
        self._started[number] = call, asyncio.create_task(self._run(call))

    async def _run(self, call: ParsedCall) -> ToolResult:
        """Run one call in a session of its own, which stands for that of the trajectory."""
        async with self._session.twin() as twin:
            (results,) = await self._dispatcher.run([(twin, (call,), None)])
        return results[0]

    async def run(self, calls: Sequence[ParsedCall], state: Any) -> list[ToolResult]:
        """Run the calls of the complete message, but for those that have started.

        Args:
            calls: Calls of the message, with ids that are unique in the trajectory.
            state: View of the row, for tools with `wants_state`.

        Returns:
            One result per call, in the order of the calls.
        """
        early = {
            number: task
            for number, (call, task) in self._started.items()
            if number < len(calls) and _is_same(call, calls[number])
        }
        for number, (_, task) in self._started.items():
            if number not in early:
                logger.error("the stream read call %d of %s differently", number, self._session.trajectory)
                task.cancel()
                del self.starts[number]
        rest = [number for number in range(len(calls)) if number not in early]
        bound = [self._dispatcher.bound.get(calls[number].tool) for number in rest]
        if any(one is not None and one.effects.exclusive for one in bound):
            await asyncio.gather(*early.values())
        waited = asyncio.gather(*early.values())
        results: list[ToolResult | None] = [None] * len(calls)
        if rest:
            others = [calls[number] for number in rest]
            (found,) = await self._dispatcher.run([(self._session, others, state)], places=[rest])
            for number, result in zip(rest, found, strict=True):
                results[number] = result
        else:
            self._session.turn += 1
        for number, result in zip(early, await waited, strict=True):
            results[number] = result
        self._started.clear()
        return [result for result in results if result is not None]

    async def close(self) -> None:
        """Cancel the calls that have started and whose message never became complete."""
        tasks = [task for _, task in self._started.values()]
        self._started.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_same(early: ParsedCall, call: ParsedCall) -> bool:
    return (early.tool, early.args, early.call_id) == (call.tool, call.args, call.call_id)
