"""What a server tells about a call that is under way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MCPProgress:
    """How far a call has come, as its server says.

    progress: grows; in the server's own unit. total: where it will end, if that is known.
    """

    tool: str
    call_id: str
    trajectory: str
    progress: float
    total: float | None = None
    message: str | None = None
