"""The interpreter that is used when none is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.repl.base import Repl, ReplResult
from torchrl_agentic.repl.forkserver_repl import ForkServerRepl
from torchrl_agentic.repl.subprocess_repl import SubprocessRepl
from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits, Sandbox, default_sandbox
from torchrl_agentic.sandbox.look_alike_sandbox import SandboxAdapter, Template, ensure_template


def repl_in(sandbox: Sandbox) -> Repl:
    """Give the interpreter that suits a sandbox best."""
    return ForkServerRepl(sandbox) if isinstance(sandbox, ForkServerSandbox) else SubprocessRepl(sandbox)


def default_repl(limits: ResourceLimits | None = None) -> Repl:
    """Give an interpreter in the strongest sandbox that works on this machine; see `default_sandbox`."""
    return repl_in(default_sandbox(limits))


class ReplAdapter(Repl):
    """A look-alike of an interpreter behind the interface.

    Its `fresh` is the object's, or else a deep copy of the object as it was when it was adapted, which refers
    to the new sandbox wherever the object refers to its own.
    """

    def __init__(self, target: Any, sandbox: Sandbox, template: Template) -> None:
        self.target = target
        self.sandbox = sandbox
        self.cells = []
        self._template = template
        self._is_open = False

    def fresh(self, sandbox: Sandbox | None = None) -> ReplAdapter:
        """Return another one with the same settings, not open yet, in a sandbox of its own or in this one."""
        sandbox = self.sandbox.fresh() if sandbox is None else sandbox
        inner = sandbox.target if derives(sandbox, SandboxAdapter) else sandbox
        return ReplAdapter(self._template.make(inner), sandbox, self._template)

    async def open(self) -> None:
        """Open the object, and its sandbox before it."""
        if self._is_open:
            return
        if not self.sandbox.is_open:
            await self.sandbox.open()
            self.owns_sandbox = True
        await self.target.open()
        self._is_open = True

    async def close(self) -> None:
        """Close the object, and its sandbox if it was opened with it."""
        was_open, self._is_open = self._is_open, False
        try:
            if was_open:
                await self.target.close()
        finally:
            if self.owns_sandbox:
                self.owns_sandbox = False
                await self.sandbox.close()

    async def execute(self, code: str, *, timeout: float | None = None) -> ReplResult:
        """Run code; a result that holds an error, or timed out, has the status of it."""
        self.cells.append(code)
        result: ReplResult = await self.target.execute(code, timeout=timeout)
        if result.status == "ok" and (result.timed_out or result.error is not None):
            return replace(result, status="timeout" if result.timed_out else "error")
        return result

    async def interrupt(self) -> None:
        """Stop the code that runs now."""
        await self.target.interrupt()

    async def restart(self) -> None:
        """Forget all that was defined."""
        await self.target.restart()
        self.cells.clear()

    def __repr__(self) -> str:
        return repr(self.target)


def ensure_repl(item: Any) -> Repl:
    """Return a `Repl` for what people bring: a Repl itself, or a look-alike.

    Args:
        item: A Repl, or an object with a `sandbox` and the coroutine functions `open`, `close`, `execute`,
            `interrupt` and `restart`, which take the arguments of those of `Repl`.

    Raises:
        TypeError: If it is none of these. The message names what a look-alike lacks.
    """
    if derives(item, Repl):
        return item
    if isinstance(item, type):
        raise TypeError(
            f"{item.__name__} is a class; an interpreter is an object: write {item.__name__}(...)"
        )
    missing = lacking(item, Repl)
    if missing:
        raise TypeError(
            "an interpreter has sandbox, open, close, execute, interrupt and restart;"
            f" {type(item).__name__} lacks {', '.join(missing)}"
        )
    sandbox, template = ensure_template(item.sandbox), Template(item, item.sandbox)
    template.check()
    return ReplAdapter(item, sandbox, template)
