from torchrl_agentic.limits.base import Limiter as Limiter
from torchrl_agentic.limits.base import LimiterStats as LimiterStats
from torchrl_agentic.limits.base import Slot as Slot
from torchrl_agentic.limits.circuit_breaker import CircuitOpen as CircuitOpen
from torchrl_agentic.limits.cluster import ClusterRateLimiter as ClusterRateLimiter
from torchrl_agentic.limits.lease_server import LimitsDiffer as LimitsDiffer
from torchrl_agentic.limits.rate_limiter import RateLimiter as RateLimiter
