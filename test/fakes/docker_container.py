"""A container of the fake Docker daemon: a folder, and plain local processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK = "FAKE_DOCKER_CONTAINER"
PIECE = 1 << 15


@dataclass(eq=False)
class FakeContainer:
    """A container.

    Attributes:
        config: The request that created it.
        ending_s: Seconds from the end of its other processes to the end of its first process.
        init: Its first process, once it is started.
        is_ending: True from the start of its end: as in a PID namespace whose first process is ending, no
            process can be started.
    """

    id: str
    name: str
    config: Mapping[str, Any]
    folder: str
    path: str
    ending_s: float = 0.0
    init: asyncio.subprocess.Process | None = None
    processes: list[asyncio.subprocess.Process] = field(default_factory=list[asyncio.subprocess.Process])
    is_abandoned: bool = False
    is_ending: bool = False

    def __post_init__(self) -> None:
        for path in ("", *self.config.get("HostConfig", {}).get("Tmpfs", {})):
            os.makedirs(self.folder + path)

    @property
    def is_running(self) -> bool:
        """Return whether its first process runs."""
        return self.init is not None and self.init.returncode is None

    async def boot(self) -> None:
        """Start its first process."""
        argv = [*self.config.get("Entrypoint", ()), *self.config.get("Cmd", ())]
        self.init = await self.start(argv, self.config, stdin=self.config.get("OpenStdin", False))
        if self.is_abandoned:
            self.abandon()

    def abandon(self) -> None:
        """Close the stdin of the first process, because the attached client has disconnected."""
        self.is_abandoned = True
        if self.init is not None and self.init.stdin is not None and self.config.get("StdinOnce"):
            self.init.stdin.close()

    async def start(
        self, argv: Sequence[str], config: Mapping[str, Any], *, stdin: bool
    ) -> asyncio.subprocess.Process:
        """Start a process as Docker would, but without isolation.

        Raises:
            OSError: If there is no such program, or the container is ending.
        """
        if self.is_ending:
            raise OSError("cannot start a process in a container that is ending")
        if shutil.which(argv[0], path=self.path) is None:
            raise FileNotFoundError(f'exec: "{argv[0]}": executable file not found in $PATH')
        asked = dict(word.split("=", 1) for word in config.get("Env") or ())
        process = await asyncio.create_subprocess_exec(
            *(self._here(word) for word in argv),
            env={"PATH": self.path, "HOME": "/"} | asked | {MARK: self.id},
            cwd=self.folder + config.get("WorkingDir", ""),
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def _here(self, word: str) -> str:
        """Return a word with the path of a tmpfs replaced by the path of its folder."""
        for path in self.config.get("HostConfig", {}).get("Tmpfs", {}):
            if word == path or word.startswith(f"{path}/"):
                return self.folder + word
        return word

    async def kill(self) -> None:
        """Kill all its processes, in any session; the first one ends last, as in a PID namespace."""
        self.is_ending = True
        others = [process for process in self.processes if process is not self.init]
        for process in others:
            _kill_group(process)
        _kill_inside(self.folder, self.id, spared=self.init)
        for process in others:
            await _reap(process)
        if self.is_running:
            await asyncio.sleep(self.ending_s)
        if self.init is not None:
            _kill_group(self.init)
            await _reap(self.init)

    async def remove(self) -> None:
        """Kill all its processes, and remove its files."""
        await self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill_group(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:  # otherwise its PID may be reused
        with contextlib.suppress(ProcessLookupError):  # it is ending
            os.killpg(process.pid, signal.SIGKILL)


async def _reap(process: asyncio.subprocess.Process) -> None:
    await process.wait()
    process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]  output nobody read


def _kill_inside(folder: str, container: str, *, spared: asyncio.subprocess.Process | None) -> None:
    """Kill processes with the mark of a container in their environment, or that work in its folder."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        if spared is not None and int(name) == spared.pid:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            inside = f"{os.readlink(f'/proc/{name}/cwd')}/".startswith(f"{folder}/")
            if inside or f"{MARK}={container}".encode() in file.read():
                os.kill(int(name), signal.SIGKILL)


@dataclass(eq=False)
class FakeExec:
    """A command in a container.

    Attributes:
        late_s: Seconds from the end of its output until it is reported as ended.
        code: None until then; exit code, 128 + n for signal n.
    """

    id: str
    container: FakeContainer
    config: Mapping[str, Any]
    late_s: float = 0.0
    is_running: bool = False
    code: int | None = None

    def state(self) -> dict[str, Any]:
        """Return the state that Docker reports."""
        entrypoint, *arguments = self.config["Cmd"]
        return {
            "ID": self.id,
            "Running": self.is_running,
            "ExitCode": self.code,
            "ProcessConfig": {"tty": False, "entrypoint": entrypoint, "arguments": arguments},
            "ContainerID": self.container.id,
        }

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the command to its end, with a connection for its streams."""
        stdin = bool(self.config.get("AttachStdin"))
        try:
            process = await self.container.start(self.config["Cmd"], self.config, stdin=stdin)
        except OSError as error:
            await frame(writer, 1, f"OCI runtime exec failed: {error}: unknown\r\n".encode())
            self.code = 126
            return
        self.is_running = True
        feeding = asyncio.ensure_future(_feed(reader, process.stdin))
        # As with Docker, the connection ends when no process has the pipes open, not with the command.
        await asyncio.gather(_pass_on(process.stdout, writer, 1), _pass_on(process.stderr, writer, 2))
        code = await process.wait()
        if self.late_s:
            writer.close()
            await asyncio.sleep(self.late_s)
        self.code, self.is_running = (code if code >= 0 else 128 - code), False
        # As with Docker, a connection with unread input is half-closed, and stays.
        if feeding.done() and not feeding.result():
            writer.write_eof()
            await writer.wait_closed()
        feeding.cancel()


async def frame(writer: asyncio.StreamWriter, number: int, data: bytes) -> None:
    """Send a piece of output. The command continues if no client listens."""
    if not writer.is_closing():
        writer.write(struct.pack(">BxxxL", number, len(data)) + data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()


async def _pass_on(pipe: asyncio.StreamReader | None, writer: asyncio.StreamWriter, number: int) -> None:
    assert pipe is not None
    while data := await pipe.read(PIECE):
        await frame(writer, number, data)


async def _feed(reader: asyncio.StreamReader, stdin: asyncio.StreamWriter | None) -> bool:
    """Pass on input. Return whether all of it could be delivered."""
    if stdin is None:
        return True
    try:
        while data := await reader.read(PIECE):
            stdin.write(data)
            await stdin.drain()
    except ConnectionError:
        return False
    finally:
        stdin.close()
    return True
