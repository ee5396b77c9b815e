"""Control groups: the kernel limits the memory of all processes of a sandbox together.

See cgroups(7). Control groups count memory that no supervisor can see: memory of the kernel, and pages that
are no longer mapped. Root can usually create them on its own machine; in containers they are mostly
read-only, and under systemd a scope needs Delegate=yes. In version 2, a group that contains processes, such
as that of the trainer, cannot have child groups with limits; the groups of sandboxes are then its siblings,
and its limit does not count them.
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
"""Bytes that may still be charged to a group that is reused, such as caches of the kernel."""
_LOOKS = 2
"""Number of returned groups that are examined for reuse."""
_numbers = itertools.count()
_looking = threading.Lock()


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A folder where groups can be created, and the names of their files in this version of control groups.

    Attributes:
        parent: The folder of the parent group.
        entrance: The file to which a process writes 0 to enter a group. In version 1 it is the file of
            threads, which is equivalent for a process with one thread and avoids a wait of about 10 ms for
            forks.
        limit: The file with the maximum number of bytes that the processes of a group may use.
        swap: The file that limits swap; it may not exist.
        usage: The file with the number of bytes that are charged to a group now.
        events: The file that counts the processes of the group that the kernel killed, as `oom_kill N`.
    """

    parent: Path
    entrance: str
    limit: str
    swap: str
    usage: str
    events: str

    @classmethod
    def below(cls, parent: Path, *, version: int) -> Hierarchy:
        """Return the hierarchy whose groups are created in a folder.

        Args:
            parent: The folder of the parent group.
            version: Version of control groups, 1 or 2.
        """
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
        """Limit the memory of a group, swap included.

        Args:
            folder: The folder of the group.
            limit: Maximum memory in bytes.
        """
        _write(folder / self.limit, str(limit))
        with contextlib.suppress(OSError):  # the kernel may be built without swap accounting
            # Version 1 limits memory plus swap, version 2 swap alone.
            _write(folder / self.swap, str(limit) if "memsw" in self.swap else "0")


class MemoryGroup:
    """A control group with a memory limit. The kernel kills processes of a group that exceeds it.

    Args:
        limit: Maximum memory of all its processes together, in bytes.

    Raises:
        OSError: If it cannot be created.
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
        """Return a command that enters the group and then becomes another command.

        Args:
            command: The other command and its arguments.
        """
        return ["/bin/sh", "-c", _ENTER, str(self._entrance), *command]

    @contextlib.contextmanager
    def opened(self) -> Generator[tuple[int, int]]:
        """Yield the descriptors of the file to enter the group by and of the file that counts kills.

        A process enters by writing 0 to the first file. It needs no rights of its own: the kernel checks
        those of the process that opened the file.
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
        """Return whether the group has no processes and almost no memory is charged to it."""
        try:
            processes = (self._folder / "cgroup.procs").read_text()
            return not processes and int(self._usage.read_text()) <= _RESIDUE
        except OSError:  # it was removed
            return False

    @property
    def killed(self) -> int:
        """Number of its processes that the kernel killed because of the memory limit; 0 if unknown."""
        try:
            return killed_for_memory(self._events.read_bytes())
        except OSError:  # it was removed
            return 0

    def remove(self, patience_s: float = _PATIENCE_S) -> bool:
        """Remove the group once its processes have ended. Return False if they have not after `patience_s`.

        Args:
            patience_s: Maximum seconds to wait.
        """
        return _remove(self._folder, patience_s)


class MemoryGroups:
    """Control groups with the same limit, reused when empty because creating one takes longer. Thread-safe.

    Args:
        limit: Maximum memory of each group, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: set[MemoryGroup] = set()
        self._free: collections.deque[MemoryGroup] = collections.deque()
        self._lock = threading.Lock()

    def take(self) -> MemoryGroup:
        """Return a group without processes.

        Raises:
            OSError: If no group can be created.
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
        """Return a group for reuse. Its processes may still be ending.

        Args:
            group: A group from `take`.
        """
        with self._lock:
            self._free.append(group)

    def close(self) -> None:
        """Remove all groups that have no processes."""
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
    """Return why no group can be created here, or None if one can. Test it once per process."""
    if not ROOT.is_dir():
        return f"{ROOT} does not exist"
    if _hierarchy() is None:
        return (
            "memory control groups cannot be created here; run as root on your own machine, or in a "
            "delegated group: systemd-run --user --scope -p Delegate=yes COMMAND"
        )
    return None


def _hierarchy() -> Hierarchy | None:
    """Return the first hierarchy in which a group with a process can be created. Test it once per process."""
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
    """Return where groups might be created: in the memory group of this process, then in each group above it.

    Args:
        ours: The text of /proc/self/cgroup.
        root: The folder where the hierarchies are mounted.
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
    """Return whether a group can be created here, limited and entered. Enable the memory controller first."""
    with contextlib.suppress(OSError):  # it is enabled already, or cannot be while the group has processes
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
    """Write to a control file of the kernel; do not create it."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _sweep(parent: Path) -> None:
    """Remove empty groups of programs that were killed."""
    for folder in parent.glob("torchrl_agentic-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


_ENTER = 'echo 0 > "$0" && exec "$@"'
