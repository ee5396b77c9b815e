"""The sandbox that is used when none is named."""

from __future__ import annotations

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import bubblewrap
from torchrl_agentic.sandbox.base import Sandbox
from torchrl_agentic.sandbox.limits import ResourceLimits


def default_sandbox(limits: ResourceLimits | None = None) -> Sandbox:
    """Give the strongest sandbox that works on this machine; it is tried, not guessed.

    Raises:
        SandboxError: there is none. The message says what to install, and how to do without one knowingly.
    """
    reason = bubblewrap.why_not()
    if reason is None:
        return bubblewrap.BubblewrapSandbox(limits)
    raise SandboxError(
        f"no sandbox works here, and model-written code is not run without one. {reason}. If you trust "
        "the code, say so by name: PythonTool(SubprocessRepl(UnsafeSubprocessSandbox()))"
    )
