"""Opens files below /work and granted folders without following links, from inside and from the host."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Optional

CHUNK = 1 << 20
MAX_COPIED = 20_000
"""Maximum number of files and folders that are copied at once."""
MAX_COPY_S = 20.0
"""Maximum seconds of copying them."""
_PIECE = 64 << 20
_MOVED = "a folder was moved while it was copied"
WORK = "/work"
"""Folder where code in a sandbox starts, and that relative paths start from."""
if sys.platform != "win32":
    _FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    # Opening a FIFO must not block before its type is checked.
    _FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Owner = Optional[Callable[[int], None]]  # noqa: UP045  evaluated, and X | None needs Python 3.10
_Key = tuple[int, int]


def inside(path: str) -> tuple[str, ...]:
    """Split a path inside the sandbox into its steps below /work.

    Args:
        path: The path.

    Raises:
        PermissionError: If it lies elsewhere.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        raise PermissionError("a path cannot contain half of a surrogate pair") from None
    if "\0" in path:
        raise PermissionError("a path cannot contain a null character")
    pure = PurePosixPath(WORK, path)
    steps = pure.parts[2:]
    if pure.parts[:2] != ("/", WORK[1:]) or ".." in steps:
        raise PermissionError(f"{path} is not inside {WORK}")
    return steps


def locate(path: str, roots: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """Split a path inside the sandbox at the innermost granted root that contains it, or at /work.

    Args:
        path: The path.
        roots: Granted folders.

    Returns:
        The root, and the steps from it to the path.

    Raises:
        PermissionError: If the path lies elsewhere.
    """
    pure = PurePosixPath(WORK, path)
    for root in sorted(roots, key=len, reverse=True):
        above = PurePosixPath(root).parts
        if pure.parts[: len(above)] == above and ".." not in pure.parts and "\0" not in path:
            return root, pure.parts[len(above) :]
    return WORK, inside(path)


def has_access(found: os.stat_result, wanted: int, user: int) -> bool:
    """Return whether a user, whose group has the same number, has access to a file.

    Args:
        found: Status of the file.
        wanted: Access as in `os.access`.
        user: Number of the user and the group.
    """
    shift = 6 if found.st_uid == user else 3 if found.st_gid == user else 0
    return found.st_mode >> shift & wanted == wanted


@contextlib.contextmanager
def open_to_read(
    folder: str,
    steps: Sequence[str],
    path: str,
    user: Optional[int] = None,  # noqa: UP045  as above
) -> Generator[int]:
    """Open a regular file for reading and yield its descriptor.

    Args:
        folder: Folder that the steps start from.
        steps: Steps from the folder to the file.
        path: Path of the file inside, for error messages.
        user: User that must be allowed to read it; None for the user of this process.

    Raises:
        FileNotFoundError: If there is no such file.
        IsADirectoryError: If it is a folder.
        PermissionError: If the path goes through a link, is not a regular file, or `user` may not read it.
    """
    with (
        _folder_of(folder, steps, path, False, None, user) as (last, name),
        _opened(name, os.O_RDONLY, last, path) as fd,
    ):
        _check(os.fstat(fd), os.R_OK, user, path)
        yield fd


@contextlib.contextmanager
def open_to_write(
    folder: str,
    steps: Sequence[str],
    path: str,
    own: Owner = None,
    user: Optional[int] = None,  # noqa: UP045
) -> Generator[int]:
    """Open a regular file for writing, truncate it, and yield its descriptor. Its folders are created.

    Args:
        folder: Folder that the steps start from.
        steps: Steps from the folder to the file.
        path: Path of the file inside, for error messages.
        own: Called with the descriptor of each file and folder that is created.
        user: User that must be allowed to write it; None for the user of this process.

    Raises:
        IsADirectoryError: If it is a folder.
        PermissionError: If the path goes through a link, is not a regular file, or `user` may not write it.
    """
    with _folder_of(folder, steps, path, True, own, user) as (last, name):
        made = _is_missing(name, last)
        if made:
            _check(os.fstat(last), os.W_OK | os.X_OK, user, path)
        with _opened(name, os.O_WRONLY | os.O_CREAT, last, path) as fd:
            if made and own is not None:
                own(fd)
            _check(os.fstat(fd), os.W_OK, user, path)
            os.ftruncate(fd, 0)
            yield fd


def _check(found: os.stat_result, wanted: int, user: Optional[int], path: str) -> None:  # noqa: UP045
    if user is not None and not has_access(found, wanted, user):
        raise PermissionError(f"{path} cannot be opened: {os.strerror(errno.EACCES)}")


def _is_missing(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _folder_of(
    start: str,
    steps: Sequence[str],
    path: str,
    make: bool,
    own: Owner,
    user: Optional[int],  # noqa: UP045
) -> Generator[tuple[int, str]]:
    """Open the folder of a path, step by step.

    Code inside may rename folders and create links meanwhile. Therefore each step is opened relative to the
    folder before it, and none may be a link.
    """
    if not steps:
        raise IsADirectoryError(f"{path} is a folder")
    with _refusals(path):
        folder = os.open(start, _FOLDER)
    try:
        for step in steps[:-1]:
            _check(os.fstat(folder), os.X_OK, user, path)
            made = False
            if make and _is_missing(step, folder):
                _check(os.fstat(folder), os.W_OK, user, path)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(step, 0o755, dir_fd=folder)
                    made = True
            with _refusals(path):
                below = os.open(step, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
            if made and own is not None:
                own(folder)
        _check(os.fstat(folder), os.X_OK, user, path)
        yield folder, steps[-1]
    finally:
        os.close(folder)


@contextlib.contextmanager
def _refusals(path: str) -> Generator[None]:
    """Convert errors of system calls to errors about the path inside."""
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
    """Open a regular file in an open folder; refuse anything else."""
    with _refusals(path):
        fd = os.open(name, flags | _FILE, 0o644, dir_fd=folder)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{path} is a folder")
        if not stat.S_ISREG(mode):
            raise PermissionError(f"{path} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def copy_tree(
    source: int,
    target: int,
    own: Owner = None,
    device: Optional[int] = None,  # noqa: UP045  as above
    max_bytes: Optional[int] = None,  # noqa: UP045
) -> None:
    """Copy the contents of an open folder into another: files, folders and links as links, nothing else.

    The owner of the source may change it meanwhile, so nothing in it is opened through a link. Existing files
    with the same name are replaced. Holes of files stay holes, and names of one file stay names of one file.
    However deep the folders are, few files are open at a time.

    Args:
        source: Descriptor of the folder to copy.
        target: Descriptor of the folder to copy to.
        own: Called with the descriptor of each file and folder that is created.
        device: Copy only files of this device, and nothing that is mounted there; None for all.
        max_bytes: Maximum bytes of all files together, without holes; None for no limit.

    Raises:
        OSError: EFBIG if there are more bytes, more than `MAX_COPIED` files and folders, or if it takes
            longer than `MAX_COPY_S`; ESTALE if a folder was moved meanwhile; and what the system raises.
    """
    copy = _TreeCopy(target, own, device, max_bytes)
    here, there = os.dup(source), os.dup(target)
    above: list[tuple[list[str], os.stat_result, tuple[_Key, _Key]]] = []
    try:
        names = copy.names(here)
        while names or above:
            if names:
                name = names.pop()
                with contextlib.suppress(FileNotFoundError):
                    found = copy.entry(name, here, there)
                    if found is None:
                        continue
                    below, into = _open_both(name, here, there)
                    above.append((names, found, (_key(here), _key(there))))
                    copy.steps.append(name)
                    os.close(here)
                    os.close(there)
                    here, there, names = below, into, []
                    names = copy.names(here)
                continue
            names, found, before = above.pop()
            copy.steps.pop()
            try:
                upper = _open_both("..", here, there)
            except FileNotFoundError:
                raise OSError(errno.ESTALE, _MOVED) from None
            os.close(here)
            done, (here, there) = there, upper
            with _closing(done):
                _finish(done, found, own)
            if (_key(here), _key(there)) != before:
                raise OSError(errno.ESTALE, _MOVED)
    finally:
        os.close(here)
        os.close(there)


def _key(fd: int) -> _Key:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _open_both(name: str, here: int, there: int) -> tuple[int, int]:
    """Open the folder with a name in both of two open folders."""
    first = os.open(name, _FOLDER, dir_fd=here)
    try:
        return first, os.open(name, _FOLDER, dir_fd=there)
    except BaseException:
        os.close(first)
        raise


class _TreeCopy:
    """State of one `copy_tree`."""

    def __init__(
        self,
        target: int,
        own: Owner,
        device: Optional[int],  # noqa: UP045
        max_bytes: Optional[int],  # noqa: UP045
    ) -> None:
        self.steps: list[str] = []
        self._target, self._own, self._device = target, own, device
        self._n_left, self._bytes_left = MAX_COPIED, max_bytes
        self._until = time.monotonic() + MAX_COPY_S
        self._first_names: dict[_Key, tuple[str, ...]] = {}

    def names(self, folder: int) -> list[str]:
        """Return the names in an open folder."""
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, self._n_left + 1)]
        self._n_left -= len(names)
        if self._n_left < 0:
            raise OSError(errno.EFBIG, f"there are more than {MAX_COPIED} files and folders")
        return names

    def entry(self, name: str, here: int, there: int) -> Optional[os.stat_result]:  # noqa: UP045
        """Copy a file or a link; create a folder and return its status."""
        self._check_time()
        found = os.stat(name, dir_fd=here, follow_symlinks=False)
        if self._device is not None and found.st_dev != self._device:
            return None
        if stat.S_ISDIR(found.st_mode):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=there)
            return found
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=there)
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=here), name, dir_fd=there)
        elif stat.S_ISREG(found.st_mode) and not self._is_linked(found, name, there):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
            with _fd(name, os.O_RDONLY | _FILE, here) as data, _fd(name, flags, there) as copy:
                self._contents(data, copy, os.fstat(data).st_size)
                _finish(copy, found, self._own)
        return None

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise OSError(errno.EFBIG, f"copying takes longer than {MAX_COPY_S:g} s")

    def _is_linked(self, found: os.stat_result, name: str, there: int) -> bool:
        """Create a further name of a file that was copied already; return False if it was not."""
        if found.st_nlink == 1:
            return False
        here = (*self.steps, name)
        first = self._first_names.setdefault((found.st_dev, found.st_ino), here)
        if first == here:
            return False
        folder = os.dup(self._target)
        try:
            for step in first[:-1]:
                above, folder = folder, os.open(step, _FOLDER, dir_fd=folder)
                os.close(above)
            os.link(first[-1], name, src_dir_fd=folder, dst_dir_fd=there, follow_symlinks=False)
        finally:
            os.close(folder)
        return True

    def _contents(self, source: int, target: int, size: int) -> None:
        """Copy the data of a file, and skip its holes."""
        start = 0
        while start < size:
            try:
                start = os.lseek(source, start, os.SEEK_DATA)
                end = min(os.lseek(source, start, os.SEEK_HOLE), start + _PIECE, size)
            except OSError as error:
                if error.errno == errno.ENXIO:  # the rest is a hole
                    break
                raise
            if self._bytes_left is not None:
                self._bytes_left -= end - start
                if self._bytes_left < 0:
                    raise OSError(errno.EFBIG, "the files are larger than disk_total_bytes")
            os.lseek(source, start, os.SEEK_SET)
            os.lseek(target, start, os.SEEK_SET)
            copy_bytes(source, target, end - start)
            self._check_time()
            start = end
        os.ftruncate(target, size)


def _finish(fd: int, found: os.stat_result, own: Owner) -> None:
    os.fchmod(fd, stat.S_IMODE(found.st_mode))
    os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))
    if own is not None:
        own(fd)


@contextlib.contextmanager
def _fd(name: str, flags: int, folder: int) -> Generator[int]:
    with _closing(os.open(name, flags, 0o600, dir_fd=folder)) as fd:
        yield fd


@contextlib.contextmanager
def _closing(fd: int) -> Generator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def copy_bytes(source: int, target: int, max_bytes: int | None = None) -> int:
    """Copy from one open file to another, from their current positions. Return the number of bytes.

    Args:
        source: Descriptor to read.
        target: Descriptor to write.
        max_bytes: Maximum number of bytes; None for all.
    """
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
