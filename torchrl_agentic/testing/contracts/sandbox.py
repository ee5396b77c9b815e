"""What every sandbox promises, unless it says that it cannot."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import ClassVar

import pytest
import pytest_asyncio

from torchrl_agentic.sandbox import ResourceLimits, Sandbox
from torchrl_agentic.sandbox.base import CLAIMS
from torchrl_agentic.sandbox.conformance import CASES, Case


class SandboxContract:
    """All cases of `sandbox.conformance`, each as a test. What a backend cannot keep, its `cannot` says.

    make: a fresh sandbox with these limits. cannot: claims that cannot be shown where the tests run, as with
    a stand-in for a remote service that isolates nothing. groups: the groups of cases to try; None: all.
    inapplicable: cases that ask in a way that does not work in this sandbox, by name, and why; it has tests
    of its own for what they ask.
    """

    CLAIMS: ClassVar[frozenset[str]] = frozenset(CLAIMS)
    cannot: ClassVar[frozenset[str]] = frozenset()
    groups: ClassVar[frozenset[str] | None] = None
    inapplicable: ClassVar[Mapping[str, str]] = {}

    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        """Make the sandbox under test."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def sandbox(self) -> AsyncGenerator[Sandbox]:
        """An open sandbox, for tests that a subclass adds."""
        async with self.make() as sandbox:
            yield sandbox

    @pytest.mark.asyncio
    @pytest.mark.parametrize("case", CASES, ids=str)
    async def test_promise(self, case: Case) -> None:
        """It holds, or the sandbox says that it does not stop this."""
        if self.groups is not None and case.group not in self.groups:
            pytest.skip(f"{type(self).__name__} shows nothing about this: {case.group}")
        reason = case.excuse(self.make(), self.cannot) or self.inapplicable.get(case.name)
        if reason is not None:
            pytest.skip(reason)
        await case.hold(self.make)
