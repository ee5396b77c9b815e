"""`SerialRepl`: base of interpreters that run one cell at a time."""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from torchrl_agentic.errors import InfrastructureError, SandboxError
from torchrl_agentic.repl.base import ALL_LOST, LOST, Repl, ReplError, ReplResult

MAX_CODE = 16 << 20
"""Maximum number of characters of code."""


class StartFailed(SandboxError):
    """An interpreter did not start in a sandbox that works."""


class SerialRepl(Repl):
    """An interpreter that a subclass starts in `_begin` and ends in `_end`; `_run` runs a cell."""

    def __init__(self) -> None:
        self.cells = []
        self._opened = False
        self._lock = asyncio.Lock()
        self._untold = False  # state was lost, and no result has reported it
        self._losses = 0  # number of losses of the sandbox that have been reported

    @abstractmethod
    async def _begin(self) -> None:
        """Start the interpreter; the sandbox is open.

        Raises:
            SandboxError: If it cannot be started. Nothing is left of it then.
        """

    @abstractmethod
    async def _end(self) -> None:
        """End the interpreter; the sandbox stays open."""

    @abstractmethod
    async def _run(self, code: str, timeout: float | None, left: float | None) -> ReplResult:
        """Run a cell and append it to `cells`; no other cell runs. `left` is the rest of the timeout."""

    def _take_loss(self) -> tuple[bool, str]:
        """Return whether an unreported loss exists, and what was lost. It then counts as reported."""
        emptied = self.sandbox.losses != self._losses
        untold, self._untold, self._losses = self._untold or emptied, False, self.sandbox.losses
        return untold, ALL_LOST if emptied else LOST

    def _not_run(self, error: StartFailed) -> ReplResult:
        """Return the result of a cell that did not run, because earlier code prevents a start."""
        _, lost = self._take_loss()
        return ReplResult(
            status="died", message=f"{error}; {lost}, and the code was not run", state_lost=True
        )

    async def open(self) -> None:
        """Start the interpreter."""
        async with self._lock:
            if self._opened:
                return
            if not self.sandbox.is_open:
                await self.sandbox.open()
                self.owns_sandbox = True
            try:
                await self._begin()
            except BaseException:
                await self._close_sandbox()
                raise
            self._opened = True

    async def close(self) -> None:
        """End the interpreter."""
        opened, self._opened = self._opened, False
        try:
            if opened:
                await self._end()
        finally:
            await self._close_sandbox()

    async def execute(self, code: str, *, timeout: float | None = None) -> ReplResult:
        """Run code."""
        self._check_open()
        if len(code) > MAX_CODE:
            error = ReplError("ValueError", f"the code has {len(code)} characters; the maximum is {MAX_CODE}")
            return ReplResult(error=error, status="error")
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._lock.acquire()
        except TimeoutError:
            message = f"Not run: earlier code kept the interpreter busy for {timeout:g} s"
            return ReplResult(timed_out=True, status="timeout", message=message)
        try:
            self._check_open()
            left = None if deadline is None else max(0.0, deadline - loop.time())
            return await self._run(code, timeout, left)
        finally:
            self._lock.release()

    def _check_open(self) -> None:
        if not self._opened:
            raise InfrastructureError("the interpreter is not open: use 'async with', or call open() first")

    async def _close_sandbox(self) -> None:
        if self.owns_sandbox:
            await self.sandbox.close()
            self.owns_sandbox = False
