"""Why trajectories end."""

from __future__ import annotations

REASONS = (
    "", "stop_tool", "no_calls", "max_turns", "max_trajectory_tokens", "user", "refused", "max_new_tokens",
    "user_failed", "not_begun",
)  # fmt: skip
"""Why a trajectory ended, by the number in ("agentic", "ended_by").

0: it goes on, or another transform ended it, or a stage with a reason of its own. New reasons are appended.
"""
_NUMBER_OF = {reason: number for number, reason in enumerate(REASONS)}


def number_of(reason: str) -> int:
    """Return the number of a reason; 0 if it is not in `REASONS`, because a stage of the user gave it.

    Args:
        reason: Why a trajectory ended.
    """
    return _NUMBER_OF.get(reason, 0)
