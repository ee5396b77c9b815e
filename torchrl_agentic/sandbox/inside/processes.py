"""The processes around a supervisor, read from /proc: list them, measure them, end them."""

# Windows lacks the modules and functions that are bound only elsewhere; nothing here runs there.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from torchrl_agentic.sandbox.inside import namespaces, rights

if sys.platform != "win32":
    import fcntl
    import resource

    _PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_PASSES = 1000


def run_as_child(life: Callable[..., None], *args: Any) -> None:
    """Run a function in a process that has just been forked, then exit. Errors go to stderr.

    Args:
        life: The function.
        args: Its arguments.
    """
    try:
        life(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def fork() -> int:
    """Fork, as os.fork. Retry if a signal interrupts a seccomp listener."""
    while True:
        try:
            return os.fork()
        except InterruptedError:
            pass


def end_with_parent(parent: int) -> None:
    """Be killed when the parent ends, if the system supports that; at once if it has ended already.

    Args:
        parent: PID of the parent.
    """
    if sys.platform == "linux":
        rights.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def only_files(*fds: int) -> None:
    """Keep these files open as 0, 1, 2, …, and close all others."""
    apart = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in fds]
    for target, fd in enumerate(apart):
        os.dup2(fd, target)
    os.closerange(len(fds), min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20))


def mapped() -> int:
    """Return how many bytes of memory this process has mapped; 0 if that is unknown."""
    if not shows_processes():
        return 0
    return int(read("/proc/self/statm").split()[0]) * _PAGE


def read(path: str) -> bytes:
    """Read at most 64 KiB of a file of /proc. A Python stream would take two to three times as long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def shows_processes() -> bool:
    """Return whether there is a /proc. Without it, Landlock restricts the signals of this process."""
    try:
        os.close(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return False
    return True


def killed_for_memory(events: bytes) -> int:
    """Return how many processes the kernel killed because of the memory limit of a control group.

    Source: the row `oom_kill N` of memory.oom_control (version 1) or memory.events (version 2).

    Args:
        events: Content of that file.
    """
    rows = (row.split() for row in events.splitlines())
    return sum(int(row[1]) for row in rows if row[:1] == [b"oom_kill"])


def everyone() -> list[int]:
    """Return the PIDs of all processes here except this one, nested namespaces included.

    "Here" is the PID namespace if this is its process 1, otherwise the descendants of this process.
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
    """Return the PIDs of all processes here except this one, without those in nested namespaces."""
    return [pid for pid in everyone() if not _is_deeper(pid)]


def end_others(*, deeper: bool) -> None:
    """Kill all processes here except this one.

    They are stopped first, until none runs. Otherwise a process that forks as fast as it is killed would
    escape; stopped processes count against the limit of processes.

    Args:
        deeper: Also kill processes in nested namespaces.
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
    """Stop all other processes here, wait until all their threads have stopped, and return their PIDs.

    Raises:
        OSError: If one continues.
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


def resume_all() -> None:
    """Continue all processes here that were stopped."""
    _signal(others(), signal.SIGCONT)


def fork_into_namespaces(flags: int) -> int:
    """Fork as `namespaces.fork_into_namespaces`; retry with all others stopped if one of them interfered."""
    try:
        return namespaces.fork_into_namespaces(flags)
    except InterruptedError:
        pause_others()
        pid = namespaces.fork_into_namespaces(flags)
        if pid:
            resume_all()
        return pid


def kill(pids: Iterable[int]) -> None:
    """Kill these processes, unless they have ended."""
    _signal(pids, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended with all its threads, reaped or not."""
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
    """Return whether a process is in a nested PID namespace, where it has one more PID."""
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
        return int(
            read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1]
        )  # its name may contain any character
    except (OSError, ValueError, IndexError):
        return 0


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def memory(cap: int) -> int:
    """Return how many bytes all processes here use together, as far as their maps show it.

    Shared anonymous memory counts by its size, because dropped pages of it stay allocated; its resident pages
    count once more if that does not exceed the cap. Memory that is not mapped, such as that of the kernel,
    does not count: only a control group measures it.

    Args:
        cap: The limit, in bytes.
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
    """Return the processor time of a process with all its threads, in seconds; 0 if unknown."""
    if sys.platform != "linux":
        return 0.0
    try:
        return time.clock_gettime(~pid << 3 | 2)  # see clock_getcpuclockid(3)
    except OSError:
        return 0.0


def _sizes(pid: int) -> tuple[int, int]:
    """Return the mapped and the resident bytes of a process."""
    try:
        pages = read(f"/proc/{pid}/statm").split()
        return int(pages[0]) * _PAGE, int(pages[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0, 0


def _shared(pid: int) -> dict[bytes, int] | None:
    """Return the bytes of possibly shared anonymous memory by inode; None if the maps are hidden."""
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
    """Return the inode and the bytes of a row of maps if it is anonymous shared memory, else None."""
    where, rights_, _, _, inode, *name = line.split(None, 5)
    if rights_[3:4] != b"s" or not name or not name[0].startswith((b"/dev/zero", b"/memfd:", b"/SYSV")):
        return None
    first, _, last = where.partition(b"-")
    return inode, int(last, 16) - int(first, 16)


def _share(pid: int) -> int:
    """Return the proportional share of a process in resident memory, without shared anonymous memory."""
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
        return _sizes(pid)[0]  # its maps are hidden: count everything
    except (OSError, IndexError, ValueError):
        return 0  # it has ended
