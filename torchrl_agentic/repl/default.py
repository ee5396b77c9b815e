"""The interpreter that is used when none is named."""

from __future__ import annotations

from torchrl_agentic.repl.base import Repl
from torchrl_agentic.repl.forkserver import ForkServerRepl
from torchrl_agentic.repl.subprocess import SubprocessRepl
from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits, Sandbox, default_sandbox


def repl_in(sandbox: Sandbox) -> Repl:
    """Give the interpreter that suits a sandbox best."""
    return ForkServerRepl(sandbox) if isinstance(sandbox, ForkServerSandbox) else SubprocessRepl(sandbox)


def default_repl(limits: ResourceLimits | None = None) -> Repl:
    """Give an interpreter in the strongest sandbox that works on this machine; see `default_sandbox`."""
    return repl_in(default_sandbox(limits))
