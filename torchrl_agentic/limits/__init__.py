"""Rate limits: of one process (`local`), and of all that share a service (`cluster`)."""

from torchrl_agentic.limits.base import Limiter, LimiterStats, Slot
from torchrl_agentic.limits.breaker import CircuitOpen
from torchrl_agentic.limits.local import RateLimiter

__all__ = ["CircuitOpen", "Limiter", "LimiterStats", "RateLimiter", "Slot"]
