"""`Watch`: follows what a trajectory does, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.span import Cause


class Watch:
    """Follows what a trajectory does; this base class ignores everything, and knows no time.

    An environment has no other: it works step by step, and its time is the caller's.
    """

    __slots__ = ()

    def doing(self, cause: Cause, detail: str = "") -> float:
        """Note what a trajectory does from now on, and return the time.

        Args:
            cause: What it does.
            detail: Names of the tools or of the user; "" otherwise.
        """
        del cause, detail
        return 0.0

    def span(
        self,
        cause: Cause,
        start: float,
        stop: float | None = None,
        *,
        turn: int,
        name: str = "",
        tokens: int = 0,
        status: str = "",
    ) -> None:
        """Note what has ended; see `Span`.

        Args:
            cause: What it was.
            start: When it began.
            stop: When it ended; None: now.
            turn: Number of the turn.
            name: Name of the tool or the user.
            tokens: Number of sampled tokens.
            status: Outcome.
        """
        del cause, start, stop, turn, name, tokens, status


SILENT = Watch()
