"""`Workspace`: the host folder behind /work of a sandbox, read and written without following links."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Sequence

from torchrl_agentic.errors import FilesNotCopied, SandboxError
from torchrl_agentic.sandbox.base import granted_place
from torchrl_agentic.sandbox.inside.files import (
    WORK,
    copy_tree,
    inside,
    open_to_read,
    open_to_write,
)
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.roots import NOBODY

__all__ = ["MAX_READ", "NOBODY", "Workspace", "inside"]
MAX_READ = 64 << 20
"""Maximum bytes that `read` returns."""
_OF_HOST = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of copying that the host causes: one of both folders is gone, or something has run out."""


class Workspace:
    """A private folder on the host, which a sandbox shows as /work.

    Code inside may rename folders and create links while the host reads or writes. Therefore each step of a
    path is opened relative to the folder before it, and none may be a link.

    Args:
        limits: Limits whose granted folders can be read and written as well.
    """

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        limits = limits or ResourceLimits()
        self._readable = [*map(os.path.abspath, (*limits.fs_read_roots, *limits.fs_write_roots))]
        self._max_bytes = limits.disk_total_bytes
        self._writable = [*map(os.path.abspath, limits.fs_write_roots)]
        self.path = tempfile.mkdtemp(prefix="torchrl_agentic-")
        if os.geteuid() == 0:
            os.chown(self.path, NOBODY, NOBODY)

    def remove(self) -> None:
        """Remove the folder with everything in it, also deeply nested folders and those without rights."""
        with contextlib.suppress(RecursionError):
            shutil.rmtree(self.path, onerror=_ignore)
        if os.path.lexists(self.path):
            for command in (("chmod", "-R", "u+rwx"), ("rm", "-rf")):
                subprocess.run([*command, "--", self.path], stderr=subprocess.DEVNULL, check=False)

    def write(self, path: str, data: bytes) -> None:
        """Write a file and create its folders; see `Sandbox.write_file`.

        Args:
            path: Path inside.
            data: Content of the file.
        """
        folder, steps, user = self._place(path, self._writable)
        with open_to_write(folder, steps, path, _own, user) as fd, os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)

    def read(self, path: str, max_bytes: int | None) -> bytes:
        """Read a file; see `Sandbox.read_file`.

        Args:
            path: Path inside.
            max_bytes: Maximum number of bytes; None for `MAX_READ`.
        """
        folder, steps, user = self._place(path, self._readable)
        with open_to_read(folder, steps, path, user) as fd, os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(min(max_bytes if max_bytes is not None else MAX_READ, MAX_READ))

    def _place(self, path: str, roots: Sequence[str]) -> tuple[str, tuple[str, ...], int | None]:
        """Return the host folder where a path starts, its steps, and the user whose rights apply, or None.

        In a granted folder the host may do no more than code inside, which runs as nobody if the trainer is
        root.
        """
        root, steps = granted_place(path, roots)
        if root == WORK and WORK not in roots:
            return self.path, steps, None
        real = os.path.realpath(root)
        if not steps and not os.path.isdir(real):
            real, steps = os.path.dirname(real), (os.path.basename(real),)
        return real, steps, NOBODY if os.geteuid() == 0 else None

    def copy_to(self, other: Workspace) -> None:
        """Copy all files to another workspace, replacing those with the same name.

        Raises:
            FilesNotCopied: If code inside has left more than fits, or what cannot be copied.
            SandboxError: If the host is full, or a workspace was removed.
        """
        try:
            with _folder(self.path) as source, _folder(other.path) as target:
                copy_tree(source, target, own=_own, max_bytes=self._max_bytes)
        except OSError as error:
            kind = SandboxError if error.errno in _OF_HOST else FilesNotCopied
            raise kind(f"files cannot be copied: {error.strerror or error}") from error


@contextlib.contextmanager
def _folder(path: str) -> Generator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _own(fd: int) -> None:
    """Change the owner of a file that root created to the user that code runs as."""
    if os.geteuid() == 0 and os.fstat(fd).st_uid == 0:
        os.fchown(fd, NOBODY, NOBODY)


def _ignore(function: object, path: object, error: object) -> None:
    """Continue with the other files; a slower method removes the rest."""
    del function, path, error
