"""Interpreters that keep their state from one call to the next, inside a sandbox."""

from torchrl_agentic.repl.base import Repl, ReplDisplay, ReplError, ReplResult
from torchrl_agentic.repl.subprocess import SubprocessRepl

__all__ = ["Repl", "ReplDisplay", "ReplError", "ReplResult", "SubprocessRepl"]
