"""Control groups: the kernel bounds what all processes of a sandbox take together, where we may make them.

See cgroups(7). They count what no supervisor can see: memory of the kernel's own, and pages that nobody maps
any more. As root on a machine of one's own they can mostly be made; in containers they can mostly be read
only, and under systemd a scope needs Delegate=yes. In version 2 a group with processes of its own, as that of
the trainer, takes none below it: ours then lie beside it, and its own limit does not count them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrl_agentic.sandbox.inside.processes import killed_for_memory

ROOT = Path("/sys/fs/cgroup")
_MEMORY = "memory"
_PATIENCE_S = 1.0
_RESIDUE = 4 << 20
"""How much may still be charged to a group that is used again: what the kernel keeps for later."""
_LOOKS = 2
"""How many groups that were given back are looked at for one to use again."""
_numbers = itertools.count()
_looking = threading.Lock()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where groups can be made, and the names of their files in this version of control groups.

    Attributes:
        parent: The folder of the group that ours are made in.
        entrance: The file that a process writes 0 to, to enter a group. In version 1 that of threads: for the
            only thread of a process that is the same, and spares waiting until no process forks, some 10 ms.
        limit: The file with the most bytes that the processes of a group may take.
        swap: The file that bounds swap; it need not exist.
        usage: The file with the bytes that a group is charged with now.
        events: The file that counts how often the kernel killed a process of the group, as `oom_kill N`.
    """

    parent: Path
    entrance: str
    limit: str
    swap: str
    usage: str
    events: str

    @classmethod
    def below(cls, parent: Path, *, version: int) -> Hierarchy:
        """Return the hierarchy of this version with its groups in `parent`."""
        if version == 1:
            return cls(
                parent,
                entrance="tasks",
                limit="memory.limit_in_bytes",
                swap="memory.memsw.limit_in_bytes",
                usage="memory.usage_in_bytes",
                events="memory.oom_control",
            )
        return cls(
            parent,
            entrance="cgroup.procs",
            limit="memory.max",
            swap="memory.swap.max",
            usage="memory.current",
            events="memory.events",
        )

    def set_limit(self, folder: Path, limit: int) -> None:
        """Bound the memory of a group, swap included."""
        _write(folder / self.limit, str(limit))
        with contextlib.suppress(OSError):  # the kernel may not count swap
            # Version 1 bounds memory and swap together, version 2 swap alone.
            _write(folder / self.swap, str(limit) if "memsw" in self.swap else "0")


class MemoryGroup:
    """A group whose processes together take no more memory than so many bytes; one that exceeds it is killed.

    Raises:
        OSError: If it cannot be made.
    """

    def __init__(self, limit: int) -> None:
        hierarchy = _hierarchy()
        if hierarchy is None:
            raise PermissionError(why_not())
        self._folder = hierarchy.parent / f"torchrl_agentic-{os.getpid()}-{next(_numbers)}"
        self._entrance, self._events = self._folder / hierarchy.entrance, self._folder / hierarchy.events
        self._usage = self._folder / hierarchy.usage
        self._folder.mkdir()
        try:
            hierarchy.set_limit(self._folder, limit)
        except OSError:
            self._folder.rmdir()
            raise

    def entering(self, command: Sequence[str]) -> list[str]:
        """Return a command that enters the group and then becomes another one."""
        return ["/bin/sh", "-c", _ENTER, str(self._entrance), *command]

    @contextlib.contextmanager
    def opened(self) -> Generator[tuple[int, int]]:
        """Open the file that a process writes 0 to, to enter, and that which counts kills.

        The writer needs no rights of its own: the kernel asks for those of the process that opened the file.
        """
        entrance = os.open(self._entrance, os.O_WRONLY | os.O_CLOEXEC)
        try:
            events = os.open(self._events, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(entrance)
            raise
        try:
            yield entrance, events
        finally:
            os.close(entrance)
            os.close(events)

    @property
    def is_unused(self) -> bool:
        """Whether no process is in it, and next to no memory is charged to it that others still use."""
        try:
            processes = (self._folder / "cgroup.procs").read_text()
            return not processes and int(self._usage.read_text()) <= _RESIDUE
        except OSError:  # it was removed
            return False

    @property
    def killed(self) -> int:
        """How many of its processes the kernel has killed for want of memory; 0 where it does not say."""
        try:
            return killed_for_memory(self._events.read_bytes())
        except OSError:  # it was removed
            return 0

    def remove(self, patience_s: float = _PATIENCE_S) -> bool:
        """Remove it once its processes are gone; return False if they are not after `patience_s`."""
        return _remove(self._folder, patience_s)


class MemoryGroups:
    """Groups with one limit, used again once nothing is in them: to make one takes longer than to enter it.

    For any thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: set[MemoryGroup] = set()
        self._free: collections.deque[MemoryGroup] = collections.deque()
        self._lock = threading.Lock()

    def take(self) -> MemoryGroup:
        """Return a group without processes.

        Raises:
            OSError: If none can be made.
        """
        with self._lock:
            for _ in range(min(len(self._free), _LOOKS)):
                group = self._free.popleft()
                if group.is_unused:
                    return group
                if group.remove(patience_s=0):
                    self._made.discard(group)
                else:
                    self._free.append(group)
        group = MemoryGroup(self._limit)
        with self._lock:
            self._made.add(group)
        return group

    def give_back(self, group: MemoryGroup) -> None:
        """Note that whoever took a group needs it no more; its processes may still be ending."""
        with self._lock:
            self._free.append(group)

    def close(self) -> None:
        """Remove all, as far as no process is in them."""
        with self._lock:
            groups = [*self._made]
            self._made.clear()
            self._free.clear()
        until = time.monotonic() + _PATIENCE_S
        for group in groups:
            group.remove(max(0.0, until - time.monotonic()))


def _remove(folder: Path, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)
        else:
            return True


@functools.cache
def why_not() -> str | None:
    """Return why no group can be made here; None if one can. Tries it, once per process."""
    if not ROOT.is_dir():
        return f"there is no {ROOT}"
    if _hierarchy() is None:
        return (
            "control groups of memory cannot be made here: they need root on a machine of one's own, or a "
            "delegated group, as by 'systemd-run --user --scope -p Delegate=yes'"
        )
    return None


def _hierarchy() -> Hierarchy | None:
    """Return the first hierarchy that takes a group with a process in it; tries once per process."""
    with _looking:
        return _find_hierarchy()


@functools.cache
def _find_hierarchy() -> Hierarchy | None:
    try:
        ours = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    found = next(filter(_takes, candidates(ours, ROOT)), None)
    if found is not None:
        _sweep(found.parent)
    return found


def candidates(ours: str, root: Path) -> list[Hierarchy]:
    """Return where groups might be made: in our own group of memory, then in each one above it.

    Args:
        ours: The text of /proc/self/cgroup.
        root: Where the hierarchies are mounted.
    """
    found: list[Hierarchy] = []
    for line in ours.splitlines():
        _, controllers, path = line.split(":", 2)
        if _MEMORY in controllers.split(","):
            mount, version = root / controllers, 1
        elif not controllers:
            mount, version = root, 2
        else:
            continue
        folder = mount / path.strip("/")
        while folder.is_relative_to(mount):
            found.append(Hierarchy.below(folder, version=version))
            folder = folder.parent
    return found


def _takes(hierarchy: Hierarchy) -> bool:
    """Return whether a group can be made here, limited, and entered; hands memory on to groups first."""
    with contextlib.suppress(OSError):  # it is on already, or cannot be switched on while there are processes
        _write(hierarchy.parent / "cgroup.subtree_control", "+memory")
    probe = hierarchy.parent / f"torchrl_agentic-{os.getpid()}-{next(_numbers)}"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        probe.mkdir()
        try:
            hierarchy.set_limit(probe, 1 << 30)
            entered = subprocess.run(
                ["/bin/sh", "-c", _ENTER, str(probe / hierarchy.entrance), "/bin/true"],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False,
            )  # fmt: skip
            return entered.returncode == 0
        finally:
            _remove(probe, _PATIENCE_S)
    return False


def _write(path: Path, text: str) -> None:
    """Write a file of the kernel's; what is not there is not made."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _sweep(parent: Path) -> None:
    """Remove empty groups of programs that were killed before they could."""
    for folder in parent.glob("torchrl_agentic-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


_ENTER = 'echo 0 > "$0" && exec "$@"'
