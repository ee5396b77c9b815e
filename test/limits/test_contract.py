"""Both limiters keep what limiters promise."""

import uuid
from pathlib import Path

import pytest

from torchrl_agentic.limits import ClusterRateLimiter, RateLimiter
from torchrl_agentic.testing import LimiterContract


class TestRateLimiter(LimiterContract):
    def make(self, max_concurrent: int) -> RateLimiter:
        return RateLimiter(max_concurrent=max_concurrent)


class TestClusterRateLimiter(LimiterContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(tmp_path))

    def make(self, max_concurrent: int) -> ClusterRateLimiter:
        return ClusterRateLimiter(uuid.uuid4().hex, max_concurrent=max_concurrent, ttl=0.5, over="machine")
