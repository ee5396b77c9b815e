"""One Python process per interpreter, inside a sandbox, talking in frames over a socket of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from importlib.resources import files
from typing import Any, ClassVar

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import fields_of
from torchrl_agentic.repl.base import Repl, ReplError, ReplResult, ReplStatus
from torchrl_agentic.repl.wire import MAX_CODE, BadFrame, pack, read_frame
from torchrl_agentic.sandbox import Process, Sandbox, default_sandbox
from torchrl_agentic.sandbox.capture import Capture, Drain
from torchrl_agentic.sandbox.process import exit_or_signal
from torchrl_agentic.sandbox.process import how as describe

GRACE_S = 1.0
"""How long interrupted code may take to react."""
KEPT = "interpreter state is kept"
LOST = "interpreter state was lost (files in /work are kept)"


class _Incarnation:
    """One process of an interpreter, with its connection and what it prints."""

    def __init__(self, process: Process, connection: socket.socket, output_bytes: int) -> None:
        self.process = process
        self.connection = connection
        self.out = Drain(process.stdout_fd, Capture(output_bytes))
        self.err = Drain(process.stderr_fd, Capture(output_bytes))
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=self.connection)

    async def ask(self, message: dict[str, Any]) -> None:
        self.writer.write(pack(message))
        try:
            await self.writer.drain()
        except ConnectionError:
            raise EOFError from None

    def printed(self) -> tuple[str, str, int]:
        """What was printed up to now.

        What was written before a frame is in the pipes when the frame is here.
        """
        self.out.pull(rounds=64)
        self.err.pull(rounds=64)
        (out, more), (err, even_more) = self.out.capture.take(), self.err.capture.take()
        return out, err, more + even_more

    async def end(self) -> None:
        await self.process.kill()
        self.out.stop()
        self.err.stop()
        self.writer.close()


class SubprocessRepl(Repl):
    """A Python process in a sandbox; variables, imports and functions stay from call to call.

    Args:
        sandbox: where it runs; None: `default_sandbox()`. It is opened with the interpreter if it is not
            open.
        python_argv: the command that starts Python inside; None: the sandbox's own.
    """

    name: ClassVar[str] = "subprocess"

    def __init__(self, sandbox: Sandbox | None = None, *, python_argv: tuple[str, ...] | None = None) -> None:
        self.sandbox = default_sandbox() if sandbox is None else sandbox
        self._python_argv = python_argv
        self._live: _Incarnation | None = None
        self._opened_sandbox = False
        self._opened = False
        self._lock = asyncio.Lock()
        self._seq = 0
        self._running = 0
        self._untold = False  # state was lost, and no result has said so

    def fresh(self, sandbox: Sandbox | None = None) -> SubprocessRepl:
        """Make another one with the same settings, not open yet, in a sandbox of its own or in this one."""
        return SubprocessRepl(sandbox or self.sandbox.fresh(), python_argv=self._python_argv)

    async def open(self) -> None:
        """Start it."""
        async with self._lock:
            if self._opened:
                return
            if not self.sandbox.is_open:
                await self.sandbox.open()
                self._opened_sandbox = True
            try:
                await self._start()
            except BaseException:
                await self.close()
                raise
            self._opened = True

    async def close(self) -> None:
        """End it."""
        self._opened = False
        await self._end()
        if self._opened_sandbox:
            self._opened_sandbox = False
            await self.sandbox.close()

    async def restart(self) -> None:
        """Forget all that was defined."""
        async with self._lock:
            await self._end()
            await self._start()

    async def interrupt(self) -> None:
        """Stop the code that runs now."""
        if self._live is not None and self._running:
            with contextlib.suppress(EOFError):
                await self._live.ask({"op": "interrupt", "seq": self._running})

    async def execute(self, code: str, *, timeout: float | None = None) -> ReplResult:
        """Run code."""
        if not self._opened:
            raise InfrastructureError("the interpreter is not open: use 'async with', or call open() first")
        if len(code) > MAX_CODE:
            error = ReplError("ValueError", f"code of {len(code)} characters; at most {MAX_CODE} can be run")
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
            return await self._execute(code, timeout, deadline)
        finally:
            self._lock.release()

    async def _execute(self, code: str, timeout: float | None, deadline: float | None) -> ReplResult:
        live = self._live if self._live is not None else await self._start()
        self._seq += 1
        seq = self._running = self._seq
        try:
            async with asyncio.timeout_at(deadline):
                await live.ask({"op": "exec", "seq": seq, "code": code})
                reply = await self._reply(live, seq)
        except TimeoutError:
            stopped = f"Execution exceeded {timeout:g} s and was stopped"
            reply = await self._stop(live, seq)
            if reply is None:
                return await self._lost(live, "timeout", f"{stopped}; {LOST}")
            return self._result(live, reply, "timeout", f"{stopped}; {KEPT}")
        except asyncio.CancelledError:
            if await asyncio.shield(self._stop(live, seq)) is None:
                self._untold = True
                await asyncio.shield(self._end())
            else:
                live.printed()
            raise
        except EOFError:
            how = await self._how_it_ended(live)
            if how.startswith(
                "killed by"
            ):  # not the interpreter, whose end bubblewrap reports: its sandbox was killed
                await self._end()
                self._untold = True
                raise InfrastructureError(f"the interpreter's sandbox was {how}") from None
            return await self._lost(live, "died", f"The interpreter ended ({_died(how)}); {LOST}")
        except BadFrame as error:
            return await self._lost(live, "died", f"The interpreter broke off ({error}); {LOST}")
        finally:
            self._running = 0
        return self._result(live, reply, "ok", "")

    async def _reply(self, live: _Incarnation, seq: int) -> dict[str, Any]:
        reply = await read_frame(live.reader)
        if reply.get("seq") != seq:
            raise BadFrame("an answer to another question")
        return reply

    async def _stop(self, live: _Incarnation, seq: int) -> dict[str, Any] | None:
        """Interrupt a cell and wait a moment for its answer; None if none came."""
        try:
            async with asyncio.timeout(GRACE_S):
                await live.ask({"op": "interrupt", "seq": seq})
                return await self._reply(live, seq)
        except (TimeoutError, EOFError, BadFrame):
            return None

    async def _how_it_ended(self, live: _Incarnation) -> str:
        """Say how the process ended; one that only hung up is killed when it is replaced."""
        try:
            async with asyncio.timeout(GRACE_S):
                return await live.process.wait()
        except TimeoutError:
            return "it closed its connection"

    async def _lost(self, live: _Incarnation, status: ReplStatus, message: str) -> ReplResult:
        out, err, omitted = live.printed()
        await self._end()
        return ReplResult(
            stdout=out,
            stderr=err,
            timed_out=status == "timeout",
            execution_count=self._seq,
            status=status,
            message=message,
            state_lost=True,
            omitted_bytes=omitted,
        )

    def _result(
        self, live: _Incarnation, reply: dict[str, Any], status: ReplStatus, message: str
    ) -> ReplResult:
        out, err, omitted = live.printed()
        # Whoever forges a frame may put anything there.
        raised, value = reply.get("error"), reply.get("value")
        error, fields = None, fields_of(raised)
        if fields is not None:
            error = ReplError(*(str(fields.get(name, "")) for name in ("ename", "evalue", "traceback")))
        lost, self._untold = self._untold, False
        if lost:
            message = f"{message}\n" * bool(message) + f"Before this call, {LOST}"
        if status == "timeout":
            error = None  # the KeyboardInterrupt is ours; the message says what happened
        elif error is not None:
            status = "error"
        return ReplResult(
            stdout=out,
            stderr=err,
            error=error,
            timed_out=status == "timeout",
            execution_count=self._seq,
            value=None if value is None else str(value),
            status=status,
            message=message,
            state_lost=lost,
            omitted_bytes=omitted,
        )

    async def _start(self) -> _Incarnation:
        ours, theirs = socket.socketpair()
        try:
            argv = self._python_argv or self.sandbox.python_argv
            source = files("torchrl_agentic.repl").joinpath("worker.py").read_text("utf-8")
            command = (*argv, "-s", "-B", "-c", source, str(theirs.fileno()))
            os.set_inheritable(theirs.fileno(), True)
            process = await self.sandbox.spawn(command, pass_fds=(theirs.fileno(),))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        live = _Incarnation(process, ours, self.sandbox.limits.output_bytes)
        try:
            await live.connect()
        except BaseException:
            await process.kill()
            ours.close()
            raise
        self._live = live
        return live

    async def _end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            await live.end()

    def __repr__(self) -> str:
        return f"SubprocessRepl({self.sandbox!r})"


def _died(how: str) -> str:
    """Say how code inside ended, from bubblewrap's exit code."""
    code = how.removeprefix("exit code ")
    return describe(exit_or_signal(int(code))) if code.isdigit() else how
