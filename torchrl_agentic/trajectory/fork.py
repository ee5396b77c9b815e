"""`Fork`: a place at which a trajectory forked into branches; `ForkState`: the trajectory there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchrl_agentic.dispatch.session import SessionCounts
from torchrl_agentic.messages import Turn
from torchrl_agentic.tokens.ledger import TokenLedger


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork on the way of a trajectory, and the branch that it took.

    Attributes:
        n_turns: Number of its turns before the fork.
        n_tokens: Number of its tokens before the fork, which it shares with the other branches; 0 without
            tokens.
        branch: Number of its branch, counted from 0; branch 0 continues the trajectory that forked.
        seconds: Time from its beginning to the fork.
        columns: Its entries under "agentic" before the fork.
    """

    n_turns: int
    n_tokens: int
    branch: int
    seconds: float = 0.0
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)


@dataclass(frozen=True, slots=True)
class ForkState:
    """A trajectory at a fork, as its branches continue it, without what its tools hold open.

    Attributes:
        messages: Fields of all messages.
        turns: One record per message of the model.
        ledger: Its tokens, the prompt of the next answer included; None if the engine takes messages.
        counts: Counts of its session.
        is_open: Whether a tool held something open, of which a branch needs a copy.
        seconds: Time since its beginning.
        columns: Its entries under "agentic".
        turn_rewards: Rewards that the transforms gave for each turn.
        stage_states: State that stages keep for it.
    """

    messages: tuple[Mapping[str, Any], ...]
    turns: tuple[Turn, ...]
    ledger: TokenLedger | None
    counts: SessionCounts
    is_open: bool
    seconds: float
    columns: Mapping[str, Any]
    turn_rewards: tuple[float, ...]
    stage_states: Mapping[Any, Any]
