"""`LineWriter`, a thread that appends lines to files, with bounded memory."""

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
_MOST_LINES = 256  # in one batch


class LineWriter:
    """Appends lines to files on a background thread, which starts with the first line.

    The thread also encodes the lines. `put` blocks while more than `max_pending` characters wait. Lines are
    appended in whole batches, so that several processes may share a file. With the suffix ".zst" each batch
    is a frame of its own, so that a damaged frame does not affect others.

    Args:
        max_pending: Largest number of characters that wait.
        on_existing: Function that the thread calls with each file that is not empty when it is opened.
        mode: Permissions of created files.

    Attributes:
        pid: Id of the process that created the writer.
        error: The last error of writing, or None.
    """

    def __init__(
        self, max_pending: int, on_existing: Callable[[Path], object] | None = None, mode: int = PRIVATE
    ) -> None:
        self._on_existing = on_existing
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
        self._unfinished: set[Path] = set()

    def put(self, path: Path, make: Callable[[], bytes], size: int) -> None:
        """Queue a line.

        Args:
            path: The file.
            make: Function that returns the encoded line; it runs on the thread.
            size: Approximate number of characters that the line keeps in memory until it is written.
        """
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
        """Wait until all queued lines are written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending and not self._is_busy)

    def close(self) -> None:
        """Write the queued lines, and end the thread. A later line starts another thread."""
        if self.pid != os.getpid():
            return  # after a fork, the thread and its queue belong to the parent
        with self._changed:
            thread, self._thread = self._thread, None
            self._is_closing = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while batch := self._take():
            pieces: dict[Path, list[bytes]] = {}
            for path, make, _ in batch:
                try:
                    pieces.setdefault(path, []).append(make())
                except Exception:
                    logger.exception("a trajectory cannot be encoded for %s, and is left out", path)
            for path, lines in pieces.items():
                try:
                    self._append(path, b"".join(lines))
                except OSError as error:
                    self.error = error
                    self._unfinished.add(path)
                    logger.error(
                        "%d trajectories are lost: %s cannot be written: %s", len(lines), path, error
                    )
            with self._changed:
                self._size -= sum(size for _, _, size in batch)
                self._is_busy = False
                self._changed.notify_all()
        self._close_file()

    def _take(self) -> Sequence[tuple[Path, Callable[[], bytes], int]]:
        """Wait for lines and return them; return nothing when the writer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            count = min(len(self._pending), _MOST_LINES)
            self._is_busy = count > 0
            return [self._pending.popleft() for _ in range(count)]

    def _append(self, path: Path, lines: bytes) -> None:
        descriptor = self._descriptor(path)
        if path in self._unfinished:
            lines = b"\n" + lines
        data = _compressed(lines) if path.suffix == ZSTD else lines
        while data:
            data = data[os.write(descriptor, data) :]
        self._unfinished.discard(path)

    def _descriptor(self, path: Path) -> int:
        """Return the descriptor of a file, which is opened in place of the previous one."""
        if self._open is not None and self._open[0] == path:
            return self._open[1]
        self._close_file()
        make_folders(path.parent, self._mode)
        descriptor = open_file(path, os.O_RDWR | os.O_APPEND, self._mode)
        self._open = (path, descriptor)
        size = os.fstat(descriptor).st_size
        if size and self._on_existing is not None:
            self._on_existing(path)
        if size and path.suffix != ZSTD and os.pread(descriptor, 1, size - 1) != b"\n":
            self._unfinished.add(path)  # after a crash, the last line has no newline
        return descriptor

    def _close_file(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


def require_zstd(what: str) -> Any:
    """Return the module `zstandard`.

    Args:
        what: The feature that needs it, as the subject of a sentence.

    Raises:
        MissingExtra: If zstandard is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise MissingExtra(what, "zstandard", "zstd") from None
    return zstandard


def _compressed(data: bytes) -> bytes:
    return require_zstd("A dump in .zst").ZstdCompressor(level=3, write_checksum=True).compress(data)
