"""Opening files below /work without following anybody's links, from inside and from the host."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Generator
from pathlib import PurePosixPath
from typing import Optional

CHUNK = 1 << 20
WORK = "/work"
"""Where code in a sandbox starts, and what relative paths are relative to."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not hold us up before we see what it is
Owner = Optional[Callable[[int], None]]  # noqa: UP045  evaluated, and X | None needs Python 3.10


def inside(path: str) -> tuple[str, ...]:
    """Split a virtual path into its steps below /work.

    Raises:
        PermissionError: it lies elsewhere.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise PermissionError("a path cannot hold half of a surrogate pair") from None
    if "\0" in path:
        raise PermissionError("a path cannot hold a null character")
    pure = PurePosixPath(WORK, path)
    steps = pure.parts[2:]
    if pure.parts[:2] != ("/", WORK[1:]) or ".." in steps:
        raise PermissionError(f"{path} is not inside {WORK}")
    return steps


@contextlib.contextmanager
def open_to_read(root: str, path: str) -> Generator[int]:
    """Open a regular file below the folder that stands for /work.

    Raises:
        FileNotFoundError, IsADirectoryError: as for any file.
        PermissionError: the path leaves the folder, goes through a link, or is no regular file.
    """
    with (
        _folder_of(root, path, False, None) as (folder, name),
        _opened(name, os.O_RDONLY, folder, path) as fd,
    ):
        yield fd


@contextlib.contextmanager
def open_to_write(root: str, path: str, own: Owner = None) -> Generator[int]:
    """Open a regular file below the folder that stands for /work, empty; its folders are made.

    own: called with each file and folder on the way.

    Raises:
        IsADirectoryError, PermissionError: as for `open_to_read`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with _folder_of(root, path, True, own) as (folder, name), _opened(name, flags, folder, path) as fd:
        if own is not None:
            own(fd)
        yield fd


@contextlib.contextmanager
def _folder_of(root: str, path: str, make: bool, own: Owner) -> Generator[tuple[int, str]]:
    """Open the folder that a virtual path lies in, step by step.

    Code inside may rename folders and plant links meanwhile: every step is opened relative to the folder
    before it, and none may be a link.
    """
    steps = inside(path)
    if not steps:
        raise IsADirectoryError(f"{path} is a folder")
    folder = os.open(root, _FOLDER)
    try:
        for step in steps[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(step, 0o755, dir_fd=folder)
            with _refusals(path):
                below = os.open(step, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
            if own is not None:
                own(folder)
        yield folder, steps[-1]
    finally:
        os.close(folder)


@contextlib.contextmanager
def _refusals(path: str) -> Generator[None]:
    """Say of a path what is wrong with it, in terms of the sandbox's own paths."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} is a folder") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EMFILE, errno.ENAMETOOLONG):
            raise OSError(error.errno, f"{path}: {error.strerror}") from None
        # ELOOP for a link, ENOTDIR for a link to a folder, ENXIO for a FIFO, …
        raise PermissionError(f"{path} cannot be opened: {error.strerror}; links are not followed") from None


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int, path: str) -> Generator[int]:
    """Open a regular file in an open folder, and nothing else."""
    with _refusals(path):
        fd = os.open(name, flags | _FILE, 0o644, dir_fd=folder)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{path} is a folder")
        if not stat.S_ISREG(mode):
            raise PermissionError(f"{path} is no regular file")
        yield fd
    finally:
        os.close(fd)


def copy_tree(source: int, target: int, own: Owner = None) -> None:
    """Copy what lies in an open folder into another: files, folders and links as such, nothing else.

    Whoever owns the source may change it meanwhile: nothing in it is opened through a link. What has the same
    name in the target is replaced. own: called with each file and folder that is made.
    """
    for name in os.listdir(source):
        with contextlib.suppress(FileNotFoundError):
            _copy(name, source, target, own)


def _copy(name: str, source: int, target: int, own: Owner) -> None:
    found = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode):
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=target)
        with _fd(name, _FOLDER, source) as below, _fd(name, _FOLDER, target) as into:
            copy_tree(below, into, own)
            _finish(into, found, own)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=target)
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif stat.S_ISREG(found.st_mode):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
        with _fd(name, os.O_RDONLY | _FILE, source) as data, _fd(name, flags, target) as copy:
            pour(data, copy)
            _finish(copy, found, own)


def _finish(fd: int, found: os.stat_result, own: Owner) -> None:
    os.fchmod(fd, stat.S_IMODE(found.st_mode))
    os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))
    if own is not None:
        own(fd)


@contextlib.contextmanager
def _fd(name: str, flags: int, folder: int) -> Generator[int]:
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def pour(source: int, target: int, max_bytes: int | None = None) -> int:
    """Copy from one open file to another, from where both stand; give the number of bytes."""
    done = 0
    while max_bytes is None or done < max_bytes:
        data = os.read(source, CHUNK if max_bytes is None else min(CHUNK, max_bytes - done))
        if not data:
            break
        view = memoryview(data)
        while view:
            view = view[os.write(target, view) :]
        done += len(data)
    return done
