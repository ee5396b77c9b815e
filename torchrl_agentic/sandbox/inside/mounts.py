"""The file systems of a trajectory: its own /proc, and folders in memory with one quota."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from typing import Any

from torchrl_agentic.sandbox.inside import files, namespaces

FOLDERS = ("/work", "/tmp", "/dev/shm")
"""Folders that can be written."""
_COPIED = FOLDERS[:2]
_BYTES_PER_FILE = 8192
if sys.platform != "win32":
    _FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def set_up(settings: dict[str, Any], *, copied: bool = False) -> None:
    """Set up new namespaces.

    Args:
        settings: Settings of the supervisor.
        copied: See `make_folders`.
    """
    if settings["namespaces"] & namespaces.NEW_NET:
        namespaces.raise_loopback()
    make_folders(settings["quota"], settings["roots"], copied=copied)


def make_folders(quota: int, roots: Iterable[str] = (), *, copied: bool = False) -> None:
    """Mount the file systems of a trajectory in a new mount namespace.

    Args:
        quota: Maximum bytes in all folders together, which are parts of one file system; 0 for no limit.
            There can be one file per 8 KiB.
        roots: Granted folders below these folders, which would hide them; the shortest first.
        copied: Copy the current contents of /work and /tmp.
    """
    namespaces.keep_mounts_private()
    namespaces.mount("proc", "/proc")
    granted = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in roots]
    copied_from = [os.open(path, _FOLDER) for path in (_COPIED if copied else ())]
    top = FOLDERS[0]  # the final mount hides it
    files_at_most = max(64, quota // _BYTES_PER_FILE) if quota else 0
    namespaces.mount("tmpfs", top, f"size={quota},nr_inodes={files_at_most},mode=0755")
    parts: list[int] = []
    for path in FOLDERS:
        part = f"{top}/{os.path.basename(path)}"
        os.mkdir(part)
        os.chmod(part, 0o777)
        parts.append(os.open(part, _FOLDER))
    for path, part in zip(FOLDERS, parts):  # noqa: B905  strict= came with 3.10
        namespaces.bind(part, path)
    for old, part in zip(copied_from, parts):  # noqa: B905
        files.copy_tree(old, part, device=os.fstat(old).st_dev)
    for fd in (*copied_from, *parts):
        os.close(fd)
    for path, fd in granted:
        make_place(path, is_folder=stat.S_ISDIR(os.fstat(fd).st_mode))
        namespaces.bind(fd, path)
        os.close(fd)
    namespaces.mount("devpts", "/dev/pts", "newinstance,ptmxmode=0666,mode=0600")
    os.chdir("/work")


def make_place(path: str, *, is_folder: bool) -> None:
    """Create an empty file or folder, with its parent folders, as a mount point.

    Args:
        path: The path.
        is_folder: True for a folder.
    """
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
