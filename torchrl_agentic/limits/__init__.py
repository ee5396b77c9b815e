"""Rate limits of one process (`RateLimiter`), or of all that share a service (`ClusterRateLimiter`)."""

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
