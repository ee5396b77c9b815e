"""`default_repl`, and `ensure_repl`, which adapts objects that behave like a `Repl`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchrl_agentic.errors import derives, lacking
from torchrl_agentic.repl.base import Repl, ReplResult
from torchrl_agentic.repl.forkserver_repl import ForkServerRepl
from torchrl_agentic.repl.subprocess_repl import SubprocessRepl
from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits, Sandbox, default_sandbox
from torchrl_agentic.sandbox.duck_typed_sandbox import SandboxAdapter, Template, ensure_template


def repl_in(sandbox: Sandbox) -> Repl:
    """Return the interpreter that suits a sandbox best."""
    return ForkServerRepl(sandbox) if isinstance(sandbox, ForkServerSandbox) else SubprocessRepl(sandbox)


def default_repl(limits: ResourceLimits | None = None) -> Repl:
    """Return an interpreter in the strongest sandbox that works on this machine; see `default_sandbox`."""
    return repl_in(default_sandbox(limits))


class ReplAdapter(Repl):
    """Adapts an object that behaves like an interpreter to `Repl`.

    `fresh` calls that of the object, or else makes a deep copy of the object as it was when it was adapted,
    which refers to the new sandbox wherever the object refers to its own.

    Args:
        target: The object.
        sandbox: Its sandbox.
        template: Creates objects like it.
    """

    def __init__(self, target: Any, sandbox: Sandbox, template: Template) -> None:
        self.target = target
        self.sandbox = sandbox
        self.cells = []
        self._template = template
        self._is_open = False

    def fresh(self, sandbox: Sandbox | None = None) -> ReplAdapter:
        """Return a new, unopened interpreter with the same settings, in this sandbox or one of its own."""
        sandbox = self.sandbox.fresh() if sandbox is None else sandbox
        inner = sandbox.target if derives(sandbox, SandboxAdapter) else sandbox
        return ReplAdapter(self._template.make(inner), sandbox, self._template)

    async def open(self) -> None:
        """Open the sandbox, then the object."""
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
        """Run code, and set the status of a result with an error or a timeout."""
        self.cells.append(code)
        result: ReplResult = await self.target.execute(code, timeout=timeout)
        if result.status == "ok" and (result.timed_out or result.error is not None):
            return replace(result, status="timeout" if result.timed_out else "error")
        return result

    async def interrupt(self) -> None:
        """Stop the running code."""
        await self.target.interrupt()

    async def restart(self) -> None:
        """Forget all definitions."""
        await self.target.restart()
        self.cells.clear()

    def __repr__(self) -> str:
        return repr(self.target)


def ensure_repl(item: Any) -> Repl:
    """Return a `Repl` for an object: the object itself, or an adapter.

    Args:
        item: A `Repl`, or an object with a `sandbox` and the coroutine functions `open`, `close`, `execute`,
            `interrupt` and `restart`, with the same arguments as those of `Repl`.

    Raises:
        TypeError: If it is neither. The message names the missing members.
    """
    if derives(item, Repl):
        return item
    if isinstance(item, type):
        raise TypeError(f"expected an interpreter, got the class {item.__name__}: write {item.__name__}(...)")
    missing = lacking(item, Repl)
    if missing:
        raise TypeError(
            "an interpreter has sandbox, open, close, execute, interrupt and restart;"
            f" {type(item).__name__} lacks {', '.join(missing)}"
        )
    sandbox, template = ensure_template(item.sandbox), Template(item, item.sandbox)
    template.check()
    return ReplAdapter(item, sandbox, template)
