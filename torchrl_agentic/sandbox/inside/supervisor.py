"""`Supervisor`: controls one trajectory inside: its interpreter, commands and files.

It never runs code of the model. Below a zygote it is process 1 of its own namespaces. Alone, in a sandbox
that was made around it, it has only an interpreter, and communicates over stdin and stdout.

A request of the host is a JSON header, whose "op" names the operation, with optional binary fields and open
files. An answer has the same form; its "id" is that of the request.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator

from torchrl_agentic.sandbox.inside import files, mounts, processes, rights, worker
from torchrl_agentic.sandbox.inside.cloning import Cloning
from torchrl_agentic.sandbox.inside.commands import Commands
from torchrl_agentic.sandbox.inside.interpreter import Header, Interpreter, MemoryCgroup, Respond
from torchrl_agentic.sandbox.inside.reactor import Reactor
from torchrl_agentic.sandbox.inside.wire import Splitter, pack

MAX_REQUEST = 80 << 20
"""Maximum bytes of a request."""
FILES = 3
"""Number of open files that come with each trajectory: its connection, and two of its control group."""
MAX_HANDED = 64
"""Maximum number of open files that come with one request."""
MAX_REASON = 8192
"""Maximum number of characters of an error in an answer: it may have the path, which the model chose."""
LEAVE_S = 0.05
"""Seconds between checks whether the last clone has ended, in a supervisor that waits to end."""


class HostConnection:
    """The connection to the host.

    Args:
        reactor: Main loop of this process.
        reading: Descriptor to read.
        writing: Descriptor to write.
        serve: Called with the header, the fields and the open files of each request.
        leave: Called when the host has closed the connection.
    """

    def __init__(
        self,
        reactor: Reactor,
        reading: int,
        writing: int,
        serve: Callable[[Header, list[bytes], list[int]], None],
        leave: Callable[[], None],
    ) -> None:
        self._reactor, self._reading, self._writing = reactor, reading, writing
        self._serve, self._leave = serve, leave
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):  # a pipe, which cannot carry open files
            self._socket = socket.socket(fileno=reading)
        self._requests = Splitter(MAX_REQUEST)
        self._handed: list[int] = []
        reactor.watch(reading, self._receive)

    def answer(self, request: int, header: Header, *fields: bytes) -> None:
        """Answer a request.

        Args:
            request: Id of the request.
            header: Header of the answer.
            fields: Binary fields of the answer.
        """
        body = json.dumps({**header, "id": request}).encode("ascii")
        view = memoryview(pack(body, *fields))
        try:
            while view:
                view = view[os.write(self._writing, view) :]
        except OSError:
            self._hang_up()

    def _receive(self) -> None:
        try:
            if self._socket is None:
                data = os.read(self._reading, 1 << 16)
            else:
                data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(4 * MAX_HANDED))
                self._handed += worker.received_fds(ancillary)
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        for body, *fields in self._requests.feed(data):
            header = json.loads(body)
            count = header.get("files", 0)
            handed, self._handed = self._handed[:count], self._handed[count:]
            self._serve(header, fields, handed)

    def _hang_up(self) -> None:
        self._reactor.forget(self._reading)
        self._leave()


class Supervisor:
    """The inner side of one trajectory.

    Args:
        settings: Those of `Interpreter`; below a zygote also namespaces and quota.
        program: Seccomp filter of code; b"" for none.
        reactor: Main loop of this process.
        connection: Descriptors to read and to write.
        interpreter: The interpreter.
    """

    def __init__(
        self,
        settings: Header,
        program: bytes,
        reactor: Reactor,
        connection: tuple[int, int],
        interpreter: Interpreter,
    ) -> None:
        self._settings, self._program, self._reactor = settings, program, reactor
        self._commands = Commands(reactor, settings, program, interpreter.group)
        self._interpreter = interpreter
        self._interpreter.has_neighbours = self._has_neighbours
        self._commands.has_cell = lambda: self._interpreter.cell is not None
        self._commands.has_worker = lambda: self._interpreter.live is not None
        self._cloning = Cloning(reactor, settings, self._interpreter, self._serve_clone)
        self._requests: dict[str, Callable[[Header, list[bytes], list[int], Respond], None]] = {
            "start": self._start,
            "cell": self._run_cell,
            "stop_cell": self._stop_cell,
            "restart": self._restart,
            "command": self._run_command,
            "stop_command": self._stop_command,
            "write": self._write,
            "read": self._read,
            "clone": self._clone,
        }
        self._host = HostConnection(reactor, *connection, self._serve, self._leave)

    def _has_neighbours(self) -> bool:
        return bool(self._commands.running or self._cloning.supervisors)

    def _serve(self, header: Header, fields: list[bytes], handed: list[int]) -> None:
        def answer(found: Header, *parts: bytes) -> None:
            self._host.answer(header["id"], found, *parts)

        try:
            self._requests[header["op"]](header, fields, handed, answer)
        except (OSError, ValueError) as error:  # no process or file could be created
            answer({"failed": "{}: {}".format(header["op"], worker.clip(str(error), MAX_REASON))})

    def _start(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """Start the worker. Header: seed, for random numbers."""
        if header.get("seed") is not None:
            self._interpreter.seed(header["seed"])
        self._interpreter.start()
        answer({"pid": os.getpid()})

    def _run_cell(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """Run a cell. Header: timeout_s."""
        if self._interpreter.cell is not None:
            raise ValueError("another cell is running")
        self._interpreter.run(fields[0], header["timeout_s"], answer)

    def _stop_cell(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """Stop the running cell. Header: why; "" to only interrupt it."""
        if header["why"]:
            self._interpreter.stop(header["why"])
        else:
            self._interpreter.interrupt()
        answer({})

    def _restart(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """Forget what cells have defined."""
        self._interpreter.restart()
        answer({})

    def _run_command(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """Run a command; see `Commands.run`."""
        self._commands.run(header, handed, answer)

    def _stop_command(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """End a command. Header: which, the id of the request that started it."""
        self._commands.stop(header["which"])
        answer({})

    def _write(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """Write a file of the host to a path below /work or below a writable folder."""
        with _answering(answer, handed):
            place = _place(header["path"], self._settings["write_roots"])
            with files.open_to_write(*place, header["path"]) as target:
                answer({"bytes": files.copy_bytes(handed[0], target)})

    def _read(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """Read a file below /work or a granted folder into a file of the host. Header: path, max_bytes."""
        with _answering(answer, handed):
            place = _place(header["path"], self._settings["read_roots"] + self._settings["write_roots"])
            with files.open_to_read(*place, header["path"]) as source:
                answer({"bytes": files.copy_bytes(source, handed[0], header["max_bytes"])})

    def _clone(self, header: Header, fields: list[bytes], handed: list[int], answer: Respond) -> None:
        """Make clones; see `Cloning.run`. Running commands are ended."""
        self._commands.end()
        self._cloning.run(handed, answer)

    def _serve_clone(self, connection: socket.socket, reactor: Reactor, interpreter: Interpreter) -> None:
        fd = connection.fileno()
        Supervisor(self._settings, self._program, reactor, (fd, fd), interpreter)
        reactor.run()

    def _leave(self) -> None:
        """End, unless clones are in nested namespaces: then with the last of them."""
        if os.getpid() == 1 and not self._cloning.supervisors:
            processes.end_others(deeper=True)
            os._exit(0)
        self._commands.end()
        self._interpreter.discard()
        self._leave_if_alone()

    def _leave_if_alone(self) -> None:
        if not self._cloning.supervisors:
            os._exit(0)
        self._reactor.after(LEAVE_S, self._leave_if_alone)


def _place(path: str, roots: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return the folder that a path starts from, and its steps; no link may lead to a root either.

    The code may own the parent folders of a root, and replace them by links.
    """
    root, steps = files.locate(path, roots)
    return (root, steps) if root == files.WORK else ("/", (*root.strip("/").split("/"), *steps))


@contextlib.contextmanager
def _answering(answer: Respond, handed: list[int]) -> Generator[None]:
    """Answer with the error if one is raised. Close the received files."""
    try:
        yield
    except OSError as error:
        answer({"error": type(error).__name__, "text": worker.clip(str(error), MAX_REASON)})
    finally:
        for fd in handed:
            os.close(fd)


def below_zygote(settings: Header, program: bytes, handed: list[int]) -> None:
    """Run as process 1 of new namespaces.

    Args:
        settings: See `Supervisor`.
        program: Seccomp filter of code; b"" for none.
        handed: Descriptor of a socket to the host; with a control group also those of the file to enter it by
            and of the file that counts kills.
    """
    connection, *group = handed
    mounts.set_up(settings)
    rights.drop_capabilities()
    null = os.open("/dev/null", os.O_RDWR)
    processes.only_files(null, null, 2, connection, *group)
    _run(settings, program, (3, 3), MemoryCgroup(4, 5) if group else None)


def alone(settings: Header, program: bytes) -> None:
    """Supervise an interpreter for a host that is connected to stdin and stdout.

    Args:
        settings: See `Supervisor`.
        program: Seccomp filter of code; b"" for none.
    """
    if sys.platform == "linux":
        rights.set_dumpable(False)
        rights.subreaper()
        # Process 1 cannot be killed from inside its namespace; otherwise the worker would be in our domain.
        settings["scoped"] = os.getpid() != 1 and rights.landlock_version() >= rights.SCOPES_SIGNALS
    worker.warm_up()
    null = os.open("/dev/null", os.O_RDWR)
    processes.only_files(null, null, 2, 0, 1)
    _run(settings, program, (3, 4))


def _run(
    settings: Header, program: bytes, connection: tuple[int, int], group: MemoryCgroup | None = None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    reactor = Reactor()
    Supervisor(settings, program, reactor, connection, Interpreter(reactor, settings, program, group))
    reactor.run()
