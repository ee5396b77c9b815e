"""Start MCP servers, and exchange messages, one per line, over their stdin and stdout.

The SDK starts processes too, but not in a sandbox, and it keeps neither their exit status nor their stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import anyio
import pydantic_core
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import ErrorData, JSONRPCError, jsonrpc_message_adapter
from mcp_types.jsonrpc import INTERNAL_ERROR

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import fields_of
from torchrl_agentic.sandbox.base import Process
from torchrl_agentic.sandbox.cancellation import run_to_completion
from torchrl_agentic.sandbox.process import ServerProcess, start_server
from torchrl_agentic.text import printable
from torchrl_agentic.tools.mcp.server_config import TOO_MANY, MCPServerConfig, has_too_many_values, too_large

logger = logging.getLogger(__name__)

MAX_SKIPPED = 1 << 30
"""Bytes of a message that is too long that are skipped before the server is closed."""
ENDS = 1024
"""Bytes at each end of such a message that are kept, because they may have the id of the request."""
END_S = 2.0
"""Seconds that a server may take to end after its stdin is closed, and again after SIGTERM."""
STATUS_S = 1.0
"""Seconds to wait for the exit status of a process that has closed its stdout."""
MAX_STDERR = 2000
MAX_RUBBISH = 200
_LAST_ID = re.compile(
    rb'"id"\s*:\s*(-?\d{1,18}|"(?:[^"\\]|\\.){1,200}")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$'
)

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
async def stdio(config: MCPServerConfig, report: ServerReport, max_bytes: int) -> AsyncGenerator[Streams]:
    """Start a server, and end it with all its processes on exit.

    Args:
        config: The server.
        report: Gets the facts about the server.
        max_bytes: Most bytes of a message; the request of a longer one gets an error.

    Returns:
        An async context manager that yields the streams of the connection.
    """
    process, free = await start(config)
    report.process = process
    report.pid = process.process.pid if isinstance(process, ServerProcess) else None
    incoming, read = anyio.create_memory_object_stream[Item](64)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_receive(config, process, report, max_bytes, incoming)),
        asyncio.create_task(_send(process, outgoing)),
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
    max_bytes: int,
    incoming: MemoryObjectSendStream[Item],
) -> None:
    """Pass on messages until the server ends; then set how it ended before the stream closes."""
    rest = bytearray()
    head, skipped = b"", 0  # first bytes and number of skipped bytes of a message that is too long
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async with incoming:
            while data := await process.receive():
                rest += data
                if b"\n" in data:
                    *lines, rest = rest.split(b"\n")
                    for number, line in enumerate(lines):
                        if number % 64 == 0:
                            await asyncio.sleep(0)  # thousands of lines that are no messages may come at once
                        if (size := skipped + len(line)) > max_bytes:
                            head = head or bytes(line[:ENDS])
                            error = too_large(size, max_bytes)
                            message = answer_too_large(head, bytes(line[-ENDS:]), error)
                            if message is None:
                                _pass_over(config, head, report)
                            head, skipped = b"", 0
                        elif has_too_many_values(line):
                            message = answer_too_large(bytes(line[:ENDS]), bytes(line[-ENDS:]), TOO_MANY)
                        else:
                            message = _message(config, bytes(line), report)
                        if message is not None:
                            await incoming.send(message)
                if skipped + len(rest) > max_bytes and len(rest) > ENDS:
                    head = head or bytes(rest[:ENDS])
                    skipped += len(rest) - ENDS
                    del rest[:-ENDS]
                if skipped > max_bytes + MAX_SKIPPED:
                    report.how = f"it sent a message of more than {skipped >> 20} MiB"
                    return
            if not report.how:
                report.how = "it closed its stdout"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STATUS_S):
                        report.how = await process.wait()


def answer_too_large(head: bytes, tail: bytes, message: str) -> SessionMessage | None:
    """Return an error response in place of a response that is too long.

    Args:
        head: First bytes of the message. Servers write the id before or after the result.
        tail: Last bytes of the message.
        message: What is too large.

    Returns:
        The error response, or None if the message is not a response or its id is not found.
    """
    try:
        fields = fields_of(pydantic_core.from_json(head.decode(errors="ignore"), allow_partial=True))
        if fields is None or "method" in fields:
            return None
        found = fields.get("id")
        if "id" not in fields and (last := _LAST_ID.search(tail)) is not None:
            found = pydantic_core.from_json(last[1])
    except ValueError:
        return None
    if isinstance(found, bool) or not isinstance(found, int | str):
        return None
    error = ErrorData(code=INTERNAL_ERROR, message=message)
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=found, error=error))


def _message(config: MCPServerConfig, line: bytes, report: ServerReport) -> SessionMessage | None:
    if not line.strip():
        return None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        _pass_over(config, line, report)
        return None


def _pass_over(config: MCPServerConfig, line: bytes, report: ServerReport) -> None:
    """Store and log the first line that is not a message."""
    if not report.rubbish:
        shown = config.without_secrets(line[: 8 * MAX_RUBBISH].decode("utf-8", "replace").strip())
        report.rubbish = shown[:MAX_RUBBISH]
        logger.warning(
            "the MCP server %r printed a line to stdout that is not a message and is ignored: %r",
            config.name,
            report.rubbish,
        )


async def _send(process: Process, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
    async with outgoing:
        with contextlib.suppress(EOFError):
            async for message in outgoing:
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
