"""Clones a live interpreter, with its memory and files, into namespaces of its own.

    supervisor ── forks ──▶ supervisor of the clone, process 1 of new namespaces, with copies of the files
        │                        │ hands the files of these namespaces to the worker
    worker ──── forks itself ────┴──▶ a copy, which enters them

The copies share nothing with the original and each other. That is not left to them: the original is stopped,
and each supervisor stops its copy and looks, before any of them goes on. Since the namespaces of a clone lie
inside those of the original, which could see and signal it, the original itself moves on as a clone, and
nothing of it is left where it was.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable

from torchrl_agentic.sandbox.inside import mounts, namespaces, processes, rights
from torchrl_agentic.sandbox.inside.interpreter import Answer, Group, Header, Interpreter, Live
from torchrl_agentic.sandbox.inside.reactor import Reactor
from torchrl_agentic.sandbox.inside.wire import pack

PATIENCE_S = 5.0
"""How long all clones of a request may take together, at each step."""
MAX_GENERATION = 20
"""The kernel allows 32 namespaces, one in another; commands need one more, and we may be in a container."""
_DONE, _GO = b"d", b"g"
_HARMLESS = ("null", "zero", "full", "random", "urandom")
_KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


class Cloning:
    """Makes clones of an interpreter. serve: what a clone's supervisor does for ever, with its connection."""

    def __init__(
        self,
        reactor: Reactor,
        settings: Header,
        interpreter: Interpreter,
        serve: Callable[[socket.socket, Reactor, Interpreter], None],
    ) -> None:
        self.supervisors: set[int] = set()
        self._reactor, self._settings, self._interpreter, self._serve = reactor, settings, interpreter, serve

    def run(self, handed: list[int], answer: Answer) -> None:
        """Make a clone for each connection, the first of which is the original's new one.

        handed: the connections, each followed by the files of its control group if there is one, as for
        `below_zygote`. The answer has an "error" where that failed; then the original is what it was.
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
                    processes.live_as(self._be_supervisor, connection, group, theirs, live)
                theirs.close()
                born[pid] = ours
                self.supervisors.add(pid)
                self._reactor.on_exit(pid, lambda _, pid=pid: self.supervisors.discard(pid))
            self._await(born)  # the copies are there
            original = processes.pause_others()  # from here on, nobody can put anything into them
            self._tell(born)
            self._await(born)  # their supervisors have looked at them
            self._compare_memory()
            processes.kill(original)  # what is killed while it is stopped does nothing any more
            self._interpreter.dismiss()
            self._tell(born)
            answer({})
        except OSError as error:
            processes.kill(born)
            processes.go_on()
            answer({"error": str(error)})
        finally:
            for one in (*born.values(), *connections):
                one.close()
            for fd in (fd for group in groups for fd in group):
                os.close(fd)

    def _original(self) -> Live:
        if self._interpreter.generation >= MAX_GENERATION:
            raise OSError(f"it is the clone of a clone, {MAX_GENERATION} times over")
        if self._interpreter.cell is not None:
            raise OSError("a cell runs")
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
        """See that no two processes of the code have one memory, as vfork(2) makes them."""
        theirs = [
            pid for pid in processes.everyone() if pid not in self.supervisors and not processes.is_gone(pid)
        ]
        for index, one in enumerate(theirs):
            if any(namespaces.share_memory(one, other) for other in theirs[index + 1 :]):
                raise OSError("two processes share their memory")

    def _be_supervisor(
        self, connection: socket.socket, group: list[int], report: socket.socket, original: Live
    ) -> None:
        """Be the supervisor of a clone."""
        try:
            reactor, interpreter, live, own = self._receive_copy(original, Group(*group) if group else None)
            report.send(_DONE)
            kept = (connection, report, live.control, live.out, live.err)
            drop_files(
                {one.fileno() for one in kept} | {live.out.end, live.err.end, *reactor.own_files, *group},
            )
            if report.recv(1) != _GO:
                return
            processes.pause_others()
            (live.pid,) = processes.others()
            if interpreter.group is not None:
                interpreter.group.enter(live.pid)
            look_for_shared(live.pid, own)
        except Exception as error:
            report.send(str(error).encode()[:500] or b"?")
            return
        report.send(_DONE)
        if report.recv(1) != _GO:
            return
        report.close()
        interpreter.adopt(live)
        processes.go_on()
        self._serve(connection, reactor, interpreter)

    def _receive_copy(
        self, original: Live, group: Group | None
    ) -> tuple[Reactor, Interpreter, Live, set[tuple[int, int]]]:
        """Set these namespaces up, and let the original's worker put a copy of itself into them."""
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
        return reactor, interpreter, Live(ours, out, err, 0, is_child=False), own


def drop_files(kept: set[int]) -> None:
    """Close what belongs to the supervisor that we were forked from."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def look_for_shared(pid: int, own: set[tuple[int, int]]) -> None:
    """See that a stopped process has nothing in common with others by which they could talk.

    own: the devices and inodes of the socket and the pipes that it has from us.

    Raises:
        OSError: it has, and the message says what.
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
        raise OSError("it is in a process group of others")
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
