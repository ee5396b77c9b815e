"""Processes of sandboxes on this host: start, drive and kill them, with bounded memory for output."""

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
from torchrl_agentic.sandbox.inside.orphans import children
from torchrl_agentic.sandbox.inside.processes import is_gone
from torchrl_agentic.sandbox.workspace import NOBODY

__all__ = ["Capture", "PipeReader"]


class PipeReader:
    """Reads a pipe into a `Capture` whenever it is readable, until its end.

    Args:
        fd: Descriptor of the pipe; it is closed at the end.
        capture: Where the output is kept.
        greeting: What the output begins with once the program is reached; it is not kept.

    Attributes:
        is_greeted: Whether the output began with the greeting.
    """

    def __init__(self, fd: int, capture: Capture, *, greeting: bytes = b"") -> None:
        self.fd = fd
        self.is_greeted = False
        self._greeting = greeting
        self.capture = capture
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self.pull)

    def pull(self, rounds: int = 16) -> None:
        """Read what is there now, with at most `rounds` reads, so that a flood does not block the event loop.

        Args:
            rounds: Maximum number of reads.
        """
        if self.ended.is_set():
            return  # the descriptor may belong to another file by now
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
            if self.capture.total == 0 and not self.is_greeted and data.startswith(self._greeting):
                self.is_greeted = True
                data = data.removeprefix(self._greeting)
            self.capture.add(data)

    def stop(self) -> None:
        """Stop reading and close the pipe."""
        if not self.ended.is_set():
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.ended.set()


MAX_ERRORS = 4096
"""Maximum bytes that are kept of the stderr of a long-lived process."""
END_S = 1.0
"""Maximum seconds to wait for a process that was asked to end, and for pipes that were left open."""
ORPHANS_S = 30.0
"""Maximum seconds to wait until the children of a process that is killed have ended."""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """How a command ended.

    Attributes:
        code: Exit code as in `Popen.returncode`; None if the command was stopped at its timeout.
        stdout: Captured stdout.
        stderr: Captured stderr.
        wall_s: Duration in seconds.
        is_greeted: Whether its stderr began with the greeting.
    """

    code: int | None
    stdout: Capture
    stderr: Capture
    wall_s: float
    is_greeted: bool


class Child:
    """A running process that leads its own process group.

    Args:
        process: The process.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def kill(self) -> None:
        """Kill the process and its process group, and reap it. Complete even if the caller is cancelled."""
        await asyncio.shield(self._kill())

    async def _kill(self) -> None:
        group = self.process.pid
        if self.process.returncode is None:
            # Its children would outlive it: those of bwrap, which starts them in their own session, and all
            # that a supervisor has adopted. While it is stopped, it adopts the children of those that end,
            # their PIDs cannot be reused, and calls that it has to allow start no process.
            _signal_group(group, signal.SIGSTOP)
            until = time.monotonic() + ORPHANS_S
            while (
                living := [pid for pid in children(group) if not is_gone(pid)]
            ) and time.monotonic() < until:
                for pid in living:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.002)
        # Also if it has ended: its background processes are in its group.
        _signal_group(group, signal.SIGKILL)
        await self.process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the process and its process group, unless the process has ended.

        Args:
            number: Number of the signal.
        """
        if self.process.returncode is None:
            _signal_group(self.process.pid, number)

    async def wait(self) -> str:
        """Wait until the process has ended. Return how it ended."""
        return describe_exit(await self.process.wait())


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def describe_exit(code: int) -> str:
    """Return a description of an exit code, such as "killed by SIGKILL".

    Args:
        code: Exit code; -n for signal n.
    """
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit code {code}"


def signed_exit_code(code: int) -> int:
    """Convert an exit code of a shell or of bubblewrap, where 128 + n means signal n, to -n for signal n.

    Args:
        code: The exit code.
    """
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code


@functools.cache
def as_nobody() -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return how to drop root: a command prefix, or arguments for Popen.

    With arguments, Popen has to copy the page tables of the trainer, which may use gigabytes: that blocks the
    event loop for 12 ms even for a small trainer, against 0.2 ms with setpriv.
    """
    if os.geteuid() != 0:
        return (), {}
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return (), {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"), {}


class CommandProcess(Child):
    """A running process with pipes on stdout and stderr, created by `start_command`.

    Args:
        process: The process.
        stdout_fd: Our end of its stdout.
        stderr_fd: Our end of its stderr.
        greeting: See `PipeReader`; of its stderr.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, stdout_fd: int, stderr_fd: int, greeting: bytes = b""
    ) -> None:
        super().__init__(process)
        self.stdout_fd = stdout_fd
        self.stderr_fd = stderr_fd
        self.greeting = greeting


class StdioStreams:
    """The host's ends of the stdio of a long-lived process: a socket for stdin and stdout, a pipe for stderr.

    Args:
        reader: Reads its stdout.
        writer: Writes its stdin.
        stderr_fd: Our end of its stderr.
        greeting: See `PipeReader`; of its stderr.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stderr_fd: int,
        greeting: bytes = b"",
    ) -> None:
        self._reader, self._writer = reader, writer
        self._stderr = PipeReader(stderr_fd, Capture(MAX_ERRORS), greeting=greeting)

    async def send(self, data: bytes) -> None:
        """Write to the stdin of the process."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (ConnectionError, RuntimeError):
            raise EOFError("the process has closed its stdin") from None

    async def receive(self) -> bytes:
        """Return output of the process; b"" at the end."""
        try:
            return await self._reader.read(1 << 16)
        except ConnectionError:
            return b""

    def finish(self) -> None:
        """Close the stdin of the process. Its output can still be read."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    def errors(self) -> str:
        """Return the head and the tail of what the process has written to stderr so far."""
        self._stderr.pull()
        return self._stderr.capture.text()

    def disconnect(self) -> None:
        """Close the connection. `errors` still returns what was written before."""
        self._stderr.pull()
        self._stderr.stop()
        self._writer.close()


class ServerProcess(Child, StdioStreams):
    """A running process that is driven through its stdin and stdout, created by `start_server`.

    Args:
        process: The process.
        reader: Reads its stdout.
        writer: Writes its stdin.
        stderr_fd: Our end of its stderr.
        greeting: See `PipeReader`; of its stderr.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stderr_fd: int,
        greeting: bytes = b"",
    ) -> None:
        Child.__init__(self, process)
        StdioStreams.__init__(self, reader, writer, stderr_fd, greeting)

    async def _kill(self) -> None:
        await super()._kill()
        self.disconnect()


async def start_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: bytes | None = None,
    pass_fds: Sequence[int] = (),
    drop_root: bool = False,
    group: MemoryGroup | None = None,
    greeting: bytes = b"",
) -> CommandProcess:
    """Start a process in a new session, with exactly this environment and these open files.

    Args:
        argv: The command and its arguments.
        env: Its environment.
        cwd: Its working folder; None for that of this process.
        stdin: Its standard input; None for /dev/null.
        pass_fds: Descriptors that it inherits, besides stdin, stdout and stderr.
        drop_root: If this process is root, run the command as nobody.
        group: Control group to start it in; None for that of this process.
        greeting: What it writes to stderr first, if it is reached.

    Raises:
        OSError: If the program cannot be started.
    """
    with (
        _pipe() as (stdout_fd, stdout_end),
        _pipe() as (stderr_fd, stderr_end),
        memory_file(stdin) as fds,
    ):
        standard = (fds[0] if fds else asyncio.subprocess.DEVNULL, stdout_end, stderr_end)
        process = await _execute(argv, env, cwd, standard, pass_fds, drop_root, group)
    return CommandProcess(process, stdout_fd, stderr_fd, greeting)


async def start_server(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    drop_root: bool = False,
    group: MemoryGroup | None = None,
    greeting: bytes = b"",
) -> ServerProcess:
    """Start a process as `start_command` does, with its stdin and stdout connected to us.

    Args:
        argv: The command and its arguments.
        env: Its environment.
        cwd: Its working folder; None for that of this process.
        pass_fds: Descriptors that it inherits, besides stdin, stdout and stderr.
        drop_root: If this process is root, run the command as nobody.
        group: Control group to start it in; None for that of this process.
        greeting: What it writes to stderr first, if it is reached.

    Raises:
        OSError: If the program cannot be started.
    """
    async with stdio_pipes() as (standard, connection):
        process = await _execute(argv, env, cwd, standard, pass_fds, drop_root, group)
    return ServerProcess(process, *connection, greeting)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter, int]


@contextlib.asynccontextmanager
async def stdio_pipes() -> AsyncGenerator[tuple[tuple[int, int, int], Connection]]:
    """Yield stdin, stdout and stderr for a new process, and our ends of them as arguments of `StdioStreams`.

    The ends of the process are closed afterwards, ours only after an error.
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
        # If this were cancelled, asyncio would kill only the first process and leave the child of bwrap.
        await asyncio.shield(_undo(starting))
        raise


async def _undo(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    with contextlib.suppress(OSError):
        await Child(await starting).kill()


@contextlib.contextmanager
def memory_file(data: bytes | None) -> Generator[tuple[int, ...]]:
    """Yield the descriptor of an anonymous file with this content, at its start; an empty tuple for None.

    Args:
        data: The content.
    """
    if data is None:
        yield ()
        return
    fd = os.memfd_create("data")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield (fd,)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _pipe() -> Generator[tuple[int, int]]:
    """Yield both ends of a new pipe. Close the writing end afterwards, the other after an error."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)


async def communicate(child: CommandProcess, *, timeout: float | None, output_bytes: int) -> CompletedCommand:
    """Wait for a process and capture its output. Kill it at its timeout, and if the caller is cancelled.

    Args:
        child: The process.
        timeout: Maximum seconds; None for no limit.
        output_bytes: Maximum bytes to keep of stdout, and of stderr.
    """
    began = time.monotonic()
    out, err = Capture(output_bytes), Capture(output_bytes)
    drains = (
        PipeReader(child.stdout_fd, out),
        PipeReader(child.stderr_fd, err, greeting=child.greeting),
    )
    code: int | None = None
    try:
        async with asyncio.timeout(timeout):
            code = await child.process.wait()
    except TimeoutError:
        pass
    finally:
        await child.kill()
        # The pipes end with the last process that has them open. The wait is bounded, because a process
        # that has left the group may keep them open.
        await asyncio.wait([asyncio.ensure_future(drain.ended.wait()) for drain in drains], timeout=END_S)
        for drain in drains:
            drain.pull()
            drain.stop()
    return CompletedCommand(code, out, err, time.monotonic() - began, drains[1].is_greeted)


class GracefulCommand(CommandProcess):
    """A command that gets SIGTERM before it is killed, so that it can end its own children.

    Args:
        command: The command.
    """

    def __init__(self, command: CommandProcess) -> None:
        super().__init__(command.process, command.stdout_fd, command.stderr_fd, command.greeting)

    async def _kill(self) -> None:
        await _ask(self.process)
        await super()._kill()


class GracefulServer(Child):
    """A long-lived process that gets SIGTERM before it is killed, so that it can end its own children.

    Args:
        server: The process.
    """

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(server.process)
        self.send, self.receive, self.errors = server.send, server.receive, server.errors
        self._served = server

    async def _kill(self) -> None:
        await _ask(self.process)
        await self._served.kill()


async def _ask(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()
