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
"""Default permissions of files that we create: for this user only."""
_WITHOUT_PERMISSIONS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_told: list[Path] = []


def check_mode(name: str, value: Any) -> None:
    """Raise if `value` is not the permissions of a file that its owner can read and write.

    Args:
        name: The argument's name.
        value: The argument.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If it has bits that are not permissions, or its owner could not read and write the file.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected {name} as file permissions, such as 0o600 or 0o640; got {value!r}")
    if value & ~0o777 or value & PRIVATE != PRIVATE:
        raise ValueError(
            f"expected {name} as permissions of a file that its owner can read and write, such as 0o600 or "
            f"0o640; got {value} ({value:#o})"
        )


def open_file(path: Path, flags: int, mode: int = PRIVATE) -> int:
    """Open a file, and create it if it is missing.

    Args:
        path: The file.
        flags: Flags of `os.open`, without `O_CREAT`.
        mode: Permissions of a file that is created, independent of the umask. An existing file keeps its own,
            and a file system without permissions uses those of its mount, which is logged once.

    Returns:
        The file descriptor, which child processes do not inherit.

    Raises:
        OSError: If it cannot be opened.
    """
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:  # raised for a link to a missing file too, which this call creates
        return os.open(path, flags | os.O_CREAT, mode)
    try:
        _set_mode(path, mode, file)
    except BaseException:
        os.close(file)
        raise
    return file


def make_folders(path: Path, mode: int = PRIVATE) -> None:
    """Create a folder and its missing parents; existing folders keep their permissions.

    A folder that is created in one with the set-group-ID bit keeps that bit and the group.

    Args:
        path: The folder.
        mode: Permissions of the files in it; users who may read these may list and enter the folders.

    Raises:
        OSError: If it cannot be created.
    """
    if path.is_dir():
        return
    make_folders(path.parent, mode)
    enter = mode | (mode & 0o444) >> 2
    try:
        path.mkdir(enter)
    except FileExistsError:  # another process has created it meanwhile
        if not path.is_dir():
            raise
        return
    _set_mode(path, enter | path.stat().st_mode & stat.S_ISGID)


def _set_mode(path: Path, mode: int, file: int | None = None) -> None:
    """Set the permissions of a file or folder; log once if its file system has none, as FUSE and vfat."""
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
                "the file system of %s does not support permissions (%s): who may read the files there "
                "depends on how it is mounted",
                path,
                error.strerror,
            )
