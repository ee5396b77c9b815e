"""Rate limits: within one process (`local`)."""

from torchrl_agentic.limits.local import LimiterStats, RateLimiter

__all__ = ["LimiterStats", "RateLimiter"]
