"""The file systems of a trajectory: its own /proc, and folders in memory, each with a quota."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Any

from torchrl_agentic.sandbox.inside import files, namespaces

FOLDERS = (("/work", 1), ("/tmp", 1), ("/dev/shm", 4))
"""What can be written, and by what the quota is divided there."""
_BYTES_PER_FILE = 8192


def set_up(settings: dict[str, Any], *, copied: bool = False) -> None:
    """Set up namespaces that have just been made; settings, copied: see `Supervisor` and `make_folders`."""
    if settings["namespaces"] & namespaces.NEW_NET:
        namespaces.raise_loopback()
    make_folders(settings["quota"], settings["roots"], copied=copied)


def make_folders(quota: int, roots: Iterable[str] = (), *, copied: bool = False) -> None:
    """Mount what a trajectory has of its own, in a new mount namespace; its /work and /tmp may be copies.

    quota: bytes in /work, and in /tmp; a quarter of that in /dev/shm. One file per 8 KiB. roots: what was
    granted below these folders, which they would hide, the shortest first.
    """
    namespaces.keep_mounts_private()
    namespaces.mount("proc", "/proc")
    granted = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in roots]
    for path, part in FOLDERS:
        size = quota // part
        old = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            namespaces.mount(
                "tmpfs", path, f"size={size},nr_inodes={max(64, size // _BYTES_PER_FILE)},mode=0777"
            )
            if copied and part == 1:
                new = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                files.copy_tree(old, new, device=os.fstat(old).st_dev)
                os.close(new)
        finally:
            os.close(old)
    for path, fd in granted:
        make_place(path, is_folder=stat.S_ISDIR(os.fstat(fd).st_mode))
        namespaces.bind(fd, path)
        os.close(fd)
    namespaces.mount("devpts", "/dev/pts", "newinstance,ptmxmode=0666,mode=0600")
    os.chdir("/work")


def make_place(path: str, *, is_folder: bool) -> None:
    """Make an empty folder or file, with those above it, that something can be shown at."""
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
