"""Sandboxes: where code that a model wrote runs.

To add one: subclass `Sandbox` in a file of its own, say in its first lines what it stops and what it does
not, and let a test inherit `testing.SandboxContract`.
"""

from torchrl_agentic.errors import InfrastructureError, SandboxError
from torchrl_agentic.sandbox.base import Process, Sandbox, SandboxResult
from torchrl_agentic.sandbox.bubblewrap import BubblewrapSandbox
from torchrl_agentic.sandbox.default import default_sandbox
from torchrl_agentic.sandbox.limits import ResourceLimits
from torchrl_agentic.sandbox.unsafe import UnsafeSubprocessSandbox

__all__ = [
    "BubblewrapSandbox",
    "InfrastructureError",
    "Process",
    "ResourceLimits",
    "Sandbox",
    "SandboxError",
    "SandboxResult",
    "UnsafeSubprocessSandbox",
    "default_sandbox",
]
