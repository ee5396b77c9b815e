"""Files and folders that others should not read, created with exactly the permissions that are given."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PRIVATE = 0o600
"""The permissions of what we write unless others are given: for this user alone."""
_WITHOUT_PERMISSIONS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_told: list[Path] = []


def check_mode(name: str, value: Any) -> None:
    """Raise if `value` is not the permissions of a file that its owner can read and write.

    Args:
        name: The argument's name.
        value: The argument.

    Raises:
        TypeError: If it is no integer.
        ValueError: If it has other bits than permissions, or not those of the owner.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is the permissions of a file, such as 0o600 or 0o640; got {value!r}")
    if value & ~0o777 or value & PRIVATE != PRIVATE:
        raise ValueError(
            f"{name} is the permissions of a file that its owner reads and writes, such as 0o600 or 0o640; "
            f"got {value} ({value:#o})"
        )


def open_file(path: Path, flags: int, mode: int = PRIVATE) -> int:
    """Open a file, and create it if it is missing.

    Args:
        path: The file.
        flags: As of `os.open`, without `O_CREAT`.
        mode: Permissions of a file that is created, whatever the umask is. One that is there keeps its own,
            and one on a file system without permissions has those of its mount, which is logged once.

    Returns:
        Its descriptor, which child processes do not inherit.

    Raises:
        OSError: If it cannot be opened.
    """
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:  # a link to a file that is not there, too, which is created
        return os.open(path, flags | os.O_CREAT, mode)
    try:
        _set_mode(path, mode, file)
    except BaseException:
        os.close(file)
        raise
    return file


def make_folders(path: Path, mode: int = PRIVATE) -> None:
    """Create a folder and those above it that are missing; one that is there keeps its permissions.

    One that is created in a folder with the set-group-ID bit keeps that bit and the group.

    Args:
        path: The folder.
        mode: Permissions of the files in it: who may read those may list and enter the folders.

    Raises:
        OSError: If it cannot be created.
    """
    if path.is_dir():
        return
    make_folders(path.parent, mode)
    enter = mode | (mode & 0o444) >> 2
    try:
        path.mkdir(enter)
    except FileExistsError:  # by another process, meanwhile
        if not path.is_dir():
            raise
        return
    _set_mode(path, enter | path.stat().st_mode & stat.S_ISGID)


def _set_mode(path: Path, mode: int, file: int | None = None) -> None:
    """Set the permissions of what was created; log once where a file system has none, as FUSE and vfat.

    Args:
        path: The file or folder.
        mode: Its permissions.
        file: Its descriptor, if it is open.
    """
    opened = path if file is None else file
    if stat.S_IMODE(os.stat(opened).st_mode) == mode:
        return
    try:
        os.chmod(opened, mode)
    except OSError as error:
        if error.errno not in _WITHOUT_PERMISSIONS:
            raise
        if not _told:
            _told.append(path)
            logger.warning(
                "the file system of %s does not take permissions (%s): who may read what is written there is "
                "up to how it is mounted",
                path,
                error.strerror,
            )
