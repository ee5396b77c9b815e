"""The host folder behind a sandbox's /work, read and written without following anybody's links."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import PurePosixPath

from torchrl_agentic.sandbox.base import WORK

NOBODY = 65534
"""The user and group that take root's place."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_READ = 64 << 20
"""What `read` reads at most, whatever was asked."""


class Workspace:
    """A private folder on the host, which a sandbox shows as /work.

    Code inside may rename folders and plant links while we read or write: every step of a path is opened
    relative to the folder before it, and none may be a link.
    """

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix="torchrl_agentic-")
        if os.geteuid() == 0:
            os.chown(self.path, NOBODY, NOBODY)

    def remove(self) -> None:
        """Remove it and all that is in it, however deeply nested and whatever rights were taken away."""
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self.path, onerror=_ignore)
        if os.path.lexists(self.path):
            for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
                subprocess.run([*command, "--", self.path], stderr=subprocess.DEVNULL, check=False)

    def write(self, path: str, data: bytes) -> None:
        """Write a file, making its folders; see `Sandbox.write_file`."""
        with self._folder_of(path, make=True) as (folder, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with _opened(name, flags, folder, path) as fd:
                _own(fd)
                with os.fdopen(fd, "wb", closefd=False) as file:
                    file.write(data)

    def read(self, path: str, max_bytes: int | None) -> bytes:
        """Read a file; see `Sandbox.read_file`."""
        with self._folder_of(path) as (folder, name):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with _opened(name, flags, folder, path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
                return file.read(min(max_bytes if max_bytes is not None else MAX_READ, MAX_READ))

    @contextlib.contextmanager
    def _folder_of(self, path: str, *, make: bool = False) -> Generator[tuple[int, str]]:
        """Open the folder that a virtual path lies in, step by step."""
        steps = inside(path)
        if not steps:
            raise IsADirectoryError(f"{path} is a folder")
        folder = os.open(self.path, _FOLDER)
        try:
            for step in steps[:-1]:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(step, 0o755, dir_fd=folder)
                with _refusals(path):
                    below = os.open(step, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
                if make:
                    _own(folder)
            yield folder, steps[-1]
        finally:
            os.close(folder)


def inside(path: str) -> tuple[str, ...]:
    """Split a virtual path into its steps below /work.

    Raises:
        PermissionError: it lies elsewhere.
    """
    if "\0" in path:
        raise PermissionError("a path cannot hold a null character")
    pure = PurePosixPath(WORK, path)
    steps = pure.parts[2:]
    if pure.parts[:2] != ("/", WORK[1:]) or ".." in steps:
        raise PermissionError(f"{path} is not inside {WORK}")
    return steps


@contextlib.contextmanager
def _refusals(path: str) -> Generator[None]:
    """Say of a path what is wrong with it, in terms of the sandbox's own paths."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{path} is a folder") from None
    except OSError as error:  # ELOOP for a link, ENOTDIR for a link to a folder, ENXIO for a FIFO, …
        raise PermissionError(f"{path} cannot be opened: {error.strerror}; links are not followed") from None


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int, path: str) -> Generator[int]:
    """Open a regular file in an open folder, and nothing else.

    The flags hold O_NONBLOCK: a FIFO must not hold us up before we see what it is.
    """
    with _refusals(path):
        fd = os.open(name, flags, 0o644, dir_fd=folder)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{path} is a folder")
        if not stat.S_ISREG(mode):
            raise PermissionError(f"{path} is no regular file")
        yield fd
    finally:
        os.close(fd)


def _own(fd: int) -> None:
    """Hand what root made to the user whom code inside runs as."""
    if os.geteuid() == 0 and os.fstat(fd).st_uid == 0:
        os.fchown(fd, NOBODY, NOBODY)


def _ignore(function: object, path: object, error: object) -> None:
    """Go on with the rest; what is left takes the longer way."""
    del function, path, error
