"""`SupervisedRepl`: base of interpreters that run behind a supervisor of `sandbox.inside`."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from typing import Any

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.messages import image_type
from torchrl_agentic.repl.base import KEPT, LOST, ReplDisplay, ReplError, ReplResult, ReplStatus, SerialRepl
from torchrl_agentic.sandbox.bootstrap import FLOOD_BYTES, GRACE_S
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.inside.worker import MAX_DISPLAY_BYTES as MAX_IMAGE
from torchrl_agentic.sandbox.inside.worker import MAX_DISPLAYS as MAX_IMAGES
from torchrl_agentic.sandbox.link import Link, LinkLost

__all__ = ["KINDS", "MAX_IMAGE", "MAX_IMAGES", "is_image"]
KINDS = ("image/png", "image/jpeg")
"""Media types of images that are accepted."""


def is_image(kind: str, data: bytes) -> bool:
    """Return whether data is an image of this media type, and not too large.

    Args:
        kind: The media type.
        data: The data.
    """
    return kind in KINDS and image_type(data) == kind and len(data) <= MAX_IMAGE


MAX_TEXT = 1 << 16
"""Maximum bytes that are read of a value or an error; regular ones are shorter."""
MARGIN_S = 5.0
"""Seconds beyond its deadline and grace period after which a supervisor counts as lost."""

Answer = tuple[dict[str, Any], list[bytes]]


class SupervisedRepl(SerialRepl):
    """An interpreter behind a `Link`. If that is lost, the next call gets a new supervisor."""

    def __init__(self) -> None:
        super().__init__()
        self._has_run = False

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
    async def _judge(self, link: Link) -> None:
        """Abandon the supervisor behind a lost connection.

        Raises:
            InfrastructureError: If no code inside can have caused the loss.
        """

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
        link = self._current()
        if link is not None:
            with contextlib.suppress(LinkLost):
                await link.ask("stop_cell", why="")

    async def _run(self, code: str, timeout: float | None, left: float | None) -> ReplResult:
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
            return await self._lost(link, f"The interpreter ended ({error})", "died")
        return self._result(header, fields, timeout)

    async def _ask(self, link: Link, code: str, timeout: float | None) -> Answer:
        """Send a cell and wait for its answer. If cancelled, stop the cell first.

        Raises:
            TimeoutError: If the supervisor does not answer.
            SandboxError: If the supervisor is gone, or could not start an interpreter.
        """
        data = code.encode("utf-8", "surrogatepass")
        answer = asyncio.ensure_future(link.ask("cell", data, timeout_s=timeout))
        patience = None if timeout is None else timeout + GRACE_S + MARGIN_S
        try:
            async with asyncio.timeout(patience):
                return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await run_to_completion(self._give_up(link, answer), always_wait=True)
            raise

    async def _lost(self, link: Link, message: str, status: ReplStatus) -> ReplResult:
        """Return the result of a cell whose supervisor was lost or does not answer."""
        await link.close()
        try:
            await self._judge(link)
        except BaseException:
            self.cells.pop()
            raise
        _, lost = self._take_loss()
        timed_out = status == "timeout"
        return ReplResult(message=f"{message}; {lost}", status=status, timed_out=timed_out, state_lost=True)

    async def _give_up(self, link: Link, answer: asyncio.Future[Answer]) -> None:
        with contextlib.suppress(SandboxError):
            await link.begin("stop_cell", why="cancelled")
            await asyncio.wait((answer,), timeout=GRACE_S + MARGIN_S)
        if not answer.done() or answer.exception() is not None:
            answer.cancel()
            await link.close()  # the next call detects the loss
        elif "how" in answer.result()[0]:
            self._untold = True

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
    """Return the displayed images whose bytes match their media type."""
    pairs = zip(shown[::2], shown[1::2], strict=False)
    images = ((_text(kind), data) for kind, data in pairs)
    return [ReplDisplay(kind, data) for kind, data in images if is_image(kind, data)][:MAX_IMAGES]
