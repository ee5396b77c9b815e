"""Reading a pipe on the event loop, in bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.sandbox.cgroups import MemoryGroup
from torchrl_agentic.sandbox.inside.capture import CHUNK, Capture
from torchrl_agentic.sandbox.workspace import NOBODY

__all__ = ["Capture", "Drain"]


class Drain:
    """Reads a pipe into a Capture whenever there is something, until its end."""

    def __init__(self, fd: int, capture: Capture) -> None:
        self.fd = fd
        self.capture = capture
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self.pull)

    def pull(self, rounds: int = 16) -> None:
        """Read what is there now, in no more than some rounds, so that a flood does not hold up others."""
        if self.ended.is_set():
            return  # the number of the pipe may be somebody else's by now
        for _ in range(rounds):
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.stop()
                return
            self.capture.add(data)

    def stop(self) -> None:
        """Read no more, and close the pipe."""
        if not self.ended.is_set():
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.ended.set()


MAX_ERRORS = 4096
"""How much is kept of what a long-lived process writes to stderr."""
END_S = 1.0
"""How long the processes behind a killed one may take to be gone."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. code: as Popen's, None where it was stopped at its time."""

    code: int | None
    stdout: Capture
    stderr: Capture
    wall_s: float


class Child:
    """A running process, the first of a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def kill(self) -> None:
        """Kill it and its process group, and reap it. Not given up when the caller is cancelled."""
        await asyncio.shield(self._kill())

    async def _kill(self) -> None:
        group = self.process.pid
        if self.process.returncode is None:
            # A bwrap that sets up has a child in a session of its own, which does not always end with it.
            # While the parent is stopped, the number of its child is nobody else's.
            _signal_group(group, signal.SIGSTOP)
            for child in _children(group):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
        # Also after it has ended: what it left in the background is of its group.
        _signal_group(group, signal.SIGKILL)
        await self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to it and its process group, unless it has ended."""
        if self.process.returncode is None:
            _signal_group(self.process.pid, number)

    async def wait(self) -> str:
        """Wait until it has ended, and say how."""
        return how(await self.process.wait())


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _children(pid: int) -> list[int]:
    """Give the children of a process, where the kernel says which."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return list(map(int, file.read().split()))
    except OSError:
        return []


def how(code: int) -> str:
    """Say how a process ended, from its exit code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit code {code}"


def exit_or_signal(code: int) -> int:
    """Read an exit code as shells and bubblewrap give it, 128 + n for signal n; negative for a signal."""
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code


@functools.cache
def as_nobody() -> tuple[tuple[str, ...], dict[str, Any]]:
    """Say how to give up being root: a command to put in front, or arguments for Popen.

    With arguments, Popen has to copy the page tables of a trainer that may hold gigabytes: 12 ms for a small
    one, during which the event loop stands still, against 0.2 ms with setpriv.
    """
    if os.geteuid() != 0:
        return (), {}
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return (), {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"), {}


class Command(Child):
    """A running process with pipes on stdout and stderr. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, stdout_fd: int, stderr_fd: int) -> None:
        super().__init__(process)
        self.stdout_fd = stdout_fd
        self.stderr_fd = stderr_fd


class Streams:
    """What connects us with a long-lived process: its stdin and stdout as one socket, and its stderr."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stderr_fd: int) -> None:
        self._reader, self._writer = reader, writer
        self._stderr = Drain(stderr_fd, Capture(MAX_ERRORS))

    async def send(self, data: bytes) -> None:
        """Write to its stdin."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (ConnectionError, RuntimeError):
            raise EOFError("the process reads no more") from None

    async def receive(self) -> bytes:
        """Read what it wrote to stdout; empty at the end."""
        try:
            return await self._reader.read(1 << 16)
        except ConnectionError:
            return b""

    def finish(self) -> None:
        """Let it see the end of its stdin, and go on reading what it writes."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    def errors(self) -> str:
        """Head and tail of what it wrote to stderr so far."""
        self._stderr.pull()
        return self._stderr.capture.text()

    def hang_up(self) -> None:
        """Close the connection; what was written to stderr before can still be had."""
        self._stderr.pull()
        self._stderr.stop()
        self._writer.close()


class Served(Child, Streams):
    """A running process that we talk to over its stdin and stdout. Made by `serve`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stderr_fd: int,
    ) -> None:
        Child.__init__(self, process)
        Streams.__init__(self, reader, writer, stderr_fd)

    async def _kill(self) -> None:
        await super()._kill()
        self.hang_up()


async def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: bytes | None = None,
    pass_fds: Sequence[int] = (),
    drop_root: bool = False,
    group: MemoryGroup | None = None,
) -> Command:
    """Start a process in a session of its own, with exactly this environment and these files open.

    drop_root: where we are root, give that up before the program starts. group: the control group to be in.

    Raises:
        OSError: the program cannot be started.
    """
    with _pipe() as (stdout_fd, stdout_end), _pipe() as (stderr_fd, stderr_end):
        stdin_fd = None
        try:
            if stdin is not None:
                stdin_fd = os.memfd_create("stdin")
                os.write(stdin_fd, stdin)
                os.lseek(stdin_fd, 0, os.SEEK_SET)
            standard = (asyncio.subprocess.DEVNULL if stdin_fd is None else stdin_fd, stdout_end, stderr_end)
            process = await _execute(argv, env, cwd, standard, pass_fds, drop_root, group)
        finally:
            if stdin_fd is not None:
                os.close(stdin_fd)
    return Command(process, stdout_fd, stderr_fd)


async def serve(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    drop_root: bool = False,
    group: MemoryGroup | None = None,
) -> Served:
    """Start a process as `start` does, with a connection to us in place of its stdin and stdout.

    Raises:
        OSError: the program cannot be started.
    """
    async with connected() as (standard, connection):
        process = await _execute(argv, env, cwd, standard, pass_fds, drop_root, group)
    return Served(process, *connection)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter, int]


@contextlib.asynccontextmanager
async def connected() -> AsyncGenerator[tuple[tuple[int, int, int], Connection]]:
    """Make stdin, stdout and stderr for a process to be started, and our ends of them: see `Streams`.

    Its ends are closed afterwards, ours only if something failed.
    """
    ours, theirs = socket.socketpair()
    try:
        with _pipe() as (stderr_fd, stderr_end):
            try:
                reader, writer = await asyncio.open_connection(sock=ours)
                try:
                    yield (theirs.fileno(), theirs.fileno(), stderr_end), (reader, writer, stderr_fd)
                except BaseException:
                    writer.close()
                    raise
            finally:
                theirs.close()
    except BaseException:
        ours.close()
        raise


async def _execute(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
    standard: tuple[int, int, int],
    pass_fds: Sequence[int],
    drop_root: bool,
    group: MemoryGroup | None,
) -> asyncio.subprocess.Process:
    prefix, identity = as_nobody() if drop_root else ((), {})
    command = [*prefix, *argv]
    stdin, stdout, stderr = standard
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *(command if group is None else group.entering(command)),
            env=dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            **identity,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # Cancelled itself, it would kill the first process alone; a bwrap that sets up leaves its child then.
        await asyncio.shield(_undo(starting))
        raise


async def _undo(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    with contextlib.suppress(OSError):
        await Child(await starting).kill()


@contextlib.contextmanager
def _pipe() -> Generator[tuple[int, int]]:
    """Make a pipe; its end for writing is closed afterwards, that for reading only if something failed."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)


async def run_to_end(child: Command, *, timeout: float | None, output_bytes: int) -> Ended:
    """Wait for a process and keep its output; kill it at its time, and when the caller is cancelled."""
    began = time.monotonic()
    out, err = Capture(output_bytes), Capture(output_bytes)
    drains = (Drain(child.stdout_fd, out), Drain(child.stderr_fd, err))
    code: int | None = None
    try:
        async with asyncio.timeout(timeout):
            code = await child.process.wait()
    except TimeoutError:
        pass
    finally:
        await child.kill()
        # The pipes end when the last process that holds them is gone; one that hides outside our reach may
        # keep them.
        await asyncio.wait([asyncio.ensure_future(drain.ended.wait()) for drain in drains], timeout=END_S)
        for drain in drains:
            drain.pull()
            drain.stop()
    return Ended(code, out, err, time.monotonic() - began)


class AskedCommand(Command):
    """A command that is asked to end before it is killed."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.process, command.stdout_fd, command.stderr_fd)

    async def _kill(self) -> None:
        await _ask(self.process)
        await super()._kill()


class AskedServed(Child):
    """A long-lived process that is asked to end before it is killed."""

    def __init__(self, served: Served) -> None:
        super().__init__(served.process)
        self.send, self.receive, self.errors = served.send, served.receive, served.errors
        self._served = served

    async def _kill(self) -> None:
        await _ask(self.process)
        await self._served.kill()


async def _ask(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
