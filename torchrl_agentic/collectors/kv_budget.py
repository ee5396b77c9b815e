"""`KVBudget`: how many tokens may be at the engine, so that its KV cache is full and does not overflow."""

from __future__ import annotations

from torchrl_agentic.engines.base import EnginePressure
from torchrl_agentic.errors import check_count

ROOM = 0.92
"""Use of the KV cache below which the budget grows."""
FULL = 0.97
"""Use of the KV cache from which on the budget shrinks."""
EASE = 0.985
"""Factor of the budget when the KV cache is nearly full."""
BACKOFF = 0.95
"""Factor of the budget after preemptions."""
QUEUE = 1 / 8
"""Share of the running requests that may wait in the engine; with more, the budget does not grow."""
FIRST = 1 / 8
"""Share of the engine's concurrent requests that are sent before it has reported anything about them."""
START = 1 / 2
"""Growth with an answer before the KV cache was full for the first time, in requests."""
REST = 1 / 4
"""Answers to wait for after a decrease, as a share of the requests at the engine, unless it preempts."""
GROWTH = 1 / 24
"""Growth afterwards, while each request at the engine is answered once, as a share of the budget."""


class KVBudget:
    """Bound the tokens of the requests at an engine, by additive increase and multiplicative decrease.

    A request counts the tokens of its prompt and those that its answer is expected to have. The engine
    reports the share of its KV cache that is in use, and requests may share prefixes there; so the number of
    tokens that fits is found by trial.

    As in TCP, answers are the clock. Until the cache was nearly full for the first time, the budget grows by
    `START` requests with each answer: by half of itself while each request is answered once. Afterwards it
    grows by a fixed number of tokens in this time, `GROWTH` of the budget at the last decrease. It grows only
    if requests were held back and the cache has room.

    It shrinks by the factor `EASE` if the cache is nearly full, by `BACKOFF` after preemptions. Then it does
    not shrink again before the tokens at the engine are within it, and, without preemptions, `REST` of the
    requests are answered.

    Args:
        concurrent: Number of requests that the engine works on at once.

    Attributes:
        first: Number of requests before the first observation of any.
        size: Number of tokens that may be at the engine; None before the first observation of any requests.
    """

    def __init__(self, concurrent: int) -> None:
        check_count("concurrent", concurrent, optional=False)
        self.first = max(1, int(concurrent * FIRST))
        self.size: float | None = None
        self._step: float | None = None  # None: the cache was not full yet
        self._preempted: int | None = None
        self._rest = 0.0  # answers that must come before the budget shrinks again

    def observe(
        self, seen: EnginePressure, *, tokens: float, requests: int, answers: int, is_short: bool
    ) -> None:
        """Adapt the budget to what the engine reports.

        Args:
            seen: What it reports.
            tokens: Tokens of the requests that are at the engine.
            requests: Number of these requests.
            answers: Number of answers since the last observation.
            is_short: Whether requests were held back since the last observation.
        """
        before, self._preempted = self._preempted, seen.preempted
        has_preempted = before is not None and seen.preempted > before
        if not requests:
            return
        size = tokens if self.size is None else self.size
        self._rest -= answers
        is_within = tokens <= size and (has_preempted or self._rest <= 0)
        if self._step is None and not has_preempted and seen.kv_use < ROOM:
            size = max(size, tokens)  # answers may have become longer than they were expected to be
            growth = min(START * answers * tokens / requests, size * (ROOM / max(seen.kv_use, 1e-3) - 1))
        else:
            growth = (self._step or 0.0) * min(1.0, answers / requests)
        if has_preempted or seen.kv_use >= FULL:
            if is_within:  # otherwise the last decrease has not come into effect
                size = min(size, tokens) * (BACKOFF if has_preempted else EASE)
                self._step = size * GROWTH
                self._rest = requests * REST
        elif seen.kv_use >= ROOM:
            if self._step is None:
                self._step = size * GROWTH
        elif is_short and seen.waiting <= QUEUE * (seen.running + 1):
            size += growth
        self.size = max(1.0, size)
