"""Control groups: the kernel bounds what all processes of a sandbox take together, where we may make them.

See cgroups(7). As root on a machine of one's own that is mostly so; in containers they can mostly be read
only, and under systemd a unit needs Delegate=yes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_FILES = {"memory": "memory.limit_in_bytes", "": "memory.max"}
"""The file that holds the limit of memory, by the name of the hierarchy: version 1 has one per resource."""
_EVENTS = ("memory.oom_control", "memory.events")
_PATIENCE_S = 1.0
_numbers = itertools.count()


class MemoryGroup:
    """A group whose processes together take no more memory than so many bytes; who exceeds it is killed.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, limit: int) -> None:
        found = _parent()
        if found is None:
            raise PermissionError(why_not())
        parent, file = found
        self._folder = parent / f"torchrl_agentic-{os.getpid()}-{next(_numbers)}"
        self._folder.mkdir()
        try:
            (self._folder / file).write_text(str(limit))
        except OSError:
            self._folder.rmdir()
            raise

    def entering(self, command: Sequence[str]) -> list[str]:
        """Make a command that enters the group and then becomes another one."""
        script = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", script, str(self._folder / "cgroup.procs"), *command]

    @property
    def killed(self) -> int:
        """How many of its processes the kernel has killed for want of memory; 0 where it does not say."""
        for name in _EVENTS:
            with contextlib.suppress(OSError, ValueError):
                for line in (self._folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove it, once its processes are gone."""
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.005)
            else:
                return


@functools.cache
def why_not() -> str | None:
    """Say why no group can be made here; None if one can. Tries it, once per process."""
    if not _ROOT.is_dir():
        return f"there is no {_ROOT}"
    if _parent() is None:
        return "control groups of memory cannot be written here"
    return None


@functools.cache
def _parent() -> tuple[Path, str] | None:
    """Find the folder to make groups in, and the name of the file for the limit."""
    try:
        ours = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in ours:
        file = next((_FILES[name] for name in controllers.split(",") if name in _FILES), None)
        if file is None:
            continue
        mount = _ROOT / controllers
        for folder in (mount / path.lstrip("/"), mount):
            if _takes(folder, file):
                return folder, file
    return None


def _takes(folder: Path, file: str) -> bool:
    probe = folder / f"torchrl_agentic-{os.getpid()}-probe"
    with contextlib.suppress(OSError):
        probe.mkdir()
        try:
            (probe / file).write_text(str(1 << 30))
            return True
        except OSError:
            return False
        finally:
            probe.rmdir()
    return False
