"""`check_roots`: checks that code in a new sandbox can use the host folders that its limits grant."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from torchrl_agentic.sandbox.inside.files import has_access
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

OWN_FOLDERS = ("/work", "/tmp", "/dev", "/dev/shm", "/proc")
"""Folders that a sandbox of namespaces replaces by its own."""
_NO_GRANTS = ("/proc", "/dev")
_GRANTS = ("/dev/shm",)
NOBODY = 65534
"""User and group that code runs as if the trainer is root."""


def check_roots(limits: ResourceLimits, own: Collection[str] = ()) -> None:
    """Check that code inside can use each folder that the limits grant.

    If the trainer is root, code runs as nobody, who may read fewer folders.

    Args:
        limits: The limits; `fs_read_roots` and `fs_write_roots` are checked.
        own: Folders that the sandbox replaces by its own.

    Raises:
        ValueError: If a folder does not exist, cannot be shown, or cannot be read or written by the user that
            code runs as. The message says what to do.
    """
    granted = ((name, getattr(limits, name)) for name in ("fs_read_roots", "fs_write_roots"))
    for name, roots in granted:
        for root in roots:
            reason = _why_not(os.path.abspath(root), own, writing=name == "fs_write_roots")
            if reason is not None:
                raise ValueError(f"{name} grants {root!r}, but {reason}")


def below(roots: Iterable[str], folders: Collection[str]) -> list[str]:
    """Return the absolute paths of the roots that are below one of the folders, the shortest first.

    Args:
        roots: Host folders.
        folders: Folders that may contain them.
    """
    paths = sorted(set(map(os.path.abspath, roots)), key=len)
    return [path for path in paths if any(Path(folder) in Path(path).parents for folder in folders)]


def _why_not(path: str, own: Collection[str], *, writing: bool) -> str | None:
    """Return why code inside could not use a folder, and what to do; None if it could."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return "it does not exist: create it before the sandbox"
    except OSError as error:
        return f"it cannot be accessed: {error.strerror}"
    for folder in own:
        if Path(path) == Path(folder) or Path(path) in Path(folder).parents:
            return f"the sandbox has its own {folder}: grant folders below it, or copy what is needed"
    for folder in _NO_GRANTS if own else ():
        if Path(folder) in Path(path).parents and not any(Path(one) in Path(path).parents for one in _GRANTS):
            return f"a sandbox cannot show anything below {folder} of the host"
    wanted = os.R_OK | (os.X_OK if stat.S_ISDIR(found.st_mode) else 0) | (os.W_OK if writing else 0)
    if os.geteuid() != 0:
        if os.access(path, wanted):
            return None
        return f"this user may not {'write' if writing else 'read'} it: chmod or chown it, or grant another"
    for folder in _on_the_way(path):
        if not has_access(os.stat(folder), os.X_OK, NOBODY):
            return (
                f"code inside runs as nobody, because this program runs as root, and nobody may not enter"
                f" {folder}: chmod o+x {folder}, or put it elsewhere, for example below /srv"
            )
    if not has_access(found, wanted, NOBODY):
        verb, remedy = (
            ("write", f"chown -R {NOBODY} {path}") if writing else ("read", f"chmod -R o+rX {path}")
        )
        return (
            f"code inside runs as nobody, because this program runs as root, and may not {verb} it: {remedy}"
        )
    return None


def _on_the_way(path: str) -> Iterator[str]:
    """Yield the parent folders of a path, as written and with links resolved."""
    for one in dict.fromkeys((path, os.path.realpath(path))):
        yield from map(str, Path(one).parents)
