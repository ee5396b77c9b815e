"""Rate limits of one process (`RateLimiter`), or of all that share a service (`ClusterRateLimiter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.limits.base import Limiter, LimiterStats, Slot
    from torchrl_agentic.limits.circuit_breaker import CircuitOpen
    from torchrl_agentic.limits.cluster import ClusterRateLimiter
    from torchrl_agentic.limits.lease_server import LimitsDiffer
    from torchrl_agentic.limits.rate_limiter import RateLimiter

__all__ = [
    "CircuitOpen",
    "ClusterRateLimiter",
    "Limiter",
    "LimiterStats",
    "LimitsDiffer",
    "RateLimiter",
    "Slot",
]

__getattr__ = load_lazily(
    __name__,
    {
        "base": (
            "Limiter",
            "LimiterStats",
            "Slot",
        ),
        "circuit_breaker": ("CircuitOpen",),
        "cluster": ("ClusterRateLimiter",),
        "lease_server": ("LimitsDiffer",),
        "rate_limiter": ("RateLimiter",),
    },
)
