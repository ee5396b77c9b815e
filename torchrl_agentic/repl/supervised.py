"""What interpreters with a supervisor of ours have in common: they send it cells, and read its answers."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from typing import Any

from torchrl_agentic.errors import InfrastructureError, SandboxError
from torchrl_agentic.repl.base import KEPT, KILLED, LOST, ReplDisplay, ReplError, ReplResult, ReplStatus
from torchrl_agentic.repl.images import MAX_IMAGES, is_image
from torchrl_agentic.repl.serial import SerialRepl
from torchrl_agentic.sandbox.link import Link
from torchrl_agentic.sandbox.supervision import FLOOD_BYTES, GRACE_S
from torchrl_agentic.sandbox.uncancelled import to_the_end

MAX_TEXT = 1 << 16
"""How many bytes we take of a value or an error: honest ones are shorter."""
MARGIN_S = 5.0
"""How much longer than its deadline and grace we wait for a supervisor before it counts as lost."""

Answer = tuple[dict[str, Any], list[bytes]]


class SupervisedRepl(SerialRepl):
    """An interpreter behind a `Link`."""

    @abstractmethod
    async def _live(self) -> Link:
        """Give the connection with the supervisor.

        Raises:
            InfrastructureError: the interpreter is not open.
        """

    async def restart(self) -> None:
        """Forget all that was defined."""
        async with self._lock:
            await (await self._live()).ask("restart")
            self.cells.clear()
            self._untold = False

    async def interrupt(self) -> None:
        """Stop the code that runs now."""
        await (await self._live()).ask("stop_cell", why="")

    async def _run(self, code: str, timeout: float | None, left: float | None) -> ReplResult:
        header, fields = await self._ask(await self._live(), code, left)
        if header.get("killed"):
            self.cells.pop()
            self._untold = False
            raise InfrastructureError(KILLED)
        return self._result(header, fields, timeout)

    async def _ask(self, link: Link, code: str, timeout: float | None) -> Answer:
        """Send a cell and wait for its answer; a cancelled one is stopped first."""
        self.cells.append(code)
        data = code.encode("utf-8", "surrogatepass")
        answer = asyncio.ensure_future(link.ask("cell", data, timeout_s=timeout))
        patience = None if timeout is None else timeout + GRACE_S + MARGIN_S
        try:
            async with asyncio.timeout(patience):
                return await asyncio.shield(answer)
        except TimeoutError:
            await link.close()
            raise InfrastructureError("the interpreter's supervisor does not answer") from None
        except asyncio.CancelledError:
            await to_the_end(self._give_up(link, answer), however_often=True)
            raise

    async def _give_up(self, link: Link, answer: asyncio.Future[Answer]) -> None:
        with contextlib.suppress(SandboxError):
            await link.begin("stop_cell", why="cancelled")
            done, _ = await asyncio.wait((answer,), timeout=GRACE_S + MARGIN_S)
            if not done:
                await link.close()
            elif answer.exception() is None and "how" in answer.result()[0]:
                self._untold = True

    def _result(self, header: dict[str, Any], fields: list[bytes], timeout: float | None) -> ReplResult:
        out, err, background, *answer = fields
        value, *error = answer[:4] if answer else (b"", b"", b"", b"")
        stopped, how = header["stopped"], header.get("how")
        lost_before = header["lost_before"] or self._untold
        self._untold = False
        raised = ReplError(*map(_text, error)) if error[0] and not stopped else None
        messages = [_message(stopped, how, timeout, self.sandbox.limits.memory_total_bytes)]
        if lost_before:
            messages.append(f"Before this call, {LOST}")
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
    """Say what became of the code, and of the interpreter. how: it ended, if it did."""
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
    """Give what was shown, as far as it is what it says it is."""
    pairs = zip(shown[::2], shown[1::2], strict=False)
    images = ((_text(kind), data) for kind, data in pairs)
    return [ReplDisplay(kind, data) for kind, data in images if is_image(kind, data)][:MAX_IMAGES]
