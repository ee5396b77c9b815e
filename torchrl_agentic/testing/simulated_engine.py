"""`SimulatedEngine`: the timing of an inference server with continuous batching, without a model."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_agentic.engines.base import Engine, OnIds, Sampled
from torchrl_agentic.engines.request_checks import check_request, closed_error
from torchrl_agentic.engines.scripted_engine import AnswerCursor, Place
from torchrl_agentic.errors import InfrastructureError, check_count, check_seconds

_EPSILON = 1e-6
"""Rounding error of the number of tokens that a sequence has advanced."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Work of a simulated engine since its first request.

    Attributes:
        tokens: Sampled tokens that were delivered.
        finished: Requests that ended with a stop token or at their bound.
        aborted: Requests that an update ended.
        busy_s: Seconds in which at least one request was decoded.
        elapsed_s: Seconds since the first request.
        peak: Highest number of requests decoded at once.
        tokens_per_s: `tokens / elapsed_s`.
        idle_share: Share of the time in which nothing was decoded, 0 to 1.
        utilization: `tokens_per_s` as a share of what the engine decodes with all places taken.
    """

    tokens: int
    finished: int
    aborted: int
    busy_s: float
    elapsed_s: float
    peak: int
    tokens_per_s: float
    idle_share: float
    utilization: float


@dataclass(slots=True, eq=False)
class _Request:
    key: str
    place: Place | None
    prompt: Sequence[int]
    bound: int
    on_ids: OnIds | None
    future: asyncio.Future[Sampled]
    state: Literal["waiting", "running", "ended"] = "waiting"
    version: int = 0
    began: float = 0.0  # progress of the engine at the first token
    size: int = 0
    shown: int = 0  # tokens that on_ids got


class SimulatedEngine(Engine):
    """An engine that takes the time of an inference server with continuous batching, by the loop's clock.

    One decode step with n sequences takes `step_s + n * per_sequence_s` and gives each of them a token. At
    most `max_concurrent` sequences are decoded at once; further requests wait in their order. Prefill takes
    no time. The defaults resemble a model of 8 billion parameters on one GPU: 14,035 tokens/s with 256
    sequences. A request costs O(log n), so that thousands in flight cost little.

    Use it with `run_skipping`, where hours of decoding take no time. `update` ends each running request with
    the ids that it has so far; a request that resumes behind them gets the rest of the same answer.

    Args:
        answers: Called with (key, turn, prompt ids) once per answer, turns counted from 0; returns the ids
            of the whole answer, a stop token included. Cancelled, failed and aborted requests do not count
            as a turn. An answer longer than `max_tokens` is cut there and has the finish "length".
        step_s: Seconds of a decode step without sequences.
        per_sequence_s: Seconds that each sequence adds to a step.
        max_concurrent: Number of sequences decoded at once.
        context_length: Bound on prompt and answer together, in tokens; None: no bound.
        log_prob: Log-probability of each id, in nats; None: the results have none.
        piece_tokens: Number of tokens that `on_ids` gets at a time.
        update_s: Seconds that an update takes, in which nothing is decoded and requests wait.

    Attributes:
        version: Number of updates so far.
        max_concurrent: Number of sequences decoded at once.
        context_length: Bound on prompt and answer together, in tokens; None: no bound.
    """

    def __init__(
        self,
        answers: Callable[[str, int, Sequence[int]], Sequence[int]],
        *,
        step_s: float = 0.008,
        per_sequence_s: float = 4e-5,
        max_concurrent: int = 256,
        context_length: int | None = None,
        log_prob: float | None = -1.0,
        piece_tokens: int = 8,
        update_s: float = 0.0,
    ) -> None:
        check_seconds("step_s", step_s)
        check_count("max_concurrent", max_concurrent, optional=False)
        check_count("piece_tokens", piece_tokens, optional=False)
        if per_sequence_s < 0 or update_s < 0:
            raise ValueError(f"seconds must be 0 or more; got {per_sequence_s=}, {update_s=}")
        self.version = 0
        self.max_concurrent = max_concurrent
        self._step_s, self._per_sequence_s = step_s, per_sequence_s
        self.context_length, self._log_prob = context_length, log_prob
        self._piece_tokens, self._update_s = piece_tokens, update_s
        self._cursor = AnswerCursor(answers)
        self._order = itertools.count()
        self._waiting: deque[_Request] = deque()
        # A heap by the progress at which requests have their next piece or their end, of so many tokens.
        self._due: list[tuple[float, int, _Request, int]] = []
        self._running: dict[_Request, None] = {}  # in the order in which they began
        self._progress = 0.0  # tokens that a sequence decoded since the beginning would have
        self._first = self._last = self._busy_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._updates = 0  # updates that load weights right now
        self._tokens = self._finished = self._aborted = self._peak = 0
        self._has_begun = self._is_closed = False

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Return the next answer of a trajectory, after the time that its decoding takes."""
        bound = check_request(len(ids), max_tokens, self.context_length)
        if self._is_closed:
            raise closed_error(self)
        loop = asyncio.get_running_loop()
        request = _Request(key, None, ids, bound, on_ids, loop.create_future())
        self._advance()
        self._waiting.append(request)
        self._admit()
        try:
            return await request.future
        finally:
            if request.state != "ended":  # cancelled
                self._advance()
                self._leave(request)
                self._admit()

    async def update(self, weights: Any) -> int:
        """Abort the requests that run, wait for `update_s`, and raise the version by one.

        Args:
            weights: Ignored.
        """
        self._advance()
        for request in list(self._running):
            self._settle(request, int(self._progress - request.began + _EPSILON))
        self._updates += 1
        try:
            if self._update_s:
                await asyncio.sleep(self._update_s)
            self.version += 1
            return self.version
        finally:
            self._updates -= 1
            self._advance()
            self._admit()

    async def close(self) -> None:
        """End all requests with InfrastructureError; later ones raise it too."""
        self._is_closed = True
        self._fail(closed_error(self))
        if self._timer is not None:
            self._timer.cancel()

    def lose_requests(self, message: str = "the engine was lost") -> None:
        """End all requests with InfrastructureError, as an engine that crashes; later ones are answered.

        Args:
            message: Message of the error.
        """
        self._fail(InfrastructureError(message))

    def load(self) -> EngineLoad:
        """Return the work of the engine since its first request; to be called on its event loop."""
        self._advance()
        elapsed = self._last - self._first
        rate = self._tokens / elapsed if elapsed else 0.0
        return EngineLoad(
            tokens=self._tokens,
            finished=self._finished,
            aborted=self._aborted,
            busy_s=self._busy_s,
            elapsed_s=elapsed,
            peak=self._peak,
            tokens_per_s=rate,
            idle_share=1 - self._busy_s / elapsed if elapsed else 0.0,
            utilization=rate / self.saturated_tokens_per_s,
        )

    @property
    def saturated_tokens_per_s(self) -> float:
        """Tokens per second with all places taken."""
        return self.max_concurrent / self._step_of(self.max_concurrent)

    def _step_of(self, count: int) -> float:
        return self._step_s + self._per_sequence_s * count

    def _advance(self) -> None:
        """Bring the progress to the current time; before each change of what is decoded."""
        now = asyncio.get_running_loop().time()
        if not self._has_begun:
            self._first, self._has_begun = now, True
        elif self._running:
            self._progress += (now - self._last) / self._step_of(len(self._running))
            self._busy_s += now - self._last
        self._last = now

    def _admit(self) -> None:
        """Begin requests that wait while places are free, then set the timer."""
        while self._waiting and len(self._running) < self.max_concurrent and not self._updates:
            request = self._waiting.popleft()
            if request.state == "waiting":
                self._begin(request)
        self._peak = max(self._peak, len(self._running))
        self._arm()

    def _begin(self, request: _Request) -> None:
        try:
            request.place = place = self._cursor.find(request.key, request.prompt)
        except Exception as error:  # of the caller's function
            request.state = "ended"
            request.future.set_exception(error)
            return
        request.state, request.version, request.began = "running", self.version, self._progress
        request.size = min(request.bound, len(place.ids) - place.done)
        self._running[request] = None
        self._push(request)

    def _push(self, request: _Request) -> None:
        tokens = request.size
        if request.on_ids is not None:
            tokens = min(tokens, request.shown + self._piece_tokens)
        heapq.heappush(self._due, (request.began + tokens, next(self._order), request, tokens))

    def _arm(self) -> None:
        """Set the timer to the next piece or end; one that is set earlier stays, and looks again."""
        while self._due and self._due[0][2].state == "ended":
            heapq.heappop(self._due)
        if not self._due:
            return
        delay = max(0.0, self._due[0][0] - self._progress) * self._step_of(len(self._running))
        when = self._last + delay
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._advance()
        while self._due and (
            self._due[0][2].state == "ended" or self._due[0][0] <= self._progress + _EPSILON
        ):
            _, _, request, count = heapq.heappop(self._due)
            if request.state == "ended":
                continue
            if count == request.size:
                self._settle(request, count)
            else:
                self._show(request, count)
                if request.state == "running":
                    self._push(request)
        self._admit()

    def _show(self, request: _Request, count: int) -> None:
        """Call `on_ids` with what is new."""
        place = request.place
        if request.on_ids is None or place is None or count <= request.shown:
            return
        piece = place.ids[place.done + request.shown : place.done + count]
        request.shown = count
        try:
            request.on_ids(piece)
        except Exception as error:  # of the caller's function
            self._leave(request)
            if not request.future.done():
                request.future.set_exception(error)

    def _settle(self, request: _Request, count: int) -> None:
        """End a request with its first tokens; it is aborted unless these are all."""
        place, count = request.place, min(count, request.size)
        assert place is not None
        self._show(request, count)
        if request.state == "ended":
            return
        self._leave(request)
        if request.future.done():
            return
        found = place.ids[place.done : place.done + count]
        outcome: Literal["stop", "length", "aborted"] = "aborted"
        if count >= request.size:
            outcome = "stop" if place.done + count == len(place.ids) else "length"
            self._cursor.finish(request.key, place.turn)
            self._finished += 1
        else:
            self._aborted += 1
        self._tokens += count
        known = None if self._log_prob is None else [self._log_prob] * count
        request.future.set_result(Sampled(found, known, outcome, request.version))

    def _leave(self, request: _Request) -> None:
        request.state = "ended"
        self._running.pop(request, None)

    def _fail(self, error: InfrastructureError) -> None:
        self._advance()
        for request in [*self._running, *self._waiting]:
            self._leave(request)
            if not request.future.done():
                request.future.set_exception(error)
        self._waiting.clear()
        self._due.clear()
