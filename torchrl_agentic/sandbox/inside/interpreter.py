"""One interpreter from its supervisor's side: it starts the worker, hands it cells, and ends what hangs."""

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
"""The longest message that is taken from a worker, in bytes."""
FIELDS = 5
"""An answer has the number of its cell, value, name and text of the error, traceback; then what was shown."""
HANG_UP_S = 0.2
"""How long a worker that has closed its connection may take to end."""
WATCH_S = 0.2
"""How often memory and processor time are looked at while a cell runs."""
WATCH_IDLE_S = 0.4
"""How often they are looked at while only what cells have started runs."""
WATCH_LATEST_S = 1.0
"""How long cells that are shorter than that may put it off."""
LOOKS = 4
"""How often they are looked at, with nothing but the worker left, in the processor time that it may take."""

Header = dict[str, Any]
Answer = Callable[..., None]
"""Called with a header and fields of bytes."""


class Live:
    """A worker and what connects us with it.

    is_child: whether we started it; a clone's is not.
    """

    def __init__(self, control: socket.socket, out: Pipe, err: Pipe, pid: int, *, is_child: bool) -> None:
        self.control, self.out, self.err, self.pid, self.is_child = control, out, err, pid, is_child
        self.answers = Splitter(MAX_ANSWER)
        self.unsent = bytearray()
        self.pidfd: int | None = None


class Cell:
    """A cell that runs. stopped: why it is being stopped, once it is."""

    def __init__(self, number: int, background: bytes, answer: Answer) -> None:
        self.number, self.background, self.answer = number, background, answer
        self.began = time.monotonic()
        self.stopped = ""
        self.timers: dict[str, Timer] = {}


class Group:
    """The control group that bounds the memory of a trajectory's code; the supervisor stays outside.

    entrance: the file that a process writes 0 to, to enter. events: the file that counts the
    processes that the kernel killed for want of memory.
    """

    def __init__(self, entrance: int, events: int) -> None:
        self.entrance, self.events = entrance, events

    def enter(self, pid: int = 0) -> None:
        """Let a process enter; 0: the calling one."""
        os.write(self.entrance, b"%d" % pid)

    def kills(self) -> int:
        """Return how many processes have been killed."""
        return processes.killed_for_memory(os.pread(self.events, 4096, 0))


class Interpreter:
    """Keeps a worker, and at most one cell that runs in it.

    settings: limits (for `rights.set_limits`), scoped (whether Landlock is to be used) and those of
    `supervisor_settings`. program: the seccomp filter of the worker, empty for none. group: bounds the
    memory of the worker and all that it starts; None if memory is to be looked at here.
    has_neighbours: says whether namespaces inside ours hold others, who are not to be ended with the worker.
    """

    def __init__(
        self, reactor: Reactor, settings: Header, program: bytes, group: Group | None = None
    ) -> None:
        self.group = group
        self._kills_before = 0 if group is None else group.kills()
        self.has_neighbours: Callable[[], bool] = bool
        self.live: Live | None = None
        self.cell: Cell | None = None
        self.count = 0
        self.generation = 0  # how many clonings lie behind it
        self._reactor, self._settings, self._program = reactor, settings, program
        self._seed: int | None = None
        self._lost = False  # state was lost, and no answer has said so
        self._idle, self._scales = (Timer(lambda: None) for _ in range(2))
        self._latest = math.inf  # when memory and processor time are looked at, whatever runs
        self._used = 0.0  # the worker's processor time when the last cell ended

    def seed(self, value: int) -> None:
        """Seed random numbers, now and whenever a worker is started."""
        self._seed = value
        if self.live is not None:
            self._send(self.live, pack(b"seed", b"%d" % value))

    def run(self, code: bytes, timeout: float | None, answer: Answer) -> None:
        """Run a cell; the answer comes when it has ended."""
        self._idle.cancel()
        if self.group is not None:
            self._kills_before = self.group.kills()
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
        """Interrupt the cell that runs, if any; end the worker if that does not help within the grace."""
        if self.cell is not None and not self.cell.stopped:
            self.cell.stopped = why
            self.cell.timers["grace"] = self._reactor.after(self._settings["grace_s"], self.end)
            self.interrupt()

    def interrupt(self) -> None:
        """Let the code that runs see a KeyboardInterrupt."""
        if self.cell is not None and self.live is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.live.pid, signal.SIGINT)

    def end(self) -> None:
        """Kill the worker and all that it has started."""
        if self.live is not None:
            self._end_processes(self.live.pid)
            self._ended(self.live, "killed by SIGKILL")

    def discard(self) -> None:
        """Kill the worker without answering for the cell that runs: nobody waits."""
        self.cell = None
        self.end()

    def restart(self) -> None:
        """Forget all that was defined, because that was asked for."""
        self.end()
        self._lost = False

    def dismiss(self) -> None:
        """Forget the worker, which has been killed."""
        live, self.live = self.live, None
        if live is not None:
            self._hang_up(live)

    def start(self) -> Live:
        """Give the worker, a new one if there is none."""
        if self.live is not None:
            return self.live
        ours, theirs = socket.socketpair()
        out, err = self.pipes()
        parent = os.getpid()
        pid = processes.fork()
        if pid == 0:
            processes.live_as(self._become_worker, parent, theirs.fileno(), out.end, err.end)
        theirs.close()
        live = Live(ours, out, err, pid, is_child=True)
        self.adopt(live)
        if self._seed is not None:
            self._send(live, pack(b"seed", b"%d" % self._seed))
        return live

    def successor(self, reactor: Reactor, group: Group | None) -> Interpreter:
        """Make the interpreter of a clone, without its worker; nothing but that is around."""
        clone = Interpreter(reactor, self._settings, self._program, group)
        clone.count, clone._seed, clone.generation = self.count, self._seed, self.generation + 1
        return clone

    def pipes(self) -> tuple[Pipe, Pipe]:
        """Make what a worker prints into."""
        limit = self._settings["output_bytes"]
        return Pipe(self._reactor, limit, self._watch_flood), Pipe(self._reactor, limit, self._watch_flood)

    def adopt(self, live: Live) -> None:
        """Take a worker that has been started."""
        self.live = live
        live.control.setblocking(False)
        live.out.close_end()
        live.err.close_end()
        self._reactor.watch(live.control.fileno(), lambda: self._hear(live))
        if live.is_child:
            self._reactor.on_exit(live.pid, lambda code: self._exited(live, code))
        else:  # its parent is elsewhere, and its children may hold its connection open
            live.pidfd = os.pidfd_open(live.pid)
            self._reactor.watch(live.pidfd, lambda: self._exited(live, None))

    def _become_worker(self, parent: int, control: int, out: int, err: int) -> None:
        """Confine this process, a child of the supervisor's, and let it run cells for ever."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if sys.platform == "linux":  # elsewhere, Seatbelt lets a process signal its own group alone
            os.setsid()
        processes.end_with_parent(parent)
        if self.group is not None:
            self.group.enter()
        processes.only_files(os.open("/dev/null", os.O_RDWR), out, err, control)
        confine(self._settings, self._program, mapped=processes.mapped())
        worker.main(socket.socket(fileno=3))

    def _send(self, live: Live, data: bytes) -> None:
        live.unsent += data
        self._flush(live)

    def _flush(self, live: Live) -> None:
        """Send what the worker takes, without waiting for it."""
        try:
            while live.unsent:
                del live.unsent[: live.control.send(memoryview(live.unsent)[: 1 << 20])]
        except BlockingIOError:
            pass
        except OSError:
            live.unsent.clear()  # it is gone, as its end will tell
        events = READ | WRITE if live.unsent else READ
        self._reactor.watch(live.control.fileno(), lambda: self._hear(live), events)

    def _hear(self, live: Live) -> None:
        """Take what a worker says; only the answer to the cell that runs makes sense."""
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
                    raise BadMessage("an answer to another question")
                self._finish(live, cell, {}, fields[1:])
        except BadMessage as error:
            self._broken(live, f"it broke off: {error}")

    def _exited(self, live: Live, code: int | None) -> None:
        """Clear up behind a worker that has ended by itself, or was killed. code: None for a clone's."""
        self._ended(live, "its process ended" if code is None else how(code))

    def _broken(self, live: Live, why: str) -> None:
        """Give up on a worker that has not ended by itself."""
        if self.live is live:
            self._end_processes(live.pid)
            self._ended(live, why)

    def _ended(self, live: Live, why: str) -> None:
        """Clear up behind a worker, and answer for it."""
        if self.live is not live:
            return
        self.live = None
        self._end_processes()  # what it left in the background
        cell = self.cell
        if cell is not None and not cell.stopped and self._has_killed():
            cell.stopped = "memory"
        if cell is None:
            self._lost = self.count > 0
        else:
            self._finish(live, cell, {"how": why}, [])
        self._hang_up(live)

    def _hang_up(self, live: Live) -> None:
        if live.pidfd is not None:
            self._reactor.forget(live.pidfd)
            os.close(live.pidfd)
        self._reactor.forget(live.control.fileno())
        live.control.close()
        live.out.close()
        live.err.close()

    def _end_processes(self, *running: int) -> None:
        """Kill all processes here; where the system does not say which there are, those that run for sure."""
        if sys.platform == "linux":
            processes.end_others(deeper=not self.has_neighbours())
        else:
            processes.kill(running)

    def _finish(self, live: Live, cell: Cell, header: Header, fields: list[bytes]) -> None:
        self.cell = None
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
        """Look in so many seconds, sooner if many short cells put it off."""
        self._scales.cancel()
        if self._settings.get("memory_total_bytes") or self._settings.get("cpu_seconds"):
            left = self._latest - time.monotonic()
            self._scales = self._reactor.after(min(seconds, max(0.0, left)), self._weigh)

    def _has_killed(self) -> bool:
        """Return whether the kernel killed a process for want of memory since the last cell began."""
        return self.group is not None and self.group.kills() > self._kills_before

    def _takes_too_much(self) -> bool:
        cap = self._settings.get("memory_total_bytes")
        if not cap:
            return False
        # What a clone has inherited is charged to the group of the original.
        looks = self.group is None or self.generation > 0
        # A process that was killed between cells, or beside commands, may be anybody's.
        killed = self.cell is not None and not self.has_neighbours() and self._has_killed()
        return killed or (looks and processes.memory(cap) > cap)

    def _weigh(self) -> None:
        """End what takes too much memory or processor time; look again as long as anything may run."""
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
        """End processes that cells have left, and threads and timers with the worker, if they take too long.

        most: seconds of processor time for each process in all, and for the worker since the last cell.
        """
        worker = 0 if self.live is None else self.live.pid
        long = [pid for pid in everyone if pid != worker and processes.processor_s(pid) > most]
        if long:
            here = processes.others()  # without commands, which have limits of their own
            processes.kill(pid for pid in long if pid in here)
        if worker and self.cell is None and processes.processor_s(worker) - self._used > most:
            self.end()


def confine(settings: Header, program: bytes, *, mapped: int = 0) -> None:
    """Put this process under the limits of the settings, with no way back.

    mapped: how many bytes of memory do not count, since they hold what was loaded for all.
    """
    limits: Header = dict(settings["limits"])
    if limits.get("memory_bytes") is not None:
        limits["memory_bytes"] += mapped
    rights.set_limits(**limits)
    if settings["scoped"]:
        rights.stay_among_own()
    if program:
        rights.install_seccomp(program)
    if sys.platform == "linux":
        rights.dumpable(True)
        rights.die_first()  # behind it, since before the file is root's


def how(code: int) -> str:
    """Say how a process ended, from its exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
