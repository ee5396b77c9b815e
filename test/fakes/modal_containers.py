"""Containers of the Modal fake: temporary folders, and local processes in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Mapping

from grpclib import GRPCError, Status
from modal_proto import task_command_router_pb2 as router

_WORK = re.compile(r"(\w+=)?/work(/.*)?", re.DOTALL)
_CHUNK = 1 << 16


class Container:
    """A container: a folder, and the processes in it."""

    def __init__(self, tags: Mapping[str, str], path: str) -> None:
        self.tags = dict(tags)
        self._env = {"PATH": path, "IMAGE": "its own"}
        self.executions: dict[str, Execution] = {}
        self.folder = os.path.realpath(tempfile.mkdtemp(prefix="torchrl_agentic-modal-"))

    async def start(self, request: router.TaskExecStartRequest) -> None:
        """Start a command; only once if the request is repeated."""
        if request.exec_id in self.executions:
            return
        process = await asyncio.create_subprocess_exec(
            *(self._here(word) for word in request.command_args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.folder,
            env=self._env,
            start_new_session=True,
        )
        self.executions[request.exec_id] = Execution(process, request.timeout_secs)

    async def end(self) -> None:
        """Kill its processes, and remove the files."""
        for _ in range(100):
            pids = self._pids()
            if not pids:
                break
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        for execution in self.executions.values():
            await execution.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _here(self, word: str) -> str:
        found = _WORK.fullmatch(word)
        return f"{found[1] or ''}{self.folder}{found[2] or ''}" if found else word

    def _pids(self) -> list[int]:
        """Return the processes that work in its folder: some lead their own sessions."""
        pids: list[int] = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/cwd").startswith(self.folder):
                    pids.append(int(name))
        return pids


class Execution:
    """A running command.

    Attributes:
        streams: Its stdout and stderr.
    """

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process, self._stdin = process, process.stdin
        self._written = 0
        self.streams = (Output(process.stdout), Output(process.stderr))
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._kill) if timeout_s else None

    async def write(self, offset: int, data: bytes, eof: bool) -> None:
        """Write input that has not been written before."""
        if self._stdin.is_closing() or self._process.returncode is not None:
            raise GRPCError(Status.FAILED_PRECONDITION, "stdin is closed")
        self._stdin.write(data[max(0, self._written - offset) :])
        self._written = max(self._written, offset + len(data))
        try:
            await self._stdin.drain()
        except ConnectionError:
            raise GRPCError(Status.FAILED_PRECONDITION, "stdin is closed") from None
        if eof:
            self._stdin.close()

    async def wait(self) -> int:
        """Wait for the exit code, -n for signal n."""
        return await self._process.wait()

    async def end(self) -> None:
        """Kill the command, and stop reading."""
        self._kill()
        await self._process.wait()
        self._stdin.close()
        for stream in self.streams:
            await stream.end()

    def _kill(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class Output:
    """The output of a command, kept so that it can be read again from any offset."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._data = bytearray()
        self._more = asyncio.Condition()
        self._pumping = asyncio.ensure_future(self._pump(reader))

    async def read(self, offset: int) -> AsyncGenerator[bytes]:
        """Yield the output from an offset to its end."""
        while True:
            async with self._more:
                await self._more.wait_for(lambda seen=offset: len(self._data) > seen or self._pumping.done())
            data = bytes(self._data[offset : offset + _CHUNK])
            if not data:
                return
            offset += len(data)
            yield data

    async def end(self) -> None:
        """Stop reading."""
        self._pumping.cancel()
        await asyncio.gather(self._pumping, return_exceptions=True)
        async with self._more:
            self._more.notify_all()

    async def _pump(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK):
            async with self._more:
                self._data += data
                self._more.notify_all()
        asyncio.get_running_loop().call_soon(asyncio.ensure_future, self.end())
