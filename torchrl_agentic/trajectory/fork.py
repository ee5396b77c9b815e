"""`Fork`: a place at which a trajectory forked into branches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork on the way of a trajectory, and the branch that it took.

    Attributes:
        n_turns: Number of its turns before the fork.
        n_tokens: Number of its tokens before the fork, which it shares with the other branches; 0 without
            tokens.
        branch: Number of its branch, counted from 0; branch 0 continues the trajectory that forked.
        seconds: Time from its beginning to the fork.
    """

    n_turns: int
    n_tokens: int
    branch: int
    seconds: float = 0.0
