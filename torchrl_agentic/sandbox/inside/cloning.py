"""Clones a running interpreter, with its memory and files, into new namespaces.

    supervisor ── forks ──▶ supervisor of the clone, process 1 of new namespaces, with copies of the files
        │                        │ sends the files of these namespaces to the worker
    worker ──── forks itself ────┴──▶ a copy, which enters them

The copies share nothing with the original and with each other. This does not depend on the copies: the
original is stopped, and each supervisor stops its copy and checks it before any of them continues. The
namespaces of a clone are children of those of the original, which could see and signal it. Therefore the
original becomes a clone too, and nothing stays in its old namespaces.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable

from torchrl_agentic.sandbox.inside import mounts, namespaces, processes, rights
from torchrl_agentic.sandbox.inside.interpreter import (
    Header,
    Interpreter,
    MemoryCgroup,
    Respond,
    WorkerHandle,
)
from torchrl_agentic.sandbox.inside.reactor import Reactor
from torchrl_agentic.sandbox.inside.wire import pack

PATIENCE_S = 5.0
"""Maximum seconds of each step for all clones of a request together."""
MAX_GENERATION = 20
"""Maximum depth of clones: the kernel allows 32 nested namespaces, and commands and containers need some."""
_DONE, _GO = b"d", b"g"
_HARMLESS = ("null", "zero", "full", "random", "urandom")
_KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


class Cloning:
    """Makes clones of an interpreter.

    Args:
        reactor: Main loop of this process.
        settings: Settings of the supervisor.
        interpreter: The interpreter to clone.
        serve: Called in the supervisor of a clone, with its connection; does not return.
    """

    def __init__(
        self,
        reactor: Reactor,
        settings: Header,
        interpreter: Interpreter,
        serve: Callable[[socket.socket, Reactor, Interpreter], None],
    ) -> None:
        self.supervisors: set[int] = set()
        self._reactor, self._settings, self._interpreter, self._serve = reactor, settings, interpreter, serve

    def run(self, handed: list[int], answer: Respond) -> None:
        """Make a clone for each connection; the first connection is the new one of the original.

        The answer has an "error" if that failed. The original is then unchanged.

        Args:
            handed: Descriptors of the connections, each followed by the two files of its control group if
                there is one, as for `below_zygote`.
            answer: Sends the answer.
        """
        step = 1 if self._interpreter.group is None else 3
        connections = [socket.socket(fileno=fd) for fd in handed[::step]]
        groups = [handed[index + 1 : index + step] for index in range(0, len(handed), step)]
        born: dict[int, socket.socket] = {}
        try:
            live = self._original()
            for connection, group in zip(connections, groups):  # noqa: B905  strict= came with 3.10
                ours, theirs = socket.socketpair()
                pid = processes.fork_into_namespaces(self._settings["namespaces"])
                if pid == 0:
                    processes.run_as_child(self._be_supervisor, connection, group, theirs, live)
                theirs.close()
                born[pid] = ours
                self.supervisors.add(pid)
                self._reactor.on_exit(pid, lambda _, pid=pid: self.supervisors.discard(pid))
            self._await(born)  # the copies exist
            original = processes.pause_others()  # now nothing can change them
            self._tell(born)
            self._await(born)  # their supervisors have checked them
            self._compare_memory()
            processes.kill(original)  # a process that is killed while stopped runs no more code
            self._interpreter.dismiss()
            self._tell(born)
            answer({})
        except OSError as error:
            processes.kill(born)
            processes.resume_all()
            answer({"error": str(error)})
        finally:
            for one in (*born.values(), *connections):
                one.close()
            for fd in (fd for group in groups for fd in group):
                os.close(fd)

    def _original(self) -> WorkerHandle:
        if self._interpreter.generation >= MAX_GENERATION:
            raise OSError(f"it has been cloned {MAX_GENERATION} times, which is the maximum")
        if self._interpreter.cell is not None:
            raise OSError("a cell is running")
        return self._interpreter.start()

    def _await(self, born: dict[int, socket.socket]) -> None:
        until = time.monotonic() + PATIENCE_S
        for report in born.values():
            report.settimeout(max(0.01, until - time.monotonic()))
            said = report.recv(512)
            if said != _DONE:
                raise OSError(said.decode("utf-8", "replace") or "a clone's supervisor ended")

    def _tell(self, born: dict[int, socket.socket]) -> None:
        for report in born.values():
            report.send(_GO)

    def _compare_memory(self) -> None:
        """Check that no two processes of the code share an address space, as vfork(2) makes them."""
        theirs = [
            pid for pid in processes.everyone() if pid not in self.supervisors and not processes.is_gone(pid)
        ]
        for index, one in enumerate(theirs):
            if any(namespaces.share_memory(one, other) for other in theirs[index + 1 :]):
                raise OSError("two processes share their memory")

    def _be_supervisor(
        self, connection: socket.socket, group: list[int], report: socket.socket, original: WorkerHandle
    ) -> None:
        """Run as the supervisor of a clone."""
        try:
            reactor, interpreter, live, own = self._receive_copy(
                original, MemoryCgroup(*group) if group else None
            )
            report.send(_DONE)
            kept = (connection, report, live.control, live.out, live.err)
            close_inherited(
                {one.fileno() for one in kept} | {live.out.end, live.err.end, *reactor.own_files, *group},
            )
            if report.recv(1) != _GO:
                return
            processes.pause_others()
            (live.pid,) = processes.others()
            if interpreter.group is not None:
                interpreter.group.enter(live.pid)
            check_nothing_shared(live.pid, own)
        except Exception as error:
            report.send(str(error).encode()[:500] or b"?")
            return
        report.send(_DONE)
        if report.recv(1) != _GO:
            return
        report.close()
        interpreter.adopt(live)
        processes.resume_all()
        self._serve(connection, reactor, interpreter)

    def _receive_copy(
        self, original: WorkerHandle, group: MemoryCgroup | None
    ) -> tuple[Reactor, Interpreter, WorkerHandle, set[tuple[int, int]]]:
        """Set up these namespaces, and have the original's worker put a copy of itself into them."""
        flags = self._settings["namespaces"]
        mounts.set_up(self._settings, copied=True)
        spaces = namespaces.files_of(flags)
        rights.drop_capabilities()
        reactor = Reactor()
        interpreter = self._interpreter.successor(reactor, group)
        ours, theirs = socket.socketpair()
        out, err = interpreter.pipes()
        handed = [theirs.fileno(), out.end, err.end]
        socket.send_fds(original.control, [pack(b"clone", b"%d" % flags)], [*spaces, *handed])
        own = {(found.st_dev, found.st_ino) for found in map(os.fstat, handed)}
        theirs.close()
        for fd in spaces:
            os.close(fd)
        ours.settimeout(PATIENCE_S)
        said = ours.recv(512)
        if said != pack(b"cloned"):
            raise OSError(said.decode("utf-8", "replace") or "the worker did not clone itself")
        return reactor, interpreter, WorkerHandle(ours, out, err, 0, is_child=False), own


def close_inherited(kept: set[int]) -> None:
    """Close files that belong to the supervisor that this process was forked from.

    Args:
        kept: Descriptors that stay open.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def check_nothing_shared(pid: int, own: set[tuple[int, int]]) -> None:
    """Check that a stopped process shares nothing with others by which they could communicate.

    Args:
        pid: The process.
        own: Device and inode of the socket and the pipes that it has from this supervisor.

    Raises:
        OSError: If it shares something; the message says what.
    """
    for kind in _KINDS:
        if os.stat(f"/proc/{pid}/ns/{kind}").st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino:
            raise OSError(f"it is not in the namespace {kind}")
    if not os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/")):
        raise OSError("it has another root")
    devices = {os.stat(path).st_dev for path in mounts.FOLDERS}
    _look_at_files(pid, own, devices)
    group, session = processes.read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[2:4]
    if (int(group), int(session)) != (pid, pid):
        raise OSError("it is in the process group of other processes")
    with open(f"/proc/{pid}/maps") as file:
        shared = [line for line in file if line.split(None, 2)[1][3] == "s"]
    for line in shared:
        _, rights_, _, device, _, *rest = line.split(None, 5)
        major, minor = (int(part, 16) for part in device.split(":"))
        read_only_system = "w" not in rights_ and "".join(rest).startswith("/usr/")
        if not read_only_system and os.makedev(major, minor) not in devices:
            raise OSError(f"it shares memory: {line.strip()}")
    with open(f"/proc/{pid}/status") as file:
        sets = [line.split()[1] for line in file if line.startswith(("CapEff:", "CapPrm:"))]
    if set(sets) != {"0" * 16}:
        raise OSError("it kept capabilities")


def _look_at_files(pid: int, own: set[tuple[int, int]], devices: set[int]) -> None:
    harmless = {os.stat("/dev/" + name).st_rdev for name in _HARMLESS}
    for name in ("cwd", *("fd/" + name for name in os.listdir(f"/proc/{pid}/fd"))):
        path = f"/proc/{pid}/{name}"
        found = os.stat(path)
        if stat.S_ISCHR(found.st_mode):
            fine = found.st_rdev in harmless
        elif stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            fine = found.st_dev in devices or bool(os.statvfs(path).f_flag & os.ST_RDONLY)
        else:
            fine = (found.st_dev, found.st_ino) in own
        if not fine:
            raise OSError(f"it shares the open file {os.readlink(path)}")
