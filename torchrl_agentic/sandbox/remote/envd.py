"""Processes in an E2B sandbox: their bytes, their end, and the end of all that they started.

The SDK's own `commands` turn output into text, which loses bytes; run every command as a line of a login
shell; and kill its first process alone. envd, the agent inside, speaks of bytes, arguments and signals: this
talks to it with the client that the SDK itself uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import SandboxResult
from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.process import CHUNK, END_S, Capture, exit_or_signal
from torchrl_agentic.sandbox.remote.service import clean_up, from_service, in_time
from torchrl_agentic.sandbox.remote.watcher import supervised

if TYPE_CHECKING:
    from e2b import AsyncSandbox
    from e2b.envd.process.process_pb import ProcessEvent, ProcessSelector

START_S = 30.0
"""How long envd may take to start a process."""


class EnvdProcess:
    """A process in an E2B sandbox, under a supervisor.

    take: given what it writes to stdout, and b"" at the end; the process waits as long as that takes.
    stderr: keeps what it writes there.
    """

    def __init__(
        self, machine: AsyncSandbox, take: Callable[[bytes], Awaitable[None]], stderr: Capture
    ) -> None:
        from e2b.envd.client_async import create_rpc_client
        from e2b.envd.process.process_connect import ProcessClient

        self._rpc = create_rpc_client(ProcessClient, machine.envd_api_url, machine.connection_config)
        # The SDK tells it nowhere else, and what names a user depends on it.
        self._envd_version = machine._envd_version  # pyright: ignore[reportPrivateUsage]
        self._take, self._stderr = take, stderr
        self._tag = uuid.uuid4().hex
        self._pid: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._code: int | None = None
        self._lost: Exception | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self, args: Sequence[str], *, stdin: bool = False, user: str | None = None) -> None:
        """Start it; if the caller is cancelled before it runs, it is ended again.

        Raises:
            SandboxError: envd did not start it.
            ValueError: the command is too long.
        """
        self._following = asyncio.create_task(self._follow(args, stdin, user))
        try:
            await asyncio.wait({self._pid})
        except asyncio.CancelledError:
            await clean_up(self._kill())
            raise
        if self._pid.result() is None:
            await clean_up(self._kill())  # it may run all the same, if only the answer got lost
            raise self._lost or SandboxError("the sandbox was closed before a process ran")

    async def _follow(self, args: Sequence[str], stdin: bool, user: str | None) -> None:
        """Read what happens to it, to its end."""
        from e2b.connection_config import KEEPALIVE_PING_HEADER, KEEPALIVE_PING_INTERVAL_SEC
        from e2b.envd.client_async import as_stream, first_event
        from e2b.envd.process.process_pb import ProcessConfig, StartRequest
        from e2b.envd.utils import authentication_header, extract_start_pid

        program, *rest = supervised(args)
        request = StartRequest(process=ProcessConfig(cmd=program, args=rest), stdin=stdin, tag=self._tag)
        headers = authentication_header(self._envd_version, user)
        headers[KEEPALIVE_PING_HEADER] = str(KEEPALIVE_PING_INTERVAL_SEC)
        try:
            with from_service("E2B lost a process"):
                async with contextlib.aclosing(
                    as_stream(self._rpc.start(request, headers=headers))
                ) as events:
                    first = await first_event(events, START_S)
                    self._pid.set_result(extract_start_pid(first, "start process"))
                    async for response in events:
                        await self._handle(response.event)
            if self._code is None:
                raise SandboxError("E2B lost a process: there was no word of its end")
        except SandboxError as error:
            long = "argument list too long" in str(error)
            self._lost = (
                ValueError("the command is too long; put what is long into a file") if long else error
            )
        finally:
            self._set_pid(None)
            await self._take(b"")

    async def _handle(self, event: ProcessEvent | None) -> None:
        what = event and event.event
        if not what:
            return
        if what.field == "end":
            self._code = what.value.exit_code if what.value.exited else -9
        elif what.field == "data" and what.value.output:
            if what.value.output.field == "stdout":
                await self._take(what.value.output.value)
            else:
                self._stderr.add(what.value.output.value)

    @property
    def done(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self._following is not None and self._following.done()

    async def exit_code(self, timeout: float | None) -> int | None:
        """Wait for its exit code, negative for a signal; None if it runs on, or was abandoned.

        Raises:
            SandboxError: it was lost.
        """
        assert self._following is not None
        await asyncio.wait({self._following}, timeout=timeout)
        if self._lost is not None:
            raise self._lost
        return None if self._code is None else exit_or_signal(self._code)

    async def write(self, data: bytes) -> None:
        """Write to its stdin; returns when all of it is in the pipe.

        Raises:
            EOFError: it reads no more.
            SandboxError: envd did not take it. The process is lost then: it would miss these bytes.
        """
        from e2b.envd.process.process_pb import ProcessInput, SendInputRequest
        from protobuf import Oneof

        for start in range(0, len(data), CHUNK):
            piece = ProcessInput(input=Oneof("stdin", bytes(data[start : start + CHUNK])))
            await self._input(self._rpc.send_input(SendInputRequest(process=self._selector(), input=piece)))

    async def close_stdin(self) -> None:
        """Let it read the end of its stdin."""
        from e2b.envd.process.process_pb import CloseStdinRequest

        await self._input(self._rpc.close_stdin(CloseStdinRequest(process=self._selector())))

    async def _input(self, request: Coroutine[Any, Any, object]) -> None:
        from connectrpc.code import Code

        try:
            with from_service("E2B did not pass on input"):
                await request
        except SandboxError as error:
            # Older envds call a closed pipe an internal error.
            broken = _code_of(error) is Code.INTERNAL and ("pipe" in str(error) or "closed" in str(error))
            if broken or _code_of(error) in (Code.NOT_FOUND, Code.FAILED_PRECONDITION):
                raise EOFError("the process reads no more") from None
            self._lost = self._lost or error
            self.abandon()
            raise

    async def kill(self) -> None:
        """End it and its session, also if the caller is cancelled meanwhile.

        Raises:
            SandboxError: the sandbox cannot be reached.
        """
        await to_the_end(in_time(self._kill()))

    async def _kill(self) -> None:
        assert self._following is not None
        await asyncio.wait({self._pid})
        try:
            for number in (15, 15, 15, 9):
                if self._code is not None or not await self._signal(number):
                    return
                if self._following.done():
                    # The connection was lost: only a signal that finds nobody will tell that it is gone.
                    await asyncio.sleep(0.1)
                else:
                    await asyncio.wait({self._following}, timeout=END_S)
        finally:
            self.abandon()

    async def _signal(self, number: int) -> bool:
        """Send a signal to the supervisor; False if it is gone, or all of the sandbox."""
        from connectrpc.code import Code
        from e2b.envd.process.process_pb import SendSignalRequest, Signal
        from e2b.exceptions import is_sandbox_not_found_message

        request = SendSignalRequest(process=self._selector(), signal=Signal(number))
        try:
            with from_service("E2B cannot end a process"):
                await self._rpc.send_signal(request, timeout_ms=5000)
        except SandboxError as error:
            if _code_of(error) is not Code.NOT_FOUND and not is_sandbox_not_found_message(str(error)):
                raise
            return False
        return True

    def abandon(self) -> None:
        """Follow it no more: it is gone, or the sandbox is."""
        if self._following is not None:
            self._following.cancel()
        self._set_pid(None)

    def _set_pid(self, pid: int | None) -> None:
        if not self._pid.done():
            self._pid.set_result(pid)

    def _selector(self) -> ProcessSelector:
        from e2b.envd.process.process_pb import ProcessSelector
        from protobuf import Oneof

        # Older envds find a tag only where no other process has one, so it is for want of anything better.
        pid = self._pid.result()
        return ProcessSelector(selector=Oneof("tag", self._tag) if pid is None else Oneof("pid", pid))


async def run_to_end(
    machine: AsyncSandbox,
    args: Sequence[str],
    *,
    stdin: bytes | None = None,
    user: str | None = None,
    wall_seconds: float | None,
    output_bytes: int = 1 << 16,
) -> SandboxResult:
    """Run something to its end, or its time; it ends too where we fail or the caller is cancelled."""
    out, err = Capture(output_bytes), Capture(output_bytes)

    async def take(data: bytes) -> None:
        out.add(data)

    process = EnvdProcess(machine, take, err)
    await process.start(args, stdin=stdin is not None, user=user)
    began = time.monotonic()
    feeding = None if stdin is None else asyncio.create_task(_feed(process, stdin))
    try:
        code = await process.exit_code(wall_seconds)
    except BaseException:
        await clean_up(process.kill())
        raise
    finally:
        if feeding is not None:
            feeding.cancel()
    if code is None:
        await process.kill()
    return SandboxResult(
        stdout=out.text(),
        stderr=err.text(),
        exit_code=-9 if code is None else code,
        wall_seconds=time.monotonic() - began,
        timed_out=code is None,
        truncated=bool(out.omitted or err.omitted),
    )


async def _feed(process: EnvdProcess, stdin: bytes) -> None:
    with contextlib.suppress(EOFError, SandboxError):  # if it missed some, the process says that it is lost
        await process.write(stdin)
        await process.close_stdin()


def _code_of(error: SandboxError) -> object:
    return getattr(error.__cause__, "code", None)
