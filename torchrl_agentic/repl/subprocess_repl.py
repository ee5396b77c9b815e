"""`SubprocessRepl`: a Python process for each interpreter, in any sandbox that can run Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torchrl_agentic.repl.supervised import ProcessRepl, ProcessStream
from torchrl_agentic.sandbox import Process, Sandbox, default_sandbox
from torchrl_agentic.sandbox.bootstrap import BOOT, start_message, supervisor_settings
from torchrl_agentic.sandbox.duck_typed_sandbox import ensure_sandbox
from torchrl_agentic.sandbox.link import Link


class SubprocessRepl(ProcessRepl):
    """A Python process in a sandbox; variables, imports and functions stay from call to call.

    Args:
        sandbox: Where it runs; it is opened with the interpreter if it is not open. None for
            `default_sandbox()`.
        python_argv: Command that starts Python inside; None for that of the sandbox.
        seed: Seed of `random` and of numpy's global generator, so that the same code has the same output.

    Raises:
        TypeError: If `sandbox` is not a sandbox, or lacks a member such as `spawn`.
    """

    name: ClassVar[str] = "subprocess"
    no_start: ClassVar[str] = "Python does not start inside"

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        python_argv: tuple[str, ...] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.sandbox = default_sandbox() if sandbox is None else ensure_sandbox(sandbox, also=["spawn"])
        self.seed = seed
        self._python_argv = python_argv

    def fresh(self, sandbox: Sandbox | None = None) -> SubprocessRepl:
        """Return a new, unopened interpreter with the same settings, in this sandbox or one of its own."""
        return SubprocessRepl(sandbox or self.sandbox.fresh(), python_argv=self._python_argv, seed=self.seed)

    def _argv(self) -> Sequence[str]:
        return (*(self._python_argv or self.sandbox.python_argv), "-s", "-B", "-c", BOOT)

    async def _greet(self, process: Process) -> tuple[Link, str]:
        limits = self.sandbox.limits
        await process.send(start_message("supervisor", "alone", supervisor_settings(limits)))
        link = Link(ProcessStream(process), output_bytes=limits.output_bytes)
        await link.ask("start", seed=self.seed)
        return link, ""
