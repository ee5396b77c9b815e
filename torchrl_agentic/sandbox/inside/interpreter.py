"""`Interpreter`: the supervisor's side of an interpreter. It starts, drives and ends the worker."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from torchrl_agentic.sandbox.inside import processes, rights, worker
from torchrl_agentic.sandbox.inside.pipes import Pipe
from torchrl_agentic.sandbox.inside.reactor import READ, WRITE, Reactor, Timer
from torchrl_agentic.sandbox.inside.wire import BadMessage, Splitter, pack

MAX_ANSWER = 8 << 20
"""Maximum bytes of a message from a worker."""
FIELDS = 5
"""Minimum number of fields of an answer: number of the cell, value, name and text of the error, traceback."""
HANG_UP_S = 0.2
"""Maximum seconds from a worker closing its connection to its end."""
WATCH_S = 0.2
"""Seconds between checks of memory and processor time while a cell runs."""
WATCH_IDLE_S = 0.4
"""Seconds between checks while only processes that cells have started run."""
WATCH_LATEST_S = 1.0
"""Maximum seconds that many short cells can delay a check."""
LOOKS = 4
"""Number of checks per processor time limit when nothing but the worker is left."""

Header = dict[str, Any]
Respond = Callable[..., None]
"""Sends the answer to a request; called with a header and binary fields."""


class WorkerHandle:
    """A worker process and the connections to it.

    Args:
        control: Socket for requests and answers.
        out: Pipe of its stdout.
        err: Pipe of its stderr.
        pid: Its PID.
        is_child: True if this process started it; the worker of a clone has another parent.
    """

    def __init__(self, control: socket.socket, out: Pipe, err: Pipe, pid: int, *, is_child: bool) -> None:
        self.control, self.out, self.err, self.pid, self.is_child = control, out, err, pid, is_child
        self.answers = Splitter(MAX_ANSWER)
        self.unsent = bytearray()
        self.pidfd: int | None = None


class Cell:
    """A running cell.

    Attributes:
        stopped: Why the cell is being stopped; "" if it is not.

    Args:
        number: Number of the cell, from 1.
        background: Output since the last cell.
        answer: Sends the answer.
    """

    def __init__(self, number: int, background: bytes, answer: Respond) -> None:
        self.number, self.background, self.answer = number, background, answer
        self.began = time.monotonic()
        self.stopped = ""
        self.timers: dict[str, Timer] = {}


class MemoryCgroup:
    """The control group that limits the memory of a trajectory's code; the supervisor stays outside.

    Args:
        entrance: Descriptor of the file that a process writes 0 to, to enter.
        events: Descriptor of the file that counts the processes that the kernel killed because of the limit.
    """

    def __init__(self, entrance: int, events: int) -> None:
        self.entrance, self.events = entrance, events
        self._explained = 0

    def enter(self, pid: int = 0) -> None:
        """Move a process into the group.

        Args:
            pid: The process; 0 for this one.
        """
        os.write(self.entrance, b"%d" % pid)

    @property
    def has_killed(self) -> bool:
        """True if the kernel has killed a process since `explain`."""
        return self._kills() > self._explained

    def explain(self) -> None:
        """Forget the processes that have been killed: the cell or command that they belong to has ended.

        The kernel counts them without their names. What still runs is not to blame for them.
        """
        self._explained = self._kills()

    def _kills(self) -> int:
        return processes.killed_for_memory(os.pread(self.events, 4096, 0))


class Interpreter:
    """Keeps a worker, and at most one running cell.

    Attributes:
        has_neighbours: Returns whether nested namespaces contain other processes, which must not end with the
            worker.

    Args:
        reactor: Main loop of this process.
        settings: limits (for `rights.set_limits`), scoped (whether to use Landlock), and those of
            `supervisor_settings`.
        program: Seccomp filter of the worker; b"" for none.
        group: Control group that limits the memory of the worker and its descendants; None to check the
            memory here.
    """

    def __init__(
        self, reactor: Reactor, settings: Header, program: bytes, group: MemoryCgroup | None = None
    ) -> None:
        self.group = group
        self.has_neighbours: Callable[[], bool] = bool
        self.live: WorkerHandle | None = None
        self.cell: Cell | None = None
        self.count = 0
        self.generation = 0  # number of times that it was cloned
        self._reactor, self._settings, self._program = reactor, settings, program
        self._seed: int | None = None
        self._lost = False  # state was lost, and no answer has reported it
        self._idle, self._scales = (Timer(lambda: None) for _ in range(2))
        self._latest = math.inf  # time of the next check of memory and processor time at the latest
        self._used = 0.0  # processor time of the worker when the last cell ended

    def seed(self, value: int) -> None:
        """Seed random numbers, now and whenever a worker is started."""
        self._seed = value
        if self.live is not None:
            self._send(self.live, pack(b"seed", b"%d" % value))

    def run(self, code: bytes, timeout: float | None, answer: Respond) -> None:
        """Run a cell. The answer is sent when it has ended.

        Args:
            code: The code, in UTF-8.
            timeout: Maximum seconds; None for no limit.
            answer: Sends the answer.
        """
        self._idle.cancel()
        if not self.has_neighbours():
            self._explain_kills()
        live = self.start()
        self.count += 1
        background = live.out.take()[0] + live.err.take()[0]
        cell = self.cell = Cell(self.count, background, answer)
        if timeout is not None:
            cell.timers["deadline"] = self._reactor.after(timeout, lambda: self.stop("timeout"))
        self._latest = min(self._latest, cell.began + WATCH_LATEST_S)
        self._watch(WATCH_S)
        self._send(live, pack(b"run", b"%d" % cell.number, code))

    def stop(self, why: str) -> None:
        """Interrupt the running cell, if any. End the worker if the cell outlasts the grace period.

        Args:
            why: The reason, for the answer: "timeout", "flood", "memory" or another word.
        """
        if self.cell is not None and not self.cell.stopped:
            self.cell.stopped = why
            self.cell.timers["grace"] = self._reactor.after(self._settings["grace_s"], self.end)
            self.interrupt()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the running code."""
        if self.cell is not None and self.live is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.live.pid, signal.SIGINT)

    def end(self) -> None:
        """Kill the worker and all processes that it has started."""
        if self.live is not None:
            self._end_processes(self.live.pid)
            self._ended(self.live, "killed by SIGKILL")

    def discard(self) -> None:
        """Kill the worker without an answer for the running cell."""
        self.cell = None
        self.end()

    def restart(self) -> None:
        """Forget everything that cells have defined, on request."""
        self.end()
        self._lost = False

    def dismiss(self) -> None:
        """Forget the worker, which has been killed."""
        live, self.live = self.live, None
        if live is not None:
            self._hang_up(live)

    def start(self) -> WorkerHandle:
        """Return the worker; start one if there is none."""
        if self.live is not None:
            return self.live
        ours, theirs = socket.socketpair()
        out, err = self.pipes()
        parent = os.getpid()
        pid = processes.fork()
        if pid == 0:
            processes.run_as_child(self._become_worker, parent, theirs.fileno(), out.end, err.end)
        theirs.close()
        live = WorkerHandle(ours, out, err, pid, is_child=True)
        self.adopt(live)
        if self._seed is not None:
            self._send(live, pack(b"seed", b"%d" % self._seed))
        return live

    def successor(self, reactor: Reactor, group: MemoryCgroup | None) -> Interpreter:
        """Return the interpreter of a clone, without a worker. Its namespaces contain nothing else."""
        clone = Interpreter(reactor, self._settings, self._program, group)
        clone.count, clone._seed, clone.generation = self.count, self._seed, self.generation + 1
        return clone

    def pipes(self) -> tuple[Pipe, Pipe]:
        """Return new pipes for stdout and stderr of a worker."""
        limit = self._settings["output_bytes"]
        return Pipe(self._reactor, limit, self._watch_flood), Pipe(self._reactor, limit, self._watch_flood)

    def adopt(self, live: WorkerHandle) -> None:
        """Use a worker that has been started."""
        self.live = live
        live.control.setblocking(False)
        live.out.close_end()
        live.err.close_end()
        self._reactor.watch(live.control.fileno(), lambda: self._hear(live))
        if live.is_child:
            self._reactor.on_exit(live.pid, lambda code: self._exited(live, code))
        else:  # it is not our child, and its children may keep its connection open
            live.pidfd = os.pidfd_open(live.pid)
            self._reactor.watch(live.pidfd, lambda: self._exited(live, None))

    def _become_worker(self, parent: int, control: int, out: int, err: int) -> None:
        """Confine this process, a child of the supervisor, and run cells in it until it ends."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if sys.platform == "linux":  # elsewhere, Seatbelt allows signals only within a process group
            os.setsid()
        processes.end_with_parent(parent)
        if self.group is not None:
            self.group.enter()
        processes.only_files(os.open("/dev/null", os.O_RDWR), out, err, control)
        confine(self._settings, self._program, mapped=processes.mapped())
        worker.main(socket.socket(fileno=3))

    def _send(self, live: WorkerHandle, data: bytes) -> None:
        live.unsent += data
        self._flush(live)

    def _flush(self, live: WorkerHandle) -> None:
        """Send as much as the worker accepts, without waiting."""
        try:
            while live.unsent:
                del live.unsent[: live.control.send(memoryview(live.unsent)[: 1 << 20])]
        except BlockingIOError:
            pass
        except OSError:
            live.unsent.clear()  # it has ended, which is handled elsewhere
        events = READ | WRITE if live.unsent else READ
        self._reactor.watch(live.control.fileno(), lambda: self._hear(live), events)

    def _hear(self, live: WorkerHandle) -> None:
        """Receive messages of a worker; only the answer to the running cell is valid."""
        if live.unsent:
            self._flush(live)
        try:
            data = live.control.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._reactor.forget(live.control.fileno())
            self._reactor.after(HANG_UP_S, lambda: self._broken(live, "it closed its connection"))
            return
        try:
            for fields in live.answers.feed(data):
                cell = self.cell
                if cell is None or len(fields) < FIELDS or fields[0] != b"%d" % cell.number:
                    raise BadMessage("it answered another request")
                self._finish(live, cell, {}, fields[1:])
        except BadMessage as error:
            self._broken(live, f"it sent an invalid message: {error}")

    def _exited(self, live: WorkerHandle, code: int | None) -> None:
        """Clean up after a worker that has ended or was killed. `code` is None for the worker of a clone."""
        self._ended(live, "its process ended" if code is None else describe_exit(code))

    def _broken(self, live: WorkerHandle, why: str) -> None:
        """Kill a worker that has not ended by itself."""
        if self.live is live:
            self._end_processes(live.pid)
            self._ended(live, why)

    def _ended(self, live: WorkerHandle, why: str) -> None:
        """Clean up after a worker, and answer for its cell."""
        if self.live is not live:
            return
        self.live = None
        self._end_processes()  # its background processes
        cell = self.cell
        if cell is None:
            self._lost = self.count > 0
            self._explain_kills()
        else:
            if not cell.stopped and self.group is not None and self.group.has_killed:
                cell.stopped = "memory"
            self._finish(live, cell, {"how": why}, [])
        self._hang_up(live)

    def _hang_up(self, live: WorkerHandle) -> None:
        if live.pidfd is not None:
            self._reactor.forget(live.pidfd)
            os.close(live.pidfd)
        self._reactor.forget(live.control.fileno())
        live.control.close()
        live.out.close()
        live.err.close()

    def _end_processes(self, *running: int) -> None:
        """Kill all processes here. If the system does not list them, kill those that are known."""
        if sys.platform == "linux":
            processes.end_others(deeper=not self.has_neighbours())
        else:
            processes.kill(running)

    def _finish(self, live: WorkerHandle, cell: Cell, header: Header, fields: list[bytes]) -> None:
        self.cell = None
        self._explain_kills()
        for timer in cell.timers.values():
            timer.cancel()
        (out, omitted), (err, more) = live.out.take(), live.err.take()
        lost, self._lost = self._lost, False
        seconds = time.monotonic() - cell.began
        header.update(
            count=cell.number, stopped=cell.stopped, lost_before=lost, omitted=omitted + more, seconds=seconds
        )
        cell.answer(header, out, err, cell.background, *fields)
        self._used = processes.processor_s(live.pid)
        self._watch(WATCH_IDLE_S)
        if self._settings.get("idle_s"):
            self._idle = self._reactor.after(self._settings["idle_s"], self.end)

    def _watch_flood(self) -> None:
        if self.cell is not None and self.live is not None:
            printed = self.live.out.capture.total + self.live.err.capture.total
            if printed > self._settings["flood_bytes"]:
                self.stop("flood")

    def _watch(self, seconds: float) -> None:
        """Check in `seconds`, or earlier if many short cells have delayed the check."""
        self._scales.cancel()
        if self._settings.get("memory_total_bytes") or self._settings.get("cpu_seconds"):
            left = self._latest - time.monotonic()
            self._scales = self._reactor.after(min(seconds, max(0.0, left)), self._weigh)

    def _explain_kills(self) -> None:
        if self.group is not None:
            self.group.explain()

    def _takes_too_much(self) -> bool:
        cap = self._settings.get("memory_total_bytes")
        if not cap:
            return False
        # Memory that a clone has inherited is charged to the group of the original.
        looks = self.group is None or self.generation > 0
        # A process that was killed between cells, or while commands run, may not belong to the cell.
        is_alone = self.cell is not None and not self.has_neighbours()
        killed = is_alone and self.group is not None and self.group.has_killed
        return killed or (looks and processes.memory(cap) > cap)

    def _weigh(self) -> None:
        """End processes that use too much memory or processor time. Check again while anything may run."""
        self._latest = math.inf
        if self._takes_too_much():
            if self.cell is not None:
                self.cell.stopped = "memory"
            self.end()
            return
        most, everyone = self._settings.get("cpu_seconds"), processes.everyone()
        if most:
            self._end_spinning(most, everyone)
        if self.cell is not None:
            self._watch(WATCH_S)
        elif len(everyone) > 1 and self.live is not None:
            self._watch(WATCH_IDLE_S)
        elif most and self.live is not None:
            self._watch(max(WATCH_IDLE_S, most / LOOKS))

    def _end_spinning(self, most: float, everyone: list[int]) -> None:
        """End leftovers of cells, and the worker for leftover threads, that use too much processor time.

        Args:
            most: Maximum seconds of processor time of each process, and of the worker since the last cell.
            everyone: PIDs of all processes here.
        """
        worker = 0 if self.live is None else self.live.pid
        long = [pid for pid in everyone if pid != worker and processes.processor_s(pid) > most]
        if long:
            here = processes.others()  # without commands, which have their own limits
            processes.kill(pid for pid in long if pid in here)
        if worker and self.cell is None and processes.processor_s(worker) - self._used > most:
            self.end()


def confine(settings: Header, program: bytes, *, mapped: int = 0) -> None:
    """Set the limits of the settings for this process, irrevocably.

    Args:
        settings: See `Interpreter`.
        program: Seccomp filter; b"" for none.
        mapped: Bytes of memory that do not count, because they were mapped before the fork.
    """
    limits: Header = dict(settings["limits"])
    if limits.get("memory_bytes") is not None:
        limits["memory_bytes"] += mapped
    rights.set_limits(**limits)
    if settings["scoped"]:
        rights.restrict_to_own_processes()
    if program:
        rights.install_seccomp(program)
    if sys.platform == "linux":
        rights.set_dumpable(True)
        rights.prefer_oom_kill()  # after set_dumpable, because the file belongs to root before


def describe_exit(code: int) -> str:
    """Return a description of an exit code, such as "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
