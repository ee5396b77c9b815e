"""`default_sandbox`: the strongest sandbox that works on this machine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import bubblewrap, cgroups, forkserver_sandbox, landlock
from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.seatbelt import SeatbeltSandbox

TIERS: tuple[tuple[type[Sandbox], Callable[[], str | None]], ...] = (
    (forkserver_sandbox.ForkServerSandbox, forkserver_sandbox.cannot_work),
    (bubblewrap.BubblewrapSandbox, bubblewrap.why_not),
    (landlock.LandlockSandbox, landlock.why_not),
    (SeatbeltSandbox, lambda: None if sys.platform == "darwin" else "Seatbelt works on macOS only"),
)
"""Local sandboxes, strongest first, each with a function that returns why it does not work here, or None."""


@functools.cache
def tiers() -> tuple[tuple[type[Sandbox], str | None], ...]:
    """Test all tiers. Return each with the reason why it does not work here, or None."""
    return tuple((kind, reason()) for kind, reason in TIERS)


def why_not_enforced(sandbox: Sandbox, limit: str) -> str | None:
    """Return why a sandbox does not enforce a limit here; None if it does.

    Args:
        sandbox: The sandbox.
        limit: A name of `limits_enforced`.
    """
    if sandbox.limits_enforced.get(limit, False):
        return None
    of_groups = cgroups.why_not() if limit == "memory_total" else None
    return (
        sandbox.unenforced.get(limit) or of_groups or "code inside can raise it, or there is no means for it"
    )


def default_sandbox(limits: ResourceLimits | None = None) -> Sandbox:
    """Return the strongest sandbox that works on this machine, by trying them.

    Args:
        limits: Limits of the sandbox.

    Raises:
        SandboxError: If none works. The message says what to install, and how to choose to run without one.
    """
    for kind, why_not in TIERS:
        if why_not() is None:
            return kind(limits)
    reasons = " ".join(f"{kind.name}: {reason}." for kind, reason in tiers())
    raise SandboxError(
        f"no sandbox works here, and model-written code is not run without one. {reasons} If you trust "
        "the code, run it without isolation: PythonTool(SubprocessRepl(UnsafeSubprocessSandbox()))"
    )
