"""Interpreters inside sandboxes that keep their state from one call to the next.

To add an interpreter, subclass `Repl` in a module of its own, and write a test class that inherits
`testing.ReplContract`.
"""

from torchrl_agentic.repl.base import Repl, ReplDisplay, ReplError, ReplResult
from torchrl_agentic.repl.duck_typed_repl import default_repl, repl_in
from torchrl_agentic.repl.forkserver_repl import ForkServerRepl
from torchrl_agentic.repl.jupyter_repl import JupyterRepl
from torchrl_agentic.repl.subprocess_repl import SubprocessRepl

__all__ = [
    "ForkServerRepl",
    "JupyterRepl",
    "Repl",
    "ReplDisplay",
    "ReplError",
    "ReplResult",
    "SubprocessRepl",
    "default_repl",
    "repl_in",
]
