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


def killed_for_memory(events: bytes) -> int:
    """Return how many processes the kernel killed for want of memory, by the events of a control group.

    Source: the row `oom_kill N` of memory.oom_control (version 1) or memory.events (version 2).
    """
    rows = (row.split() for row in events.splitlines())
    return sum(int(row[1]) for row in rows if row[:1] == [b"oom_kill"])


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


def memory(cap: int) -> int:
    """Return how many bytes all processes here take together, as far as their maps show it.

    Anonymous memory that several may share counts by its size, since dropped pages of it stay; its resident
    pages count once more where that does not exceed the cap. What is not mapped, such as the kernel's own
    memory, does not count: only a control group knows of it.
    """
    pids = everyone()
    sizes = [_sizes(pid) for pid in pids]
    if sum(virtual for virtual, _ in sizes) <= cap:
        return sum(resident for _, resident in sizes)
    shared: dict[bytes, int] = {}
    private = 0
    for pid, (virtual, resident) in zip(pids, sizes):  # noqa: B905  strict= came with 3.10
        found = _shared(pid)
        private += virtual if found is None else resident
        for inode, size in (found or {}).items():
            shared[inode] = max(size, shared.get(inode, 0))
    rough = private + sum(shared.values())
    return rough if rough <= cap else sum(map(_share, pids)) + sum(shared.values())


def processor_s(pid: int) -> float:
    """Return the seconds of processor time that a process has taken, all its threads; 0 if unknown."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime(~pid << 3 | 2)  # see clock_getcpuclockid(3)
    except OSError:
        return 0.0


def _sizes(pid: int) -> tuple[int, int]:
    """Return the bytes of a process that are mapped, and those that are resident."""
    try:
        pages = read(f"/proc/{pid}/statm").split()
        return int(pages[0]) * _PAGE, int(pages[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0, 0


def _shared(pid: int) -> dict[bytes, int] | None:
    """Return the bytes of anonymous memory that a process may share, by inode; None if it hides its maps."""
    found: dict[bytes, int] = {}
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                if (row := _anonymous(line)) is not None:
                    inode, size = row
                    found[inode] = found.get(inode, 0) + size
    except PermissionError:
        return None
    except OSError:
        pass  # it has ended
    return found


def _anonymous(line: bytes) -> tuple[bytes, int] | None:
    """Return the inode and the bytes of a row of maps, if it is shared memory without a name."""
    where, rights_, _, _, inode, *name = line.split(None, 5)
    if rights_[3:4] != b"s" or not name or not name[0].startswith((b"/dev/zero", b"/memfd:", b"/SYSV")):
        return None
    first, _, last = where.partition(b"-")
    return inode, int(last, 16) - int(first, 16)


def _share(pid: int) -> int:
    """Return the bytes of a process's part in what is resident, without anonymous memory that is shared."""
    try:
        total, counts = 0, True
        with open(f"/proc/{pid}/smaps", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    total += int(line.split()[1]) * 1024 if counts else 0
                elif line[:1].isdigit() or line[:1] in b"abcdef":
                    counts = _anonymous(line) is None
        return total
    except PermissionError:
        return _sizes(pid)[0]  # it hides: all counts
    except (OSError, IndexError, ValueError):
        return 0  # it has ended
