"""Start MCP servers, and exchange messages, one per line, over their stdin and stdout.

The SDK starts processes too, but not in a sandbox, and it keeps neither their exit status nor their stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.sandbox.base import Process
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.process import ServerProcess, start_server
from torchrl_agentic.text import printable
from torchrl_agentic.tools.mcp.message_reader import Lines, MessageReader, TooLong, as_session_message
from torchrl_agentic.tools.mcp.server_config import MCPServerConfig

logger = logging.getLogger(__name__)

MAX_SKIPPED = 1 << 30
"""Bytes of a message that is too long that are skipped before the server is closed."""
PART_S = 1.0
"""Seconds to wait for the next line of a message over several lines."""
END_S = 2.0
"""Seconds that a server may take to end after its stdin is closed, and again after SIGTERM."""
STATUS_S = 1.0
"""Seconds to wait for the exit status of a process that has closed its stdout."""
MAX_STDERR = 2000
MAX_RUBBISH = 200
Item = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Item], MemoryObjectSendStream[SessionMessage]]


@dataclass(slots=True)
class ServerReport:
    """Facts about a server that we started, for messages.

    Attributes:
        process: The process.
        pid: Its process id, if it is a process of this machine.
        how: How it ended; "" while it runs.
        rubbish: The first line on its stdout that was not a message.
    """

    process: Process | None = None
    pid: int | None = None
    how: str = ""
    rubbish: str = ""

    def text(self, config: MCPServerConfig) -> str:
        """Return the output of the server that helps to find a mistake, without its secrets."""
        lines: list[str] = []
        if self.rubbish:
            lines.append(
                f"it printed {self.rubbish!r} to stdout, which must have MCP messages only; print to stderr "
                "instead"
            )
        errors = self.process.errors().strip() if self.process is not None else ""
        if errors:
            shown = "\n".join(map(printable, config.without_secrets(errors).splitlines()))
            lines.append(f"its stderr ends with:\n{shown[-MAX_STDERR:]}")
        return "; ".join(lines)


async def start(config: MCPServerConfig) -> tuple[Process, Callable[[], object]]:
    """Start a server.

    Returns:
        The process, and a function that closes its sandbox after it has ended.

    Raises:
        InfrastructureError: If the command does not exist, or the sandbox failed.
    """
    assert config.command is not None
    if config.sandbox is not None:
        sandbox = config.sandbox.fresh()
        try:
            await sandbox.open()
            return await sandbox.spawn(_inside(config)), sandbox.close
        except BaseException:
            await run_to_completion(sandbox.close())
            raise
    env = {**get_default_environment(), **(config.env or {})}
    try:
        return await start_server([config.command, *config.args], env=env, cwd=config.cwd), _nothing
    except OSError as error:
        what = str(error)
        if isinstance(error, FileNotFoundError) and error.filename != config.cwd:
            what = f"no such program; install it, or pass its full path (PATH: {env.get('PATH', '')})"
        raise InfrastructureError(
            f"the MCP server {config.name!r} cannot be started: {config.shown}: {what}"
        ) from error


async def _nothing() -> None:
    """Do nothing, because there is no sandbox to close."""


def _inside(config: MCPServerConfig) -> list[str]:
    """Return the command for a sandbox, which does not pass on an environment and a folder itself."""
    variables = [f"{name}={value}" for name, value in (config.env or {}).items()]
    argv = [*(["env", *variables] if variables else []), config.command or "", *config.args]
    return ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", config.cwd, *argv] if config.cwd else argv


@contextlib.asynccontextmanager
async def stdio(
    config: MCPServerConfig, report: ServerReport, reader: MessageReader
) -> AsyncGenerator[Streams]:
    """Start a server, and end it with all its processes on exit.

    Args:
        config: The server.
        report: Gets the facts about the server.
        reader: Reads the messages.

    Returns:
        An async context manager that yields the streams of the connection.
    """
    process, free = await start(config)
    report.process = process
    report.pid = process.process.pid if isinstance(process, ServerProcess) else None
    incoming, read = anyio.create_memory_object_stream[Item](64)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_receive(config, process, report, reader, incoming)),
        asyncio.create_task(_send(process, reader, outgoing)),
    ]
    try:
        yield read, write
    finally:
        for stream in (read, write, incoming, outgoing):
            stream.close()
        await run_to_completion(_end(process, tasks, free), always_wait=True)


async def _receive(
    config: MCPServerConfig,
    process: Process,
    report: ServerReport,
    reader: MessageReader,
    incoming: MemoryObjectSendStream[Item],
) -> None:
    """Pass on messages until the server ends; then set how it ended before the stream closes."""
    lines = Lines(reader.max_bytes)
    receiving = asyncio.ensure_future(process.receive())
    try:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with incoming:
                while True:
                    done, _ = await asyncio.wait((receiving,), timeout=PART_S if reader.has_part else None)
                    data = receiving.result() if done else b""
                    for number, line in enumerate(lines.feed(data)):
                        if number % 64 == 63:
                            await asyncio.sleep(0)  # others run between thousands of lines
                        is_long = isinstance(line, TooLong)
                        found = reader.too_long(line) if is_long else reader.read_line(line)
                        if not found and not reader.has_part:
                            _pass_over(config, line.head if is_long else line, report)
                        for message in found:
                            await incoming.send(as_session_message(message))
                    if not data:  # no further lines
                        for message in reader.read_part():
                            await incoming.send(as_session_message(message))
                    if lines.skipped > reader.max_bytes + MAX_SKIPPED:
                        report.how = f"it sent a message of more than {lines.skipped >> 20} MiB"
                        return
                    if done and not data:
                        break
                    if done:
                        receiving = asyncio.ensure_future(process.receive())
                report.how = "it closed its stdout"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STATUS_S):
                        report.how = await process.wait()
    finally:
        receiving.cancel()


def _pass_over(config: MCPServerConfig, line: bytes, report: ServerReport) -> None:
    """Store and log the first line that is not a message."""
    if line.strip() and b'"jsonrpc"' not in line and not report.rubbish:
        shown = config.without_secrets(line[: 8 * MAX_RUBBISH].decode("utf-8", "replace").strip())
        report.rubbish = shown[:MAX_RUBBISH]
        logger.warning(
            "the MCP server %r printed a line to stdout that is not a message and is ignored: %r",
            config.name,
            report.rubbish,
        )


async def _send(
    process: Process, reader: MessageReader, outgoing: MemoryObjectReceiveStream[SessionMessage]
) -> None:
    async with outgoing:
        with contextlib.suppress(EOFError):
            async for message in outgoing:
                reader.sent(message.message)
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.send(text.encode() + b"\n")


async def _end(process: Process, tasks: list[asyncio.Task[None]], free: Callable[[], object]) -> None:
    """End a server: close its stdin, then send SIGTERM, then SIGKILL."""
    try:
        if isinstance(process, ServerProcess):
            process.finish()
            for request in (None, signal.SIGTERM):
                if request is not None:
                    process.signal(request)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        await process.wait()
                        break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await process.kill()
        found = free()
        if asyncio.iscoroutine(found):
            await found
