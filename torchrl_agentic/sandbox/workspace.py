"""The host folder behind a sandbox's /work, read and written without following anybody's links."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Sequence

from torchrl_agentic.sandbox.inside.files import (
    WORK,
    copy_tree,
    inside,
    located,
    open_to_read,
    open_to_write,
)
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.roots import NOBODY

__all__ = ["MAX_READ", "NOBODY", "Workspace", "inside"]
MAX_READ = 64 << 20
"""What `read` reads at most, whatever was asked."""


class Workspace:
    """A private folder on the host, which a sandbox shows as /work.

    Code inside may rename folders and plant links while we read or write: every step of a path is opened
    relative to the folder before it, and none may be a link.

    Args:
        limits: Whose granted folders can be read and written as well.
    """

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        limits = limits or ResourceLimits()
        self._readable = [*map(os.path.abspath, (*limits.fs_read_roots, *limits.fs_write_roots))]
        self._writable = [*map(os.path.abspath, limits.fs_write_roots)]
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
        folder, steps, user = self._place(path, self._writable)
        with open_to_write(folder, steps, path, _own, user) as fd, os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)

    def read(self, path: str, max_bytes: int | None) -> bytes:
        """Read a file; see `Sandbox.read_file`."""
        folder, steps, user = self._place(path, self._readable)
        with open_to_read(folder, steps, path, user) as fd, os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(min(max_bytes if max_bytes is not None else MAX_READ, MAX_READ))

    def _place(self, path: str, roots: Sequence[str]) -> tuple[str, tuple[str, ...], int | None]:
        """Give the host's folder from which a path is walked, the steps, and who has to be allowed to.

        In a granted folder, we may do no more than code inside, which is nobody where we are root.
        """
        root, steps = located(path, roots)
        if root == WORK and WORK not in roots:
            return self.path, steps, None
        real = os.path.realpath(root)
        if not steps and not os.path.isdir(real):
            real, steps = os.path.dirname(real), (os.path.basename(real),)
        return real, steps, NOBODY if os.geteuid() == 0 else None

    def copy_to(self, other: Workspace) -> None:
        """Copy all that is in it into another; what is there under the same name is replaced."""
        with _folder(self.path) as source, _folder(other.path) as target:
            copy_tree(source, target, own=_own)


@contextlib.contextmanager
def _folder(path: str) -> Generator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
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
