"""Runs commands for the host, each below a process 1 of its own: what it leaves running ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable

from torchrl_agentic.sandbox.inside import namespaces, processes, rights
from torchrl_agentic.sandbox.inside.interpreter import WATCH_S, Answer, Group, Header, confine
from torchrl_agentic.sandbox.inside.pipes import Pipe
from torchrl_agentic.sandbox.inside.reactor import Reactor, Timer

_CODE, _STARTED = struct.Struct("i"), b"s"
_KILLED = (None, -signal.SIGKILL, 128 + signal.SIGKILL)
"""How a command may end one of whose processes was killed; shells give the last."""
_NAMESPACES = namespaces.NEW_USER | namespaces.NEW_MOUNT | namespaces.NEW_PID


class Command:
    """A command that runs, or a server. pid: of the process 1 that has started it."""

    def __init__(self, pid: int, status: int, answer: Answer) -> None:
        self.pid, self.status, self.answer = pid, status, answer
        self.pipes: list[Pipe] = []
        self.kills_before = 0
        self.began = time.monotonic()
        self.stopped = ""
        self.timers: dict[str, Timer] = {}


class Commands:
    """All commands that run. settings, program, group: as for `Interpreter`.

    has_neighbours: says whether a cell runs in the same group, too.
    """

    def __init__(
        self, reactor: Reactor, settings: Header, program: bytes, group: Group | None = None
    ) -> None:
        self.running: dict[int, Command] = {}
        self.has_neighbours: Callable[[], bool] = bool
        self._group = group
        self._reactor, self._settings, self._program = reactor, settings, program

    def run(self, header: Header, handed: list[int], answer: Answer) -> None:
        """Run a command; the answer, with its exit code, comes when it has ended.

        header: id, argv, folder, env, limits, wall_s, output_bytes. handed: its stdin, if it has one; for a
        server its stdin, stdout and stderr.
        """
        pipes = [] if len(handed) == 3 else [Pipe(self._reactor, header["output_bytes"]) for _ in range(2)]
        status, ends = os.pipe()
        settings = {**self._settings, "limits": header["limits"]}
        pid = processes.fork_into_namespaces(_NAMESPACES)
        if pid == 0:
            given = handed if handed else [os.open("/dev/null", os.O_RDONLY)]
            standard = [*given, *(pipe.end for pipe in pipes)]
            processes.live_as(_be_process_1, header, settings, self._program, self._group, standard, ends)
        for fd in (*handed, ends, *(pipe.end for pipe in pipes)):
            os.close(fd)
        command = self.running[header["id"]] = Command(pid, status, answer)
        command.pipes = pipes
        command.kills_before = 0 if self._group is None else self._group.kills()
        self._reactor.on_exit(pid, lambda _: self._ended(header["id"], command))
        if header["wall_s"] is not None:
            command.timers["wall"] = self._reactor.after(
                header["wall_s"], lambda: self._kill(command, "timeout")
            )
        self._watch_memory(command)

    def stop(self, number: int) -> None:
        """End a command, if it still runs."""
        if number in self.running:
            self._kill(self.running[number], "cancelled")

    def end(self) -> None:
        """End all."""
        for command in list(self.running.values()):
            self._kill(command, "cancelled")

    def _kill(self, command: Command, why: str) -> None:
        command.stopped = command.stopped or why
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGKILL)

    def _ended(self, number: int, command: Command) -> None:
        del self.running[number]
        for timer in command.timers.values():
            timer.cancel()
        kept = [pipe.take() for pipe in command.pipes]
        for pipe in command.pipes:
            pipe.close()
        written = os.read(command.status, 1 + _CODE.size)
        os.close(command.status)
        code: int | None = _CODE.unpack(written[1:])[0] if len(written) == 1 + _CODE.size else None
        if code in _KILLED and self._has_killed(command):
            command.stopped = command.stopped or "memory"
        header: Header = {
            "code": code,
            "started": written[:1] == _STARTED,
            "stopped": command.stopped,
            "omitted": sum(omitted for _, omitted in kept),
            "seconds": time.monotonic() - command.began,
        }
        command.answer(header, *(data for data, _ in kept))

    def _watch_memory(self, command: Command) -> None:
        if self._settings.get("memory_total_bytes"):
            command.timers["memory"] = self._reactor.after(WATCH_S, lambda: self._weigh(command))

    def _weigh(self, command: Command) -> None:
        cap = self._settings["memory_total_bytes"]
        alone = len(self.running) == 1 and not self.has_neighbours()  # else nobody says whose process it was
        if (alone and self._has_killed(command)) if self._group else processes.memory(cap) > cap:
            self._kill(command, "memory")
        else:
            self._watch_memory(command)

    def _has_killed(self, command: Command) -> bool:
        """Return whether the kernel killed a process for want of memory while the command ran."""
        return self._group is not None and self._group.kills() > command.kills_before


def _be_process_1(
    header: Header, settings: Header, program: bytes, group: Group | None, standard: list[int], status: int
) -> None:
    """Start the command as a child, clear up behind orphans, and write its exit code when it has ended."""
    if group is not None:
        group.enter()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    namespaces.keep_mounts_private()
    namespaces.mount("proc", "/proc")
    rights.drop_capabilities()
    processes.only_files(*standard, status)
    child = os.fork()
    if child == 0:
        os.close(len(standard))
        os.setsid()
        _execute(header, settings, program)
    os.write(len(standard), _STARTED)
    processes.only_files(os.open("/dev/null", os.O_RDWR), 0, 0, len(standard))
    while True:
        pid, code = os.wait()
        if pid == child:
            ended = os.WEXITSTATUS(code) if os.WIFEXITED(code) else -os.WTERMSIG(code)
            os.write(3, _CODE.pack(ended))
            os._exit(0)


def _execute(header: Header, settings: Header, program: bytes) -> None:
    """Become the command; 126 if there is no such folder, 127 if there is no such command."""
    argv, code = header["argv"], 127
    try:
        try:
            os.chdir(header["folder"])
        except OSError as error:
            code = 126
            raise OSError("cannot go to {}: {}".format(header["folder"], error.strerror)) from None
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        confine(settings, program)
        os.execvpe(argv[0], argv, header["env"])
    except FileNotFoundError:
        os.write(2, b"%s: no such command\n" % os.fsencode(argv[0]))
    except (OSError, ValueError) as error:
        os.write(2, os.fsencode(f"{argv[0]}: {getattr(error, 'strerror', None) or error}\n"))
    os._exit(code)
