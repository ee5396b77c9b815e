"""Lines that a thread of its own appends to files: bounded in memory, each piece whole."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.tools.private_files import PRIVATE, make_folders, open_file

logger = logging.getLogger(__name__)

ZSTD = ".zst"
_MOST_LINES = 256  # that are written, and compressed, together


class Writer:
    """Appends lines to files on a thread of its own, which it starts with the first one.

    What is handed over becomes a line there. `put` waits while more than `max_pending` characters wait. Files
    are only appended to, a piece at a time, so that several processes may share one; with the suffix ".zst"
    each piece is a frame of its own, so that a cut one costs no other.

    Args:
        max_pending: How many characters may wait.
        found: Called on the thread with each file that is not empty when it is opened.
        mode: Permissions of the files that are created.
    """

    def __init__(
        self, max_pending: int, found: Callable[[Path], object] | None = None, mode: int = PRIVATE
    ) -> None:
        self._found = found
        self._mode = mode
        self.pid = os.getpid()
        self.error: OSError | None = None
        self._max_pending = max_pending
        self._pending: deque[tuple[Path, Callable[[], bytes], int]] = deque()
        self._size = 0
        self._is_busy = self._is_closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._open: tuple[Path, int] | None = None
        self._torn: set[Path] = set()

    def put(self, path: Path, make: Callable[[], bytes], size: int) -> None:
        """Hand over a line. size: about how many characters it keeps in memory until it is written."""
        with self._changed:
            if self._thread is None:
                self._is_closing = False
                self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._size <= self._max_pending)
            self._pending.append((path, make, size))
            self._size += size
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines that were handed over are in their files."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and not self._is_busy)

    def close(self) -> None:
        """Write what waits, and end the thread; a line that comes later starts another."""
        if self.pid != os.getpid():
            return  # after a fork, the thread and what waits for it are the parent's
        with self._changed:
            thread, self._thread = self._thread, None
            self._is_closing = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while some := self._take():
            pieces: dict[Path, list[bytes]] = {}
            for path, make, _ in some:
                try:
                    pieces.setdefault(path, []).append(make())
                except Exception:
                    logger.exception("a trajectory cannot be written to %s, and is left out", path)
            for path, lines in pieces.items():
                try:
                    self._append(path, b"".join(lines))
                except OSError as error:
                    self.error = error
                    self._torn.add(path)
                    logger.error(
                        "%d trajectories are lost: %s cannot be written: %s", len(lines), path, error
                    )
            with self._changed:
                self._size -= sum(size for _, _, size in some)
                self._is_busy = False
                self._changed.notify_all()
        self._leave()

    def _take(self) -> Sequence[tuple[Path, Callable[[], bytes], int]]:
        """Wait for lines; none: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            count = min(len(self._pending), _MOST_LINES)
            self._is_busy = count > 0
            return [self._pending.popleft() for _ in range(count)]

    def _append(self, path: Path, lines: bytes) -> None:
        descriptor = self._descriptor(path)
        if path in self._torn:
            lines = b"\n" + lines
        data = _compressed(lines) if path.suffix == ZSTD else lines
        while data:
            data = data[os.write(descriptor, data) :]
        self._torn.discard(path)

    def _descriptor(self, path: Path) -> int:
        """Open a file, and the one before it no longer."""
        if self._open is not None and self._open[0] == path:
            return self._open[1]
        self._leave()
        make_folders(path.parent, self._mode)
        descriptor = open_file(path, os.O_RDWR | os.O_APPEND, self._mode)
        self._open = (path, descriptor)
        size = os.fstat(descriptor).st_size
        if size and self._found is not None:
            self._found(path)
        if size and path.suffix != ZSTD and os.pread(descriptor, 1, size - 1) != b"\n":
            self._torn.add(path)  # a crash has left its last line without an end
        return descriptor

    def _leave(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


def require_zstd(what: str) -> Any:
    """Give the module that compresses. what: needs it.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise MissingExtra(what, "zstandard", "zstd") from None
    return zstandard


def _compressed(data: bytes) -> bytes:
    return require_zstd("A dump in .zst").ZstdCompressor(level=3, write_checksum=True).compress(data)
