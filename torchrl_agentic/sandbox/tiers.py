"""The sandbox that is used when none is named."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import bubblewrap, forkserver_sandbox, landlock
from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.seatbelt import SeatbeltSandbox

TIERS: tuple[tuple[type[Sandbox], Callable[[], str | None]], ...] = (
    (forkserver_sandbox.ForkServerSandbox, forkserver_sandbox.cannot_work),
    (bubblewrap.BubblewrapSandbox, bubblewrap.why_not),
    (landlock.LandlockSandbox, landlock.why_not),
    (SeatbeltSandbox, lambda: None if sys.platform == "darwin" else "Seatbelt works on macOS only"),
)
"""The sandboxes of this machine from strong to weak, and what says why one does not work here."""


@functools.cache
def tiers() -> tuple[tuple[type[Sandbox], str | None], ...]:
    """Try all tiers, from strong to weak: each with the reason for which it does not work here, if any."""
    return tuple((kind, reason()) for kind, reason in TIERS)


def default_sandbox(limits: ResourceLimits | None = None) -> Sandbox:
    """Give the strongest sandbox that works on this machine; it is tried, not guessed.

    Raises:
        SandboxError: there is none. The message says what to install, and how to do without one knowingly.
    """
    for kind, why_not in TIERS:
        if why_not() is None:
            return kind(limits)
    reasons = " ".join(f"{kind.name}: {reason}." for kind, reason in tiers())
    raise SandboxError(
        f"no sandbox works here, and model-written code is not run without one. {reasons} If you trust "
        "the code, say so by name: PythonTool(SubprocessRepl(UnsafeSubprocessSandbox()))"
    )
