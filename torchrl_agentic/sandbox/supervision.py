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


def supervisor_settings(limits: ResourceLimits) -> dict[str, Any]:
    """Return the settings of an interpreter's supervisor that every kind of sandbox has."""
    return {
        "limits": {},
        "memory_total_bytes": limits.memory_total_bytes,
        "cpu_seconds": limits.cpu_seconds,
        "output_bytes": limits.output_bytes,
        "flood_bytes": FLOOD_BYTES,
        "grace_s": GRACE_S,
        "idle_s": IDLE_S,
        "scoped": False,
    }
