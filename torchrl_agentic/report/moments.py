"""The mean of numbers that come one by one, and how sure it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchrl_agentic.report.values import Average

LARGEST = 1e100
"""Numbers beyond are no measurements, and their squares no numbers."""


def is_measurable(value: float) -> bool:
    """Whether a number can be averaged: no NaN, nothing infinite or beyond all measure."""
    return abs(value) <= LARGEST


@dataclass(slots=True)
class Moments:
    """How many numbers, their sum, and the sum of the squares of their distances from the mean.

    Added and merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances" (1979), which loses no digits where a sum of squares does.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        self.merge(Moments(1, value))

    def merge(self, other: Moments) -> None:
        """Add all numbers of another one."""
        if self.count and other.count:
            distance = other.total / other.count - self.total / self.count
            self.squares += distance * distance * self.count * other.count / (self.count + other.count)
        self.squares += other.squares
        self.total += other.total
        self.count += other.count

    def average(self) -> Average:
        """Give the figures."""
        if not self.count:
            return Average(0, None, None)
        error = math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None
        return Average(self.count, self.total / self.count, error)
