"""Servers that we start: MCP messages, one a line, over the stdin and stdout of a process.

The SDK starts processes too, but not in a sandbox, and it keeps neither how they ended nor what they wrote to
stderr.
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
from mcp_types import jsonrpc_message_adapter

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.sandbox.base import Process
from torchrl_agentic.sandbox.process import Served, serve
from torchrl_agentic.sandbox.uncancelled import to_the_end
from torchrl_agentic.tools.mcp.config import MCPServerConfig

logger = logging.getLogger(__name__)

MAX_LINE = 64 << 20
"""The longest message that is taken, in bytes."""
END_S = 2.0
"""How long a server may take to end once its stdin is closed, and again once it has got SIGTERM."""
TOLD_S = 1.0
"""How long we wait to hear how a process ended that has closed its stdout."""
MAX_STDERR = 2000
MAX_RUBBISH = 200

Item = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Item], MemoryObjectSendStream[SessionMessage]]


@dataclass(slots=True)
class Report:
    """What is known of a server that we started: for messages about it.

    how: how it ended, once it has. rubbish: the first line on its stdout that was no message.
    """

    process: Process | None = None
    pid: int | None = None
    how: str = ""
    rubbish: str = ""

    def text(self, config: MCPServerConfig) -> str:
        """Say what was printed, for whoever runs the job."""
        lines: list[str] = []
        if self.rubbish:
            lines.append(
                f"it printed {self.rubbish!r} to stdout, which is for MCP messages alone; prints belong on "
                "stderr"
            )
        errors = self.process.errors().strip() if self.process is not None else ""
        if errors:
            lines.append(f"its stderr ends with:\n{errors[-MAX_STDERR:]}")
        return config.without_secrets("; ".join(lines))


async def start(config: MCPServerConfig) -> tuple[Process, Callable[[], object]]:
    """Start a server; give it, and what frees its sandbox once it has ended.

    Raises:
        InfrastructureError: there is no such command, or the sandbox failed.
    """
    assert config.command is not None
    if config.sandbox is not None:
        sandbox = config.sandbox.fresh()
        try:
            await sandbox.open()
            return await sandbox.spawn(_inside(config)), sandbox.close
        except BaseException:
            await to_the_end(sandbox.close())
            raise
    env = {**get_default_environment(), **(config.env or {})}
    try:
        return await serve([config.command, *config.args], env=env, cwd=config.cwd), _nothing
    except OSError as error:
        what = str(error)
        if isinstance(error, FileNotFoundError) and error.filename != config.cwd:
            what = f"no such program; install it, or give its full path (PATH: {env.get('PATH', '')})"
        raise InfrastructureError(
            f"the MCP server {config.name!r} cannot be started: {config.shown}: {what}"
        ) from error


async def _nothing() -> None:
    """There is no sandbox to free."""


def _inside(config: MCPServerConfig) -> list[str]:
    """Give the command for inside a sandbox, which passes on no environment and no folder by itself."""
    variables = [f"{name}={value}" for name, value in (config.env or {}).items()]
    argv = [*(["env", *variables] if variables else []), config.command or "", *config.args]
    return ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", config.cwd, *argv] if config.cwd else argv


@contextlib.asynccontextmanager
async def stdio(config: MCPServerConfig, report: Report) -> AsyncGenerator[Streams]:
    """Start a server and speak with it; it has ended, with all it started, when this is left."""
    process, free = await start(config)
    report.process = process
    report.pid = process.process.pid if isinstance(process, Served) else None
    incoming, read = anyio.create_memory_object_stream[Item](64)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_receive(config, process, report, incoming)),
        asyncio.create_task(_send(process, outgoing)),
    ]
    try:
        yield read, write
    finally:
        for stream in (read, write, incoming, outgoing):
            stream.close()
        await to_the_end(_end(process, tasks, free), however_often=True)


async def _receive(
    config: MCPServerConfig, process: Process, report: Report, incoming: MemoryObjectSendStream[Item]
) -> None:
    """Hand on what the server says, until it ends; then find out how, before anybody is told."""
    rest = bytearray()
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async with incoming:
            while data := await process.receive():
                rest += data
                if b"\n" in data:
                    *lines, rest = rest.split(b"\n")
                    for line in lines:
                        if (message := _message(config, bytes(line), report)) is not None:
                            await incoming.send(message)
                if len(rest) > MAX_LINE:
                    report.how = f"it sent a message of more than {MAX_LINE >> 20} MiB"
                    return
            if not report.how:
                report.how = "it closed its stdout"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TOLD_S):
                        report.how = await process.wait()


def _message(config: MCPServerConfig, line: bytes, report: Report) -> SessionMessage | None:
    if not line.strip():
        return None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        if not report.rubbish:
            report.rubbish = line[:MAX_RUBBISH].decode("utf-8", "replace").strip()
            logger.warning(
                "the MCP server %r printed to stdout what is no message, and is passed over: %r",
                config.name,
                config.without_secrets(report.rubbish),
            )
        return None


async def _send(process: Process, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
    async with outgoing:
        with contextlib.suppress(EOFError):
            async for message in outgoing:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                await process.send(text.encode() + b"\n")


async def _end(process: Process, tasks: list[asyncio.Task[None]], free: Callable[[], object]) -> None:
    """Ask a server to end, first kindly; then see to it."""
    try:
        if isinstance(process, Served):
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
