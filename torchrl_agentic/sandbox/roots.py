"""Host folders that limits grant, checked when a sandbox is made: inside, none is missing without a word."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from torchrl_agentic.sandbox.inside.files import may
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

OWN_FOLDERS = ("/work", "/tmp", "/dev", "/dev/shm", "/proc")
"""What a sandbox of namespaces has of its own in the place of the host's."""
_NO_GRANTS = ("/proc", "/dev")
_GRANTS = ("/dev/shm",)
NOBODY = 65534
"""The user and group that take root's place."""


def check_roots(limits: ResourceLimits, own: Collection[str] = ()) -> None:
    """Check that code inside can use each folder that limits grant.

    Code of a trainer that runs as root runs as nobody, who is let into fewer folders.

    Args:
        limits: Whose `fs_read_roots` and `fs_write_roots` to check.
        own: Folders that the sandbox has in the place of the host's.

    Raises:
        ValueError: If a folder does not exist, cannot be shown, or may not be read or written by the user
            that code runs as. The message says what to do.
    """
    granted = ((name, getattr(limits, name)) for name in ("fs_read_roots", "fs_write_roots"))
    for name, roots in granted:
        for root in roots:
            reason = _why_not(os.path.abspath(root), own, writing=name == "fs_write_roots")
            if reason is not None:
                raise ValueError(f"{name} grants {root!r}, but {reason}")


def below(roots: Iterable[str], folders: Collection[str]) -> list[str]:
    """Return the absolute paths of those roots that lie below one of these folders, the shortest first."""
    paths = sorted(set(map(os.path.abspath, roots)), key=len)
    return [path for path in paths if any(Path(folder) in Path(path).parents for folder in folders)]


def _why_not(path: str, own: Collection[str], *, writing: bool) -> str | None:
    """Say why code inside could not use a folder, and what to do; None if it could."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return "there is no such folder: make it before the sandbox"
    except OSError as error:
        return f"it cannot be looked at: {error.strerror}"
    for folder in own:
        if Path(path) == Path(folder) or Path(path) in Path(folder).parents:
            return f"the sandbox has a {folder} of its own: grant folders below it, or copy what is needed"
    for folder in _NO_GRANTS if own else ():
        if Path(folder) in Path(path).parents and not any(Path(one) in Path(path).parents for one in _GRANTS):
            return f"nothing of the host's {folder} can be shown"
    wanted = os.R_OK | (os.X_OK if stat.S_ISDIR(found.st_mode) else 0) | (os.W_OK if writing else 0)
    if os.geteuid() != 0:
        if os.access(path, wanted):
            return None
        return f"this user may not {'write' if writing else 'read'} it: chmod or chown it, or grant another"
    for folder in _on_the_way(path):
        if not may(os.stat(folder), os.X_OK, NOBODY):
            return (
                f"code inside runs as nobody, since this program runs as root, and {folder} lets only others"
                f" through: chmod o+x {folder}, or put it elsewhere, say below /srv"
            )
    if not may(found, wanted, NOBODY):
        verb, remedy = (
            ("write", f"chown -R {NOBODY} {path}") if writing else ("read", f"chmod -R o+rX {path}")
        )
        return f"code inside runs as nobody, since this program runs as root, and may not {verb} it: {remedy}"
    return None


def _on_the_way(path: str) -> Iterator[str]:
    """Yield the folders that lead to a path, as it is written and with its links followed."""
    for one in dict.fromkeys((path, os.path.realpath(path))):
        yield from map(str, Path(one).parents)
