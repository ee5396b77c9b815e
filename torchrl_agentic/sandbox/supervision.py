"""What the supervisors of all kinds of interpreters are told."""

from __future__ import annotations

from typing import Any

from torchrl_agentic.sandbox.limits import ResourceLimits

FLOOD_BYTES = 64 << 20
"""A cell that prints more than this is stopped."""
GRACE_S = 1.0
"""How long interrupted code may take to react."""
IDLE_S = 1800.0
"""An interpreter that nobody used for so long forgets its state, and gives its memory back."""


def supervisor_settings(limits: ResourceLimits, *, own_ipc: bool) -> dict[str, Any]:
    """Give the settings of an interpreter's supervisor that every kind of sandbox has.

    own_ipc: whether the System V segments that it sees are the sandbox's alone, to be counted and removed.
    """
    return {
        "limits": {},
        "memory_total_bytes": limits.memory_total_bytes,
        "cpu_seconds": limits.cpu_seconds,
        "own_ipc": own_ipc,
        "output_bytes": limits.output_bytes,
        "flood_bytes": FLOOD_BYTES,
        "grace_s": GRACE_S,
        "idle_s": IDLE_S,
        "scoped": False,
    }
