"""Keeps calls from a service that does not work at all, and finds out when it does again."""

from __future__ import annotations

import math
from typing import Literal

from torchrl_agentic.errors import InfrastructureError

LONGEST_S = 60.0
"""However often the tries fail: after this long, there is the next one."""


class CircuitOpen(InfrastructureError):
    """A call was not tried, since those before it failed; `retry_after`: seconds until one will be tried."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"the service has failed again and again; it is tried again in {retry_after:.1f} s")
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[CircuitOpen], tuple[float]]:
        return (CircuitOpen, (self.retry_after,))


class Breaker:
    """Opens after so many failures in a row: no calls for some seconds, then one at a time.

    The first one that goes well closes it; the seconds double with each one that fails. Time comes in as a
    number.
    """

    __slots__ = ("_count", "_failures", "_first_s", "_seconds", "_until", "is_trying")

    def __init__(self, failures: int, seconds: float) -> None:
        self._failures, self._first_s, self._seconds = failures, seconds, seconds
        self._count = 0
        self._until = -math.inf  # when it is open, the end of that; +inf and -inf: closed
        self.is_trying = False

    def state(self, now: float) -> Literal["closed", "open", "half_open"]:
        """Tell whether calls are let through, kept away, or tried one at a time."""
        if self._count < self._failures:
            return "closed"
        return "open" if now < self._until else "half_open"

    def refusal(self, now: float) -> float | None:
        """Seconds for which calls are refused; None: they are not."""
        return self._until - now if self.state(now) == "open" else None

    def holds(self, now: float) -> bool:
        """Whether calls have to wait for the one that is being tried."""
        return self.is_trying and self.state(now) == "half_open"

    def begin(self, now: float) -> None:
        """Take note that a call starts."""
        if self._count >= self._failures and self.state(now) == "half_open":
            self.is_trying = True

    def end(self) -> None:
        """Take note that a call has ended, whatever came of it."""
        self.is_trying = False

    def succeeded(self) -> None:
        """Take note that the service answered."""
        self._count, self._seconds, self.is_trying = 0, self._first_s, False

    def failed(self, now: float) -> None:
        """Take note that it did not."""
        state = self.state(now)
        if state == "open":  # one that was under way when it opened
            return
        self._count += 1
        self.is_trying = False
        if state == "half_open":
            self._seconds = min(2 * self._seconds, LONGEST_S)
        if self._count >= self._failures:
            self._until = now + self._seconds
