"""`SimulatedEngine`: the timing of an inference server with continuous batching, without a model."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchrl_agentic.engines.base import Engine, EnginePressure, OnIds, Sampled
from torchrl_agentic.engines.request_checks import check_request, closed_error
from torchrl_agentic.engines.scripted_engine import AnswerCursor, ScriptPosition
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
        preempted: Number of times that a request lost its place because the KV cache was full.
        recomputed: Tokens of these requests that were computed again, those of their prompts included.
        preempted_share: Share of `busy_s` in which they were computed again, 0 to 1.
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
    preempted: int = 0
    recomputed: int = 0
    preempted_share: float = 0.0


@dataclass(slots=True, eq=False)
class _SimulatedRequest:
    key: str
    place: ScriptPosition | None
    prompt: Sequence[int]
    bound: int
    on_ids: OnIds | None
    future: asyncio.Future[Sampled]
    state: Literal["waiting", "running", "ended"] = "waiting"
    version: int = 0
    began: float = 0.0  # progress of the batch at the first token, as if it had run ever since
    size: int = 0
    shown: int = 0  # tokens that on_ids got
    kept: int = 0  # tokens that it had when it was preempted
    due: int = -1  # number of its entry in the heap; others are out of date

    def show(self, count: int) -> None:
        """Call `on_ids` with what is new of the first `count` tokens."""
        place = self.place
        if self.on_ids is None or place is None or count <= self.shown:
            return
        piece = place.ids[place.done + self.shown : place.done + count]
        self.shown = count
        self.on_ids(piece)

    def fail(self, error: Exception) -> None:
        """Raise an error in `sample`, unless the request has ended."""
        if not self.future.done():
            self.future.set_exception(error)


class _Batch:
    """The requests that are decoded: how far they are, and the KV cache that they hold.

    Attributes:
        running: The requests, in the order in which they began.
        progress: Tokens that a sequence decoded since the beginning would have.
        recomputed: Tokens that were computed again.
        busy_s: Seconds in which at least one request was decoded.
        recomputed_s: Seconds of these in which tokens were computed again.
    """

    def __init__(
        self, step_s: float, per_sequence_s: float, kv_tokens: int | None, prefill_tokens_per_s: float
    ) -> None:
        self._step_s, self._per_sequence_s = step_s, per_sequence_s
        self._kv_tokens, self._prefill_rate = kv_tokens, prefill_tokens_per_s
        self.running: dict[_SimulatedRequest, None] = {}
        self.progress = 0.0
        self.recomputed = 0
        self.busy_s = self.recomputed_s = 0.0
        self._kv_base = 0.0  # tokens in the cache less len(running) * progress, so that it only jumps
        self._stall_s = 0.0  # time that is still needed to compute tokens again
        self._first: float | None = None
        self._last = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first to the latest call of `advance`."""
        return 0.0 if self._first is None else self._last - self._first

    @property
    def held(self) -> float:
        """Tokens in the KV cache."""
        return self._kv_base + len(self.running) * self.progress

    def step_of(self, count: int) -> float:
        """Return the seconds of a decode step with so many sequences."""
        return self._step_s + self._per_sequence_s * count

    def count_of(self, request: _SimulatedRequest) -> int:
        """Return the number of tokens that a running request has."""
        return int(self.progress - request.began + _EPSILON)

    def advance(self) -> None:
        """Bring the progress to the current time; before each change of what is decoded."""
        now = asyncio.get_running_loop().time()
        if self._first is None:
            self._first = now
        elif self.running:
            stall = min(self._stall_s, now - self._last)
            self._stall_s -= stall
            self.recomputed_s += stall
            self.progress += (now - self._last - stall) / self.step_of(len(self.running))
            self.busy_s += now - self._last
        self._last = now

    def fits(self, request: _SimulatedRequest) -> bool:
        """Return True if the KV cache has room for a request, and for a token of each that runs."""
        if self._kv_tokens is None or not self.running:
            return True
        needed = len(request.prompt) + request.kept + len(self.running) + 1
        return self.held + needed <= self._kv_tokens

    def start(self, request: _SimulatedRequest) -> None:
        """Begin to decode a request; what it had when it was preempted is computed again."""
        if request.kept:
            tokens = len(request.prompt) + request.kept
            self.recomputed += tokens
            self._stall_s += tokens / self._prefill_rate
        request.state, request.began = "running", self.progress - request.kept
        self.running[request] = None
        self._kv_base += len(request.prompt) - request.began

    def stop(self, request: _SimulatedRequest, state: Literal["waiting", "ended"] = "ended") -> None:
        """Decode a request no longer."""
        if request in self.running:
            del self.running[request]
            self._kv_base -= len(request.prompt) - request.began
            if not self.running:
                self._kv_base = 0.0
        request.state, request.due = state, -1

    def preempt(self) -> Iterator[_SimulatedRequest]:
        """Free the KV cache of the requests that began last, until the others have room; yield them."""
        if self._kv_tokens is None:
            return
        while len(self.running) > 1 and self.held > self._kv_tokens - len(self.running) * _EPSILON:
            request = next(reversed(self.running))
            request.kept = self.count_of(request)
            self.stop(request, "waiting")
            yield request

    def time_of(self, progress: float) -> float:
        """Return the time at which a progress is reached, or the KV cache is full before."""
        ahead = progress - self.progress
        if self._kv_tokens is not None and len(self.running) > 1:
            ahead = min(ahead, (self._kv_tokens - self.held) / len(self.running))
        return self._last + self._stall_s + max(0.0, ahead) * self.step_of(len(self.running))


class _Deadlines:
    """A heap by the progress at which requests have their next piece or their end, with its timer.

    Args:
        piece_tokens: Number of tokens of a piece.
        fire: Called when the first request may be due.
    """

    def __init__(self, piece_tokens: int, fire: Callable[[], None]) -> None:
        self._piece_tokens, self._fire = piece_tokens, fire
        self._timer: asyncio.TimerHandle | None = None
        self._order = itertools.count()
        self._heap: list[tuple[float, int, _SimulatedRequest, int]] = []

    def push(self, request: _SimulatedRequest) -> None:
        """Add the next piece of a request, in place of an earlier one."""
        tokens = request.size
        if request.on_ids is not None:
            tokens = min(tokens, request.shown + self._piece_tokens)
        request.due = next(self._order)
        heapq.heappush(self._heap, (request.began + tokens, request.due, request, tokens))

    @property
    def first(self) -> float | None:
        """The progress at which the next request is due, or None."""
        while self._heap and self._heap[0][1] != self._heap[0][2].due:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self) -> tuple[_SimulatedRequest, int]:
        """Return the request that `first` is about, and the number of tokens that it has then."""
        _, _, request, count = heapq.heappop(self._heap)
        return request, count

    def arm(self, batch: _Batch) -> None:
        """Set the timer to the first request; one that is set earlier stays, and looks again."""
        if self.first is None:
            return
        when = batch.time_of(self.first)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._fire()

    def clear(self) -> None:
        """Forget all requests."""
        self._heap.clear()

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()


class SimulatedEngine(Engine):
    """An engine with the timing of an inference server with continuous batching, on the loop's clock.

    One decode step with n sequences takes `step_s + n * per_sequence_s` and gives each of them a token. At
    most `max_concurrent` sequences are decoded at once; others wait in their order. Prefill takes
    no time. The defaults resemble a model of 8 billion parameters on one GPU: 14,035 tokens/s with 256
    sequences. A request costs O(log n), so that thousands in flight cost little.

    With `kv_tokens`, a running request holds the tokens of its prompt and of its answer so far in the KV
    cache, and a request begins only if its tokens fit. When the cache is full, the request that began last is
    preempted, as in vLLM: its tokens are freed, it waits in front of all others, and once it fits again they
    are computed anew, at `prefill_tokens_per_s`, while nothing is decoded. Nothing else is cached.

    Use it with `run_skipping`, where hours of decoding take no time. `update` ends each running request with
    the ids that it has so far; a request that resumes after them gets the rest of the same answer.

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
        kv_tokens: Number of tokens that the KV cache holds, which bounds prompt and answer together too;
            None: no bound.
        prefill_tokens_per_s: Tokens per second that are computed again after a preemption.

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
        kv_tokens: int | None = None,
        prefill_tokens_per_s: float = 25_000.0,
    ) -> None:
        check_seconds("step_s", step_s)
        check_count("max_concurrent", max_concurrent, optional=False)
        check_count("piece_tokens", piece_tokens, optional=False)
        check_count("kv_tokens", kv_tokens)
        if prefill_tokens_per_s <= 0:
            raise ValueError(f"prefill_tokens_per_s must be above 0; got {prefill_tokens_per_s}")
        if per_sequence_s < 0 or update_s < 0:
            raise ValueError(f"seconds must be 0 or more; got {per_sequence_s=}, {update_s=}")
        self.version = 0
        self.max_concurrent = max_concurrent
        self.context_length, self._log_prob = context_length, log_prob
        self._update_s, self._kv_tokens = update_s, kv_tokens
        self._cursor = AnswerCursor(answers)
        self._waiting: deque[_SimulatedRequest] = deque()
        self._batch = _Batch(step_s, per_sequence_s, kv_tokens, prefill_tokens_per_s)
        self._deadlines = _Deadlines(piece_tokens, self._fire)
        self._updates = 0  # updates that load weights right now
        self._tokens = self._finished = self._aborted = self._peak = self._preempted = 0
        self._is_closed = False
        self._lost, self._lost_until = "", -math.inf

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Return the next answer of a trajectory, after the time that its decoding takes."""
        bounds = [each for each in (self.context_length, self._kv_tokens) if each is not None]
        bound = check_request(len(ids), max_tokens, min(bounds, default=None))
        self._check_there()
        loop = asyncio.get_running_loop()
        request = _SimulatedRequest(key, None, ids, bound, on_ids, loop.create_future())
        self._batch.advance()
        self._waiting.append(request)
        self._admit()
        try:
            return await request.future
        finally:
            if request.state != "ended":  # cancelled
                self._batch.advance()
                self._batch.stop(request)
                self._admit()

    async def update(self, weights: Any) -> int:
        """Abort the requests that run, wait for `update_s`, and raise the version by one.

        Args:
            weights: Ignored.

        Raises:
            InfrastructureError: If the engine is lost or closed.
        """
        self._check_there()
        self._batch.advance()
        for request in list(self._batch.running):
            self._settle(request, self._batch.count_of(request))
        for request in list(self._waiting):
            if request.kept and request.state == "waiting":
                self._settle(request, request.kept)
        self._updates += 1
        try:
            if self._update_s:
                await asyncio.sleep(self._update_s)
                self._check_there()
            self.version += 1
            return self.version
        finally:
            self._updates -= 1
            self._batch.advance()
            self._admit()

    async def close(self) -> None:
        """End all requests with InfrastructureError; later ones raise it too."""
        self._is_closed = True
        self._fail(closed_error(self))
        self._deadlines.stop()

    def lose_requests(
        self, message: str = "the engine was lost", *, for_s: float = 0.0, keeps_ids: bool = False
    ) -> None:
        """End all requests with InfrastructureError, as an engine that crashes.

        Args:
            message: Message of the error.
            for_s: Seconds in which later requests and updates fail too; then the engine is there again.
            keeps_ids: End requests with the ids that they have and the finish "aborted" instead, as a server
                whose streams break off.

        Raises:
            ValueError: If `for_s` is negative.
        """
        if not for_s >= 0:
            raise ValueError(f"for_s must be 0 or more; got {for_s}")
        self._lost, self._lost_until = message, asyncio.get_running_loop().time() + for_s
        if keeps_ids:
            self._batch.advance()
            for request in list(self._batch.running):
                self._settle(request, self._batch.count_of(request))
        self._fail(InfrastructureError(message))

    def _check_there(self) -> None:
        if self._is_closed:
            raise closed_error(self)
        if asyncio.get_running_loop().time() < self._lost_until:
            raise InfrastructureError(self._lost)

    def load(self) -> EngineLoad:
        """Return the work of the engine since its first request; to be called on its event loop."""
        self._batch.advance()
        elapsed, busy = self._batch.elapsed_s, self._batch.busy_s
        rate = self._tokens / elapsed if elapsed else 0.0
        return EngineLoad(
            tokens=self._tokens,
            finished=self._finished,
            aborted=self._aborted,
            busy_s=busy,
            elapsed_s=elapsed,
            peak=self._peak,
            tokens_per_s=rate,
            idle_share=1 - busy / elapsed if elapsed else 0.0,
            utilization=rate / self.saturated_tokens_per_s,
            preempted=self._preempted,
            recomputed=self._batch.recomputed,
            preempted_share=self._batch.recomputed_s / busy if busy else 0.0,
        )

    async def pressure(self) -> EnginePressure | None:
        """Return the use of the KV cache; None without `kv_tokens`."""
        if self._kv_tokens is None:
            return None
        self._batch.advance()
        waiting = sum(request.state == "waiting" for request in self._waiting)
        use = min(1.0, self._batch.held / self._kv_tokens)
        return EnginePressure(use, waiting, len(self._batch.running), self._preempted)

    @property
    def saturated_tokens_per_s(self) -> float:
        """Tokens per second with all places taken."""
        return self.max_concurrent / self._batch.step_of(self.max_concurrent)

    def _admit(self) -> None:
        """Begin requests that wait while places are free, then set the timer."""
        while self._waiting and len(self._batch.running) < self.max_concurrent and not self._updates:
            request = self._waiting[0]
            if request.state == "waiting" and not self._batch.fits(request):
                break
            self._waiting.popleft()
            if request.state == "waiting":
                self._begin(request)
        self._peak = max(self._peak, len(self._batch.running))
        self._deadlines.arm(self._batch)

    def _begin(self, request: _SimulatedRequest) -> None:
        if not request.kept:
            try:
                request.place = place = self._cursor.find(request.key, request.prompt)
            except Exception as error:  # of the caller's function
                request.state = "ended"
                request.future.set_exception(error)
                return
            request.version = self.version
            request.size = min(request.bound, len(place.ids) - place.done)
        self._batch.start(request)
        self._deadlines.push(request)

    def _fire(self) -> None:
        self._batch.advance()
        while (first := self._deadlines.first) is not None and first <= self._batch.progress + _EPSILON:
            request, count = self._deadlines.pop()
            if count == request.size:
                self._settle(request, count)
            elif self._show(request, count):
                self._deadlines.push(request)
        for request in self._batch.preempt():
            self._waiting.appendleft(request)
            self._preempted += 1
        self._admit()

    def _show(self, request: _SimulatedRequest, count: int) -> bool:
        """Pass the first tokens of a request on; return False if that ended it."""
        try:
            request.show(count)
        except Exception as error:  # of the caller's function
            self._batch.stop(request)
            request.fail(error)
        return request.state == "running"

    def _settle(self, request: _SimulatedRequest, count: int) -> None:
        """End a request with its first tokens; it is aborted unless these are all."""
        place, count = request.place, min(count, request.size)
        assert place is not None
        self._show(request, count)
        if request.state == "ended":
            return
        self._batch.stop(request)
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

    def _fail(self, error: InfrastructureError) -> None:
        self._batch.advance()
        for request in [*self._batch.running, *self._waiting]:
            self._batch.stop(request)
            request.fail(error)
        self._waiting.clear()
        self._deadlines.clear()
