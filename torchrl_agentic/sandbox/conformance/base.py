"""`Case`: one requirement of sandboxes, as a function that fails if it is not met."""

from __future__ import annotations

import asyncio
import pickle
import platform
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from torchrl_agentic.sandbox.base import THREATS, Sandbox
from torchrl_agentic.sandbox.conformance.attack_cases import check_attacks_stopped
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.tiers import why_not_enforced

HANG_S = 60.0
"""Seconds after which a step of a case counts as hung; a busy machine must change no verdict."""
CASE_S = 300.0
"""Maximum seconds of a case."""


class Make(Protocol):
    """Creates an unopened sandbox with some limits, as the class of a sandbox does."""

    def __call__(self, limits: ResourceLimits | None = None, /) -> Sandbox:
        """Create a sandbox."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """A requirement of sandboxes.

    Attributes:
        name: A sentence that can be false.
        group: Subject of the case.
        threat: The threat of `THREATS` that it tests; None if every sandbox must pass it.
        needs: What the sandbox must have for the case to be tried; see `missing_requirement`.
        body: Raises AssertionError if the requirement is not met.
    """

    name: str
    group: str
    threat: str | None
    needs: frozenset[str]
    body: Callable[[Make], Awaitable[None]]

    def skip_reason(self, sandbox: Sandbox, untestable: Collection[str] = ()) -> str | None:
        """Return why a sandbox need not pass this case; None if it must.

        Args:
            sandbox: The sandbox.
            untestable: Threats that cannot be tested here, besides those that the sandbox does not stop.
        """
        if self.threat in sandbox.not_stopped:
            return f"{sandbox.name} does not stop this threat: {self.threat}"
        if self.threat in untestable:
            return f"cannot be tested here: {self.threat}"
        return next(filter(None, (missing_requirement(sandbox, need) for need in sorted(self.needs))), None)

    async def run(self, make: Make) -> None:
        """Run the case.

        Raises:
            AssertionError: If the requirement is not met.
        """
        clock = asyncio.timeout(CASE_S)
        try:
            async with clock:
                await self.body(make)
        except TimeoutError:
            if clock.expired():
                raise AssertionError(f"it took longer than {CASE_S:.0f} s") from None
            raise

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def missing_requirement(sandbox: Sandbox, need: str) -> str | None:
    """Return what a sandbox lacks for a case; None if it lacks nothing.

    Args:
        sandbox: The sandbox.
        need: A name of `limits_enforced`; "files", "loopback" or "pickle"; or "linux" or "x86_64", for the
            machine.
    """
    if need == "linux":
        return None if sys.platform == "linux" else "needs Linux"
    if need == "x86_64":
        here = sys.platform == "linux" and platform.machine() == "x86_64"
        return None if here else "needs Linux on x86-64, for its system call numbers"
    if need == "files":
        return None if sandbox.files else f"{sandbox.name} keeps no files from one command to the next"
    if need == "loopback":
        return None if "loopback" in sandbox.network else f"{sandbox.name} has no loopback of its own"
    if need == "pickle":
        try:
            pickle.dumps(sandbox)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"{sandbox.name} cannot be sent to another process: {error}"
        return None
    reason = why_not_enforced(sandbox, need)
    return None if reason is None else f"{sandbox.name} does not enforce {need}: {reason}"


class CaseGroup:
    """The cases about one subject. Its decorators register a function as a case and return it unchanged.

    Args:
        name: The subject.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def case(
        self, threat: str | None = None, *, limits: ResourceLimits | None = None, needs: Iterable[str] = ()
    ) -> Callable[[Callable[[Sandbox], Awaitable[None]]], Callable[[Sandbox], Awaitable[None]]]:
        """Register a function that gets a new, open sandbox as a case.

        Args:
            threat: The threat that it tests; see `Case`.
            limits: Limits of the sandbox; None for the defaults.
            needs: See `missing_requirement`.
        """

        def note(function: Callable[[Sandbox], Awaitable[None]]) -> Callable[[Sandbox], Awaitable[None]]:
            async def body(make: Make) -> None:
                async with make() if limits is None else make(limits) as sandbox:
                    await function(sandbox)

            self._add(function, threat, needs, body)
            return function

        return note

    def factory_case(
        self, threat: str | None = None, *, needs: Iterable[str] = ()
    ) -> Callable[[Callable[[Make], Awaitable[None]]], Callable[[Make], Awaitable[None]]]:
        """Register a function that creates its sandboxes itself as a case.

        Args:
            threat: The threat that it tests; see `Case`.
            needs: See `missing_requirement`.
        """

        def note(function: Callable[[Make], Awaitable[None]]) -> Callable[[Make], Awaitable[None]]:
            self._add(function, threat, needs, function)
            return function

        return note

    def attacks(
        self, threat: str | None = None, *, needs: Iterable[str] = (), before: str = ""
    ) -> Callable[[Callable[[], str]], Callable[[], str]]:
        """Register a function that returns attacks as a case: each is tried inside, and must be stopped.

        Args:
            threat: The threat that it tests; see `Case`.
            needs: See `missing_requirement`.
            before: Code to run first.
        """

        def note(function: Callable[[], str]) -> Callable[[], str]:
            async def body(make: Make) -> None:
                async with make() as sandbox:
                    await check_attacks_stopped(sandbox, function(), before=before)

            self._add(function, threat, needs, body)
            return function

        return note

    def _add(
        self,
        function: Callable[..., object],
        threat: str | None,
        needs: Iterable[str],
        body: Callable[[Make], Awaitable[None]],
    ) -> None:
        if threat is not None and threat not in THREATS:
            raise ValueError(f"unknown threat {threat!r}; expected one of {', '.join(THREATS)}")
        name = function.__name__.replace("_", " ")
        self.cases.append(Case(name, self.name, threat, frozenset(needs), body))
