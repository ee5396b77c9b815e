"""`SupervisedRepl`: base of interpreters that run behind a supervisor inside their sandbox.

The supervisor is that of `sandbox.inside`, or the client of a Jupyter kernel, which answers in the same way.
`ProcessRepl` is the base of those whose supervisor is a process that they start.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torchrl_agentic.errors import InfrastructureError, SandboxError
from torchrl_agentic.messages import image_type
from torchrl_agentic.repl.base import (
    ALL_LOST,
    KEPT,
    LOST,
    Repl,
    ReplDisplay,
    ReplError,
    ReplResult,
    ReplStatus,
    StartFailed,
)
from torchrl_agentic.sandbox import Process, Sandbox
from torchrl_agentic.sandbox.bootstrap import FLOOD_BYTES, GRACE_S
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.inside.worker import MAX_DISPLAY_BYTES as MAX_IMAGE
from torchrl_agentic.sandbox.inside.worker import MAX_DISPLAYS as MAX_IMAGES
from torchrl_agentic.sandbox.link import Link, LinkLost
from torchrl_agentic.sandbox.process import END_S, describe_exit, signed_exit_code

__all__ = ["KINDS", "MAX_IMAGE", "MAX_IMAGES", "MAX_TEXTS", "is_image"]
KINDS = ("image/png", "image/jpeg")
"""Media types of images that are accepted."""
MAX_TEXTS = 20
"""Maximum number of displayed texts."""
MAX_CODE = 16 << 20
"""Maximum number of characters of code."""
MAX_TEXT = 1 << 16
"""Maximum bytes that are read of a value or an error; regular ones are shorter."""
MARGIN_S = 5.0
"""Seconds beyond its deadline and grace period after which a supervisor counts as lost."""
_HEADER = {"stopped": str, "lost_before": bool, "count": int, "omitted": int}
"""Types in the header of an answer."""

Answer = tuple[dict[str, Any], list[bytes]]


def is_image(kind: str, data: bytes) -> bool:
    """Return whether data is an image of this media type, and not too large.

    Args:
        kind: The media type.
        data: The data.
    """
    return kind in KINDS and image_type(data) == kind and len(data) <= MAX_IMAGE


class SupervisedRepl(Repl):
    """An interpreter behind a `Link`, with one cell at a time. If it is lost, the next call gets a new one.

    A subclass starts the interpreter in `_begin` and ends it in `_end`.
    """

    def __init__(self) -> None:
        self.cells = []
        self._opened = False
        self._lock = asyncio.Lock()
        self._untold = False  # state was lost, and no result has reported it
        self._losses = 0  # number of losses of the sandbox that have been reported
        self._has_run = False

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
    async def _live(self) -> Link:
        """Return the connection to the supervisor, a new one if it was lost.

        Raises:
            InfrastructureError: If the interpreter is not open, or was lost through no fault of code inside.
        """

    @abstractmethod
    def _current(self) -> Link | None:
        """Return the connection to the supervisor, which may be lost."""

    @abstractmethod
    async def _judge(self, link: Link) -> str:
        """Abandon the supervisor behind a lost connection; return how it ended, or "" if it did not.

        Raises:
            InfrastructureError: If no code inside can have caused the loss.
        """

    async def _on_worker_end(self) -> None:
        """Act after an answer that says that the worker of the supervisor has ended."""

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
            self._losses = self.sandbox.losses
            self._opened = True

    async def close(self) -> None:
        """End the interpreter."""
        opened, self._opened = self._opened, False
        try:
            if opened:
                await self._end()
        finally:
            await self._close_sandbox()

    async def _close_sandbox(self) -> None:
        if self.owns_sandbox:
            await self.sandbox.close()
            self.owns_sandbox = False

    def _check_open(self) -> None:
        if not self._opened:
            raise InfrastructureError("the interpreter is not open: use 'async with', or call open() first")

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

    async def restart(self) -> None:
        """Forget all definitions."""
        async with self._lock:
            link = await self._live()
            try:
                await link.ask("restart")
            except LinkLost:
                await self._judge(link)
            self.cells.clear()
            self._take_loss()

    async def interrupt(self) -> None:
        """Stop the running code."""
        self._check_open()
        await asyncio.sleep(0)  # the request of a cell that is just beginning is sent first
        link = self._current()
        if link is not None:
            with contextlib.suppress(LinkLost):
                await link.ask("stop_cell", why="")

    async def _run(self, code: str, timeout: float | None, left: float | None) -> ReplResult:
        """Run a cell and append it to `cells`; no other cell runs. `left` is the rest of the timeout."""
        link = await self._live()
        self.cells.append(code)
        self._has_run = True
        try:
            header, fields = await self._ask(link, code, left)
        except TimeoutError:
            # Code can stop or starve its supervisor, which may run as the same user.
            stopped = f"Execution exceeded {timeout:g} s and was stopped"
            return await self._lost(link, stopped, "timeout")
        except SandboxError as error:
            has_closed = isinstance(error, LinkLost) and not link.why
            return await self._lost(link, "" if has_closed else str(error), "died")
        if header.get("how") is not None:
            await self._on_worker_end()
        return self._result(header, fields, timeout)

    async def _ask(self, link: Link, code: str, timeout: float | None) -> Answer:
        """Send a cell and wait for its answer. If cancelled, stop the cell first.

        Raises:
            TimeoutError: If the supervisor does not answer.
            SandboxError: If the supervisor is gone, could not start an interpreter, or answers invalidly.
        """
        data = code.encode("utf-8", "surrogatepass")
        answer = asyncio.ensure_future(link.ask("cell", data, timeout_s=timeout))
        patience = None if timeout is None else timeout + GRACE_S + MARGIN_S
        try:
            async with asyncio.timeout(patience):
                return _checked(await asyncio.shield(answer))
        except asyncio.CancelledError:
            await run_to_completion(self._give_up(link, answer), always_wait=True)
            raise

    async def _lost(self, link: Link, message: str, status: ReplStatus) -> ReplResult:
        """Return the result of a cell whose supervisor was lost or is silent; `message` may be ""."""
        await link.close()
        try:
            ended = await self._judge(link)
        except BaseException:
            self.cells.pop()
            raise
        if status == "died":
            message = f"The interpreter ended ({message or ended or 'its connection was closed'})"
        _, lost = self._take_loss()
        timed_out = status == "timeout"
        return ReplResult(message=f"{message}; {lost}", status=status, timed_out=timed_out, state_lost=True)

    def _take_loss(self) -> tuple[bool, str]:
        """Return whether an unreported loss exists, and what was lost. It then counts as reported."""
        emptied = self.sandbox.losses != self._losses
        untold, self._untold, self._losses = self._untold or emptied, False, self.sandbox.losses
        return untold, ALL_LOST if emptied else LOST

    async def _give_up(self, link: Link, answer: asyncio.Future[Answer]) -> None:
        with contextlib.suppress(SandboxError):
            await link.begin("stop_cell", why="cancelled")
            await asyncio.wait((answer,), timeout=GRACE_S + MARGIN_S)
        if not answer.done() or answer.exception() is not None:
            answer.cancel()
            await link.close()  # the next call detects the loss
        elif "how" in answer.result()[0]:
            self._untold = True
            await self._on_worker_end()

    def _result(self, header: dict[str, Any], fields: list[bytes], timeout: float | None) -> ReplResult:
        out, err, background, *answer = fields
        value, *error = answer[:4] if answer else (b"", b"", b"", b"")
        stopped, how = header["stopped"], header.get("how")
        untold, lost = self._take_loss()
        lost_before = header["lost_before"] or untold
        raised = ReplError(*map(_text, error)) if error[0] and not stopped else None
        messages = [_message(stopped, how, timeout, self.sandbox.limits.memory_total_bytes)]
        if lost_before:
            messages.append(f"Before this call, {lost}")
        return ReplResult(
            stdout=out.decode("utf-8", "replace"),
            stderr=err.decode("utf-8", "replace"),
            background=background.decode("utf-8", "replace"),
            display=tuple(_displays(answer[4:])),
            error=raised,
            timed_out=stopped == "timeout",
            execution_count=header["count"],
            value=_text(value[1:]) if value else None,
            status=_status(stopped, how, raised),
            message="\n".join(filter(None, messages)),
            state_lost=lost_before or how is not None,
            omitted_bytes=header["omitted"],
        )


class ProcessRepl(SupervisedRepl):
    """An interpreter whose supervisor is a process in the sandbox."""

    sandbox: Sandbox
    no_start: ClassVar[str]
    """Beginning of the message if the process ends or is silent instead of starting."""

    def __init__(self) -> None:
        super().__init__()
        self._process: Process | None = None
        self._link: Link | None = None

    @abstractmethod
    def _argv(self) -> Sequence[str]:
        """Return the command of the process."""

    @abstractmethod
    async def _greet(self, process: Process) -> tuple[Link, str]:
        """Send the settings. Return the connection, and why there is no interpreter or ""."""

    async def _run(self, code: str, timeout: float | None, left: float | None) -> ReplResult:
        try:
            return await super()._run(code, timeout, left)
        except StartFailed as error:  # leftovers of earlier code prevent the start
            if not self._has_run:
                raise
            _, lost = self._take_loss()
            message = f"{error}; {lost}, and the code was not run"
            return ReplResult(status="died", message=message, state_lost=True)

    async def _live(self) -> Link:
        self._check_open()
        if self._link is not None and self._link.is_lost:
            await self._judge(self._link)
            self._untold = self._has_run
        if self._link is None:
            await self._begin()
        assert self._link is not None
        return self._link

    def _current(self) -> Link | None:
        return self._link

    async def _judge(self, link: Link) -> str:
        process, self._process, self._link = self._process, None, None
        ended = ""
        if process is not None:
            with contextlib.suppress(TimeoutError, SandboxError):  # end it if it still runs
                async with asyncio.timeout(END_S):
                    ended = await process.wait()
            await process.kill()
        self._check_open()  # it was closed while a cell ran
        if link.cause is not None:
            raise link.cause
        if await self.sandbox.was_ended_outside(ended):
            _, lost = self._take_loss()
            raise SandboxError(f"the interpreter was lost: its sandbox was {ended} from outside; {lost}")
        code = ended.removeprefix("exit code ")
        return describe_exit(signed_exit_code(int(code))) if code.isdigit() else ended

    async def _begin(self) -> None:
        self._process = process = await self.sandbox.spawn(self._argv())
        try:
            self._link, reason = await self._greet(process)
        except (SandboxError, EOFError, TimeoutError):
            await process.kill()
            reason = f"{self.no_start}: {process.errors().strip() or await process.wait()}"
        except BaseException:
            await process.kill()
            raise
        if reason:
            await self._end()
            raise StartFailed(reason)

    async def _end(self) -> None:
        process, self._process, self._link = self._process, None, None
        if process is not None:
            await process.kill()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sandbox!r})"


class ProcessStream:
    """A process as a `ByteStream`.

    Args:
        process: The process.
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    def try_send(self, data: bytes, fds: Sequence[int]) -> int:
        """Send nothing without waiting; a process stream cannot carry open files.

        Args:
            data: Bytes, of which `send` sends all.
            fds: Descriptors of open files; must be empty.
        """
        assert not fds
        return 0

    async def send(self, data: bytes) -> None:
        """Send all bytes."""
        await self._process.send(data)

    async def receive(self) -> bytes:
        """Wait for bytes and return them."""
        return await self._process.receive()


def _checked(answer: Answer) -> Answer:
    """Return an answer of known shape: code may have forged it.

    Raises:
        SandboxError: If it has another shape.
    """
    header, fields = answer
    has_types = all(type(header.get(name)) is kind for name, kind in _HEADER.items())
    if not has_types or type(header.get("how", "")) is not str or 3 < len(fields) < 7 or len(fields) < 3:
        raise SandboxError("it sent an invalid answer")
    return header, fields


def _text(data: bytes) -> str:
    return data[:MAX_TEXT].decode("utf-8", "replace")


def _status(stopped: str, how: str | None, error: ReplError | None) -> ReplStatus:
    if stopped in ("timeout", "cancelled"):
        return "timeout"
    if stopped:
        return "limit"
    if how is not None:
        return "died"
    return "ok" if error is None else "error"


def _message(stopped: str, how: str | None, timeout: float | None, memory: int | None) -> str:
    """Return a message on how the code was stopped, or how the interpreter ended."""
    state = KEPT if how is None else LOST
    if stopped == "timeout":
        return f"Execution exceeded {timeout:g} s and was stopped; {state}"
    if stopped == "flood":
        return f"Execution printed more than {FLOOD_BYTES >> 20} MiB and was stopped; {state}"
    if stopped == "memory":
        return f"Execution used more than {(memory or 0) >> 20} MiB in all and was stopped; {state}"
    if stopped:
        return f"Execution was stopped; {state}"
    return "" if how is None else f"The interpreter ended ({how}); {state}"


def _displays(shown: list[bytes]) -> list[ReplDisplay]:
    """Return the displayed images whose bytes match their media type, and the texts, as far as allowed."""
    found: list[ReplDisplay] = []
    images = 0
    for kind, data in zip(map(_text, shown[::2]), shown[1::2], strict=False):
        if images < MAX_IMAGES and is_image(kind, data):
            found.append(ReplDisplay(kind, data))
            images += 1
        elif kind == "text/plain" and len(found) - images < MAX_TEXTS:
            found.append(ReplDisplay(kind, _text(data)))
    return found
