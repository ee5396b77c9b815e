"""`SandboxContract`: tests that every sandbox must pass, except for threats that it does not stop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import ClassVar

import pytest
import pytest_asyncio

from torchrl_agentic.repl.repl_cases import CASES as OF_INTERPRETERS
from torchrl_agentic.sandbox import ResourceLimits, Sandbox
from torchrl_agentic.sandbox.base import THREATS
from torchrl_agentic.sandbox.conformance import CASES as OF_SANDBOXES
from torchrl_agentic.sandbox.conformance import Case

CASES = (*OF_SANDBOXES, *OF_INTERPRETERS)


class SandboxContract:
    """All cases of `sandbox.conformance` and `repl.repl_cases`, each as a test.

    A sandbox names the threats that it does not stop in `not_stopped`. Cases that do not apply are not
    collected; one skipped test lists them with the reasons.

    Attributes:
        THREATS: Names of all threats.
        untestable: Threats that cannot be tested where the tests run, as with a fake of a remote service that
            isolates nothing.
        groups: Groups of cases to run; None for all.
        inapplicable: Name of a case that works differently in this sandbox → the reason. Such a sandbox has
            tests of its own for it.
    """

    THREATS: ClassVar[frozenset[str]] = frozenset(THREATS)
    untestable: ClassVar[frozenset[str]] = frozenset()
    groups: ClassVar[frozenset[str] | None] = None
    inapplicable: ClassVar[Mapping[str, str]] = {}

    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        """Return a fresh sandbox with these limits."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def sandbox(self) -> AsyncGenerator[Sandbox]:
        """Yield an open sandbox, for tests that a subclass adds."""
        async with self.make() as sandbox:
            yield sandbox

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Collect the cases that apply; none in a class that is skipped."""
        if metafunc.function.__name__ != "test_promise":
            return
        if any(mark.args[:1] == (True,) for mark in metafunc.definition.iter_markers("skipif")):
            cases: list[Case] = []
        else:
            try:
                sandbox = self.make()
            except Exception:
                sandbox = None  # it needs fixtures, or fails; then each test shows why
            cases = [case for case in CASES if self._excuse(case, sandbox) is None]
        metafunc.parametrize("case", cases, ids=str)

    @pytest.mark.asyncio
    async def test_promise(self, case: Case) -> None:
        """The case holds, or the sandbox lists it as not enforced."""
        reason = self._excuse(case, self.make())
        if reason is not None:
            pytest.skip(reason)
        await case.run(self.make)

    @pytest.mark.asyncio
    async def test_all_cases_apply(self) -> None:
        """All cases apply, or the skipped test names the others and the reasons."""
        sandbox = self.make()
        left_out: dict[str, list[str]] = {}
        for case in CASES:
            reason = self._excuse(case, sandbox)
            if reason is not None:
                names = left_out.setdefault(reason, [])
                names += [case.name] if self._shows(case) else []
        if left_out:
            words = (
                f"{reason} ({', '.join(names)})" if names else reason for reason, names in left_out.items()
            )
            pytest.skip("; ".join(words))

    def _shows(self, case: Case) -> bool:
        return self.groups is None or case.group in self.groups

    def _excuse(self, case: Case, sandbox: Sandbox | None) -> str | None:
        """Return why a case is left out, or None; without a sandbox, as far as that is known."""
        if not self._shows(case):
            return f"{type(self).__name__} does not test the group {case.group}"
        if sandbox is not None and (reason := case.skip_reason(sandbox, self.untestable)):
            return reason
        return self.inapplicable.get(case.name)
