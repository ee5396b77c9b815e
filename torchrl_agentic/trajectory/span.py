"""`Span`: a stretch of time that a trajectory, or the collector, spent on one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from torchrl_agentic.json_fields import AsMicroseconds

Cause: TypeAlias = Literal["admission", "engine", "tools", "tool", "user", "reward", "update", "trainer"]
"""What a span was spent on.

"admission": a group waited to begin. "engine": an answer was sampled. "tools": the calls of a turn ran, from
the first to the last; "tool": one of these calls. "user": the simulated user replied. "reward": the reward
function ran. "update": new weights were loaded. "trainer": a batch was ready and nobody asked for it.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, by the clock of the event loop.

    Attributes:
        cause: What it was spent on.
        start: When it began, in seconds.
        stop: When it ended, in seconds.
        trajectory: Name of the trajectory; "" for spans of the collector itself.
        name: Name of the tool or the user; "" otherwise.
        turn: Number of the turn in the trajectory, counted from 0.
        version: Policy version when it ended.
        tokens: Number of sampled tokens, for "engine".
        status: Outcome: a `Status` of tools by name, a `finish` of engines or messages.
    """

    cause: Cause
    start: Annotated[float, AsMicroseconds]
    stop: Annotated[float, AsMicroseconds]
    trajectory: str = ""
    name: str = ""
    turn: int = 0
    version: int = 0
    tokens: int = 0
    status: str = ""

    def shifted(self, seconds: float) -> Span:
        """Return the span by a clock that is ahead by some seconds."""
        return Span(
            self.cause, self.start + seconds, self.stop + seconds, self.trajectory,
            self.name, self.turn, self.version, self.tokens, self.status,
        )  # fmt: skip
