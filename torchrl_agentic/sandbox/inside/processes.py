"""The processes around a supervisor, read off /proc: who they are, what memory they take, ending them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from torchrl_agentic.sandbox.inside import namespaces, rights

_PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_PASSES = 1000


def live_as(life: Callable[..., None], *args: Any) -> None:
    """Let a process that has just been forked do this and nothing else; says on stderr what goes wrong."""
    try:
        life(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def fork() -> int:
    """Fork, as os.fork; where a seccomp listener decides on it, a signal may come in between."""
    while True:
        try:
            return os.fork()
        except InterruptedError:
            pass


def end_with_parent(parent: int) -> None:
    """Be killed when the parent ends, where the system can do that; at once if it has already."""
    if sys.platform == "linux":
        rights.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def only_files(*fds: int) -> None:
    """Keep these files open as 0, 1, 2, …, and no others."""
    apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in fds]
    for target, fd in enumerate(apart):
        os.dup2(fd, target)
    os.closerange(len(fds), min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20))


def mapped() -> int:
    """Say how many bytes of memory this process has mapped; 0 where that cannot be seen."""
    if not shows_processes():
        return 0
    return int(read("/proc/self/statm").split()[0]) * _PAGE


def read(path: str) -> bytes:
    """Read a file of /proc, 64 KiB of it at most; a stream would take two to three times as long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def shows_processes() -> bool:
    """Whether there is a /proc; without it, a Landlock domain keeps our signals among our own."""
    try:
        os.close(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return False
    return True


def everyone() -> list[int]:
    """Give all processes here but ourselves, with those in namespaces inside ours.

    Here is our PID namespace if we are process 1 of it, else what stems from us.
    """
    us = os.getpid()
    if not shows_processes():
        return []
    seen = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != us]
    if us == 1:
        return seen
    above = {pid: _parent(pid) for pid in seen}
    found = {us}
    while more := {pid for pid, parent in above.items() if parent in found and pid not in found}:
        found |= more
    return sorted(found - {us})


def others() -> list[int]:
    """Give all processes here but ourselves, without those in namespaces inside ours."""
    return [pid for pid in everyone() if not _is_deeper(pid)]


def end_others(*, deeper: bool) -> None:
    """Kill all processes here but ourselves. deeper: also those in namespaces inside ours.

    They are stopped first, until none moves: who forks as fast as it is killed would get away, but what is
    stopped counts against the limit of processes.
    """
    if (os.getpid() == 1 and deeper) or not shows_processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    stopped: set[int] = set()
    for _ in range(MAX_PASSES):
        moving = [pid for pid in others() if pid not in stopped]
        if not moving:
            break
        _signal(moving, signal.SIGSTOP)
        stopped.update(moving)
    kill(stopped)


def pause_others() -> list[int]:
    """Stop all other processes here, see that all their threads have stopped, and give them.

    Raises:
        OSError: one goes on.
    """
    until = time.monotonic() + 1.0
    stopped: set[int] = set()
    while time.monotonic() < until:
        moving = [pid for pid in others() if pid not in stopped]
        if not moving:
            return sorted(stopped)
        _signal(moving, signal.SIGSTOP)
        stopped.update(pid for pid in moving if _has_stopped(pid))
    raise OSError("a process cannot be stopped")


def go_on() -> None:
    """Let all processes here go on that were stopped."""
    _signal(others(), signal.SIGCONT)


def fork_into_namespaces(flags: int) -> int:
    """Fork as `namespaces.fork_into_namespaces`, once more with all others stopped if one got in between."""
    try:
        return namespaces.fork_into_namespaces(flags)
    except InterruptedError:
        pause_others()
        pid = namespaces.fork_into_namespaces(flags)
        if pid:
            go_on()
        return pid


def kill(pids: Iterable[int]) -> None:
    """Kill these processes, as far as they have not ended."""
    _signal(pids, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """Whether it has ended, with all its threads, even if nobody has taken note yet."""
    try:
        return all(_state(f"{pid}/task/{task}") in "ZX" for task in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return True


def _has_stopped(pid: int) -> bool:
    try:
        return all(_state(f"{pid}/task/{task}") in "TZX" for task in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return True  # it has ended


def _is_deeper(pid: int) -> bool:
    """Whether it has one more number, in a namespace inside ours."""
    try:
        return len(read(f"/proc/{pid}/status").partition(b"\nNSpid:")[2].partition(b"\n")[0].split()) > 1
    except OSError:
        return True  # it has ended


def _state(name: str) -> str:
    try:
        return read(f"/proc/{name}/stat").rpartition(b")")[2].split()[0].decode("ascii")
    except (OSError, IndexError):
        return ""


def _parent(pid: int) -> int:
    try:
        return int(read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])  # its name may hold anything
    except (OSError, ValueError, IndexError):
        return 0


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def memory(cap: int, *, own_ipc: bool) -> int:
    """Say how many bytes all processes here take together; own_ipc: with segments that nobody has attached.

    What several of them share counts once for each, unless that exceeds the cap: then it is looked up, which
    takes longer, how they share it.
    """
    pids, segments = everyone(), sum(size for _, size in namespaces.lone_segments()) if own_ipc else 0
    rough = sum(_resident(pid) for pid in pids) + segments
    return rough if rough <= cap else sum(_share(pid) for pid in pids) + segments


def processor_s(pid: int) -> float:
    """Return the seconds of processor time that a process has taken, all its threads; 0 if unknown."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime(~pid << 3 | 2)  # see clock_getcpuclockid(3)
    except OSError:
        return 0.0


def _resident(pid: int) -> int:
    try:
        return int(read(f"/proc/{pid}/statm").split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _share(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return _resident(pid)
