"""Runs commands for the host, each below its own process 1, so that its leftovers end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable

from torchrl_agentic.sandbox.inside import namespaces, processes, rights
from torchrl_agentic.sandbox.inside.interpreter import WATCH_S, Header, MemoryCgroup, Respond, confine
from torchrl_agentic.sandbox.inside.pipes import Pipe
from torchrl_agentic.sandbox.inside.reactor import Reactor, Timer

_CODE, _STARTED = struct.Struct("i"), b"s"
_KILLED = (None, -9, 128 + 9)
"""How a command may end if one of its processes was killed; 128 + 9 is the exit code of shells."""
_NAMESPACES = namespaces.NEW_USER | namespaces.NEW_MOUNT | namespaces.NEW_PID


class RunningCommand:
    """A running command or server.

    Args:
        pid: Process 1 of the command.
        status: Descriptor from which its exit code is read.
        answer: Sends the answer to the request.
    """

    def __init__(self, pid: int, status: int, answer: Respond) -> None:
        self.pid, self.status, self.answer = pid, status, answer
        self.pipes: list[Pipe] = []
        self.is_suspect = False
        self.began = time.monotonic()
        self.stopped = ""
        self.timers: dict[str, Timer] = {}


class Commands:
    """All running commands.

    Attributes:
        has_cell: Returns whether a cell runs in the same control group.
        has_worker: Returns whether a worker lives there, which may have processes in the background.

    Args:
        reactor: Main loop of this process.
        settings: Settings of the supervisor.
        program: Seccomp filter of commands; b"" for none.
        group: Control group that limits their memory, or None.
    """

    def __init__(
        self, reactor: Reactor, settings: Header, program: bytes, group: MemoryCgroup | None = None
    ) -> None:
        self.running: dict[int, RunningCommand] = {}
        self.has_cell: Callable[[], bool] = bool
        self.has_worker: Callable[[], bool] = bool
        self._group = group
        self._reactor, self._settings, self._program = reactor, settings, program

    def run(self, header: Header, handed: list[int], answer: Respond) -> None:
        """Run a command. The answer has its exit code and is sent when it has ended.

        Args:
            header: The request: id, argv, folder, env, limits, wall_s, output_bytes.
            handed: Descriptor of its stdin, if it has one; of stdin, stdout and stderr for a server.
            answer: Sends the answer.
        """
        pipes = [] if len(handed) == 3 else [Pipe(self._reactor, header["output_bytes"]) for _ in range(2)]
        status, ends = os.pipe()
        settings = {**self._settings, "limits": header["limits"]}
        pid = processes.fork_into_namespaces(_NAMESPACES)
        if pid == 0:
            given = handed if handed else [os.open("/dev/null", os.O_RDONLY)]
            standard = [*given, *(pipe.end for pipe in pipes)]
            processes.run_as_child(
                _be_process_1, header, settings, self._program, self._group, standard, ends
            )
        for fd in (*handed, ends, *(pipe.end for pipe in pipes)):
            os.close(fd)
        command = self.running[header["id"]] = RunningCommand(pid, status, answer)
        command.pipes = pipes
        if self._group is not None and len(self.running) == 1 and not self.has_cell():
            self._group.explain()
        self._reactor.on_exit(pid, lambda _: self._ended(header["id"], command))
        if header["wall_s"] is not None:
            command.timers["wall"] = self._reactor.after(
                header["wall_s"], lambda: self._kill(command, "timeout")
            )
        self._watch_memory(command)

    def stop(self, number: int) -> None:
        """End a command if it still runs."""
        if number in self.running:
            self._kill(self.running[number], "cancelled")

    def end(self) -> None:
        """End all commands."""
        for command in list(self.running.values()):
            self._kill(command, "cancelled")

    def _kill(self, command: RunningCommand, why: str) -> None:
        command.stopped = command.stopped or why
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.pid, signal.SIGKILL)

    def _ended(self, number: int, command: RunningCommand) -> None:
        del self.running[number]
        for timer in command.timers.values():
            timer.cancel()
        kept = [pipe.take() for pipe in command.pipes]
        for pipe in command.pipes:
            pipe.close()
        written = os.read(command.status, 1 + _CODE.size)
        os.close(command.status)
        code: int | None = _CODE.unpack(written[1:])[0] if len(written) == 1 + _CODE.size else None
        if self._group is not None:
            if code in _KILLED and self._group.has_killed:
                command.stopped = command.stopped or "memory"
            self._group.explain()
        header: Header = {
            "code": code,
            "started": written[:1] == _STARTED,
            "stopped": command.stopped,
            "omitted": sum(omitted for _, omitted in kept),
            "seconds": time.monotonic() - command.began,
        }
        command.answer(header, *(data for data, _ in kept))

    def _watch_memory(self, command: RunningCommand) -> None:
        if self._settings.get("memory_total_bytes"):
            command.timers["memory"] = self._reactor.after(WATCH_S, lambda: self._weigh(command))

    def _weigh(self, command: RunningCommand) -> None:
        cap = self._settings["memory_total_bytes"]
        if self._group is None:
            is_over = processes.memory(cap) > cap
        else:
            # The group counts what was killed, but not whose process it was. At the second look, whatever
            # ended with its process has been seen to end.
            is_alone = len(self.running) == 1 and not self.has_worker()
            was_suspect, command.is_suspect = command.is_suspect, is_alone and self._group.has_killed
            is_over = was_suspect and command.is_suspect
        if is_over:
            self._kill(command, "memory")
        else:
            self._watch_memory(command)


def _be_process_1(
    header: Header,
    settings: Header,
    program: bytes,
    group: MemoryCgroup | None,
    standard: list[int],
    status: int,
) -> None:
    """Run as process 1: start the command as a child, reap orphans, and write its exit code at its end."""
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
    """Become the command; exit with 126 if there is no such folder, 127 if there is no such command."""
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
