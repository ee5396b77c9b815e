"""`backoff_pause_s`: the pause between two tries, which doubles after each failure."""

from __future__ import annotations


def backoff_pause_s(failures: int, first_s: float, longest_s: float, *, chance: float = 0.0) -> float:
    """Return the pause after some failed tries in a row, in seconds.

    Args:
        failures: Number of failed tries, 1 or more.
        first_s: Pause after the first failure, in seconds.
        longest_s: Longest pause without the random part, in seconds.
        chance: Random number in [0, 1): the share of `first_s` that is added, to keep callers apart.
    """
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 64)) + first_s * chance
