"""`backoff_pause_s`: the pause between two tries, which doubles after each failure."""

from __future__ import annotations

import math


def backoff_pause_s(failures: int, first_s: float, longest_s: float = math.inf) -> float:
    """Return the pause after some failed tries in a row, in seconds.

    Args:
        failures: Number of failed tries, 1 or more.
        first_s: Pause after the first failure, in seconds.
        longest_s: Longest pause, in seconds.
    """
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 64))
