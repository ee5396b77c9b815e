"""Why trajectories end."""

from __future__ import annotations

REASONS = (
    "", "stop_tool", "no_calls", "max_turns", "max_trajectory_tokens", "user", "refused", "max_new_tokens",
    "user_failed", "not_begun",
)  # fmt: skip
"""Why a trajectory ended, by the number in ("agentic", "ended_by").

0: it goes on, or another transform ended it. New reasons are appended.
"""
NUMBER_OF = {reason: number for number, reason in enumerate(REASONS)}
