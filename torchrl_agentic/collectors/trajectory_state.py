"""`TrajectoryState`: a trajectory between two turns, with which another run continues it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.dispatch.session import SessionCounts
from torchrl_agentic.messages import Turn
from torchrl_agentic.tokens.ledger import TokenLedger


@dataclass(frozen=True, slots=True)
class UserState:
    """The simulated user's part of a trajectory.

    Attributes:
        n_replies: Number of replies so far.
        total: Sum of the scores of the replies.
        score: The final score; 0.0 until the trajectory ends.
    """

    n_replies: int = 0
    total: float = 0.0
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class TrajectoryState:
    """A trajectory between two turns: plain values, without its task and without what its tools hold open.

    Attributes:
        messages: Fields of all messages.
        turns: One record per message of the model.
        n_recorded: Number of messages that the records contain.
        ledger: Its tokens, the prompt of the next answer included; None if the engine takes messages.
        counts: Counts of its session.
        is_open: Whether a tool with sessions, a world or a simulated user held something open, which only a
            branch in the same process can continue.
        tool_reward: Sum of the rewards of its tool calls.
        user: The simulated user's part.
        reason: Why it ended; "" if it goes on.
        terminated: Whether it ended by itself.
        truncated: Whether a bound ended it.
        seconds: Time since its beginning.
    """

    messages: tuple[Mapping[str, Any], ...]
    turns: tuple[Turn, ...]
    n_recorded: int
    ledger: TokenLedger | None
    counts: SessionCounts
    is_open: bool = False
    tool_reward: float = 0.0
    user: UserState = UserState()
    reason: str = ""
    terminated: bool = False
    truncated: bool = False
    seconds: float = 0.0
