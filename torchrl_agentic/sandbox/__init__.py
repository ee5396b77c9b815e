"""Sandboxes: isolated places that run code written by a model.

To add a sandbox, subclass `Sandbox` in a module of its own, list in the docstring of the module what it stops
and what it does not stop, and write a test class that inherits `testing.SandboxContract`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import FilesNotCopied, InfrastructureError, SandboxError, load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.sandbox.base import Process, Sandbox, SandboxResult
    from torchrl_agentic.sandbox.bubblewrap import BubblewrapSandbox
    from torchrl_agentic.sandbox.forkserver_sandbox import ForkServerSandbox
    from torchrl_agentic.sandbox.landlock import LandlockSandbox
    from torchrl_agentic.sandbox.remote.docker import DockerSandbox
    from torchrl_agentic.sandbox.remote.e2b import E2BSandbox
    from torchrl_agentic.sandbox.remote.modal import ModalSandbox
    from torchrl_agentic.sandbox.resource_limits import ResourceLimits
    from torchrl_agentic.sandbox.seatbelt import SeatbeltSandbox
    from torchrl_agentic.sandbox.tiers import default_sandbox
    from torchrl_agentic.sandbox.unsafe import UnsafeSubprocessSandbox

__all__ = [
    "BubblewrapSandbox",
    "DockerSandbox",
    "E2BSandbox",
    "FilesNotCopied",
    "ForkServerSandbox",
    "InfrastructureError",
    "LandlockSandbox",
    "ModalSandbox",
    "Process",
    "ResourceLimits",
    "Sandbox",
    "SandboxError",
    "SandboxResult",
    "SeatbeltSandbox",
    "UnsafeSubprocessSandbox",
    "default_sandbox",
]

__getattr__ = load_lazily(
    __name__,
    {
        "base": ("Process", "Sandbox", "SandboxResult"),
        "bubblewrap": ("BubblewrapSandbox",),
        "forkserver_sandbox": ("ForkServerSandbox",),
        "landlock": ("LandlockSandbox",),
        "remote.docker": ("DockerSandbox",),
        "remote.e2b": ("E2BSandbox",),
        "remote.modal": ("ModalSandbox",),
        "resource_limits": ("ResourceLimits",),
        "seatbelt": ("SeatbeltSandbox",),
        "tiers": ("default_sandbox",),
        "unsafe": ("UnsafeSubprocessSandbox",),
    },
)
