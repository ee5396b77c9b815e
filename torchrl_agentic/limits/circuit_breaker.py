"""A circuit breaker: stops calls to a service that fails, and tries one now and then."""

from __future__ import annotations

import math
from typing import Literal

from torchrl_agentic.errors import InfrastructureError

LONGEST_S = 60.0
"""Longest time between two trial calls, in seconds."""


class CircuitOpen(InfrastructureError):
    """A call was not tried, because the calls before it failed.

    Args:
        retry_after: Seconds until the next call will be tried.

    Attributes:
        retry_after: Seconds until the next call will be tried.
    """

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the service failed repeatedly; it will be tried again in {retry_after:.1f} s")
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[CircuitOpen], tuple[float]]:
        return (CircuitOpen, (self.retry_after,))


class CircuitBreaker:
    """Opens after a number of failures in a row: no calls for some seconds, then one trial call at a time.

    A trial call that succeeds closes the circuit; one that fails doubles the seconds. All times are in
    seconds, of any clock.

    Args:
        failures: Number of failures in a row that open the circuit.
        seconds: Time for which it refuses calls at first.

    Attributes:
        is_trying: Whether a trial call is running.
    """

    __slots__ = ("_count", "_failures", "_first_s", "_seconds", "_until", "is_trying")

    def __init__(self, failures: int, seconds: float) -> None:
        self._failures, self._first_s, self._seconds = failures, seconds, seconds
        self._count = 0
        self._until = -math.inf  # end of the refusals
        self.is_trying = False

    def state(self, now: float) -> Literal["closed", "open", "half_open"]:
        """Return "closed" (calls pass), "open" (refused) or "half_open" (tried one at a time)."""
        if self._count < self._failures:
            return "closed"
        return "open" if now < self._until else "half_open"

    def refusal(self, now: float) -> float | None:
        """Return for how many more seconds calls are refused, or None if they are not."""
        return self._until - now if self.state(now) == "open" else None

    def holds(self, now: float) -> bool:
        """Return whether calls must wait for the end of a trial call."""
        return self.is_trying and self.state(now) == "half_open"

    def begin(self, now: float) -> None:
        """Record that a call starts."""
        if self._count >= self._failures and self.state(now) == "half_open":
            self.is_trying = True

    def end(self) -> None:
        """Record that a call has ended, successfully or not."""
        self.is_trying = False

    def record_success(self) -> None:
        """Record that the service answered."""
        self._count, self._seconds, self.is_trying = 0, self._first_s, False

    def record_failure(self, now: float) -> bool:
        """Record that the service failed; return True if that opens a circuit that was closed."""
        state = self.state(now)
        if state == "open":  # the call was already running when the circuit opened
            return False
        self._count += 1
        self.is_trying = False
        if state == "half_open":
            self._seconds = min(2 * self._seconds, LONGEST_S)
        if self._count < self._failures:
            return False
        self._until = now + self._seconds
        return state == "closed"
