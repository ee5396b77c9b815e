"""What a case is: one promise of sandboxes, as a function that fails where it is broken."""

from __future__ import annotations

import asyncio
import pickle
import platform
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from torchrl_agentic.sandbox.base import THREATS, Sandbox
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

CASE_S = 60.0
"""How long a case may take."""


class Make(Protocol):
    """Makes a fresh sandbox with these limits, not open yet; the class of a sandbox does."""

    def __call__(self, limits: ResourceLimits | None = None, /) -> Sandbox:
        """Make one."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """A promise. name: a sentence that can be false. claim: of `CLAIMS`; None: every sandbox must keep it.

    needs: what else the sandbox must have for this to be tried, see `lack`. body: raises AssertionError.
    """

    name: str
    group: str
    threat: str | None
    needs: frozenset[str]
    body: Callable[[Make], Awaitable[None]]

    def skip_reason(self, sandbox: Sandbox, untestable: Collection[str] = ()) -> str | None:
        """Say why this need not hold for a sandbox; None if it must.

        cannot: claims that cannot be shown here, besides what the sandbox itself says it cannot stop.
        """
        if self.threat in sandbox.not_stopped:
            return f"{sandbox.name} says that it does not stop this: {self.threat}"
        if self.threat in untestable:
            return f"cannot be shown here: {self.threat}"
        return next(filter(None, (missing_requirement(sandbox, need) for need in sorted(self.needs))), None)

    async def run(self, make: Make) -> None:
        """Try it.

        Raises:
            AssertionError: it does not hold.
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
    """Say what a sandbox lacks of something that a case needs; None if it has it.

    need: a name of `limits_enforced`; "files", "loopback", "pickle"; "linux" or "x86_64" for where it runs.
    """
    if need == "linux":
        return None if sys.platform == "linux" else "needs Linux"
    if need == "x86_64":
        here = sys.platform == "linux" and platform.machine() == "x86_64"
        return None if here else "needs Linux on x86-64, for the numbers of its system calls"
    if need == "files":
        return None if sandbox.files else f"{sandbox.name} keeps no files from one command to the next"
    if need == "loopback":
        return None if "loopback" in sandbox.network else f"{sandbox.name} offers no loopback of its own"
    if need == "pickle":
        try:
            pickle.dumps(sandbox)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"it cannot be sent to another process: {error}"
        return None
    held = sandbox.limits_enforced.get(need, False)
    return None if held else f"{sandbox.name} says that it does not enforce {need}"


class Group:
    """The cases about one subject. Its decorators note a function down as a case, and leave it as it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def case(
        self, threat: str | None = None, *, limits: ResourceLimits | None = None, needs: Iterable[str] = ()
    ) -> Callable[[Callable[[Sandbox], Awaitable[None]]], Callable[[Sandbox], Awaitable[None]]]:
        """Make a case of a function of a fresh open sandbox, with these limits."""

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
        """Make a case of a function that makes its sandboxes itself."""

        def note(function: Callable[[Make], Awaitable[None]]) -> Callable[[Make], Awaitable[None]]:
            self._add(function, threat, needs, function)
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
