"""Lines of a file that may be far larger than memory, and may grow, shrink or vanish while it is read."""

from __future__ import annotations

import os
import tempfile
from array import array
from pathlib import Path
from typing import Any, BinaryIO

from torchrl_agentic.records.writer import ZSTD, require_zstd

_CHUNK = 4 << 20
_FRAME = b"\x28\xb5\x2f\xfd"  # what a zstd frame begins with (RFC 8878, 3.1.1)


class Lines:
    """The lines of a file, found once and then read by their number, blank ones left out.

    `scan` looks for more of them; only where each begins is kept in memory. The last line counts even
    without a newline, as a crash leaves it, and is found anew as it grows. A compressed file is unpacked into
    a temporary one as it is scanned. cuts: how often the file was found shorter than it had been.

    Raises:
        OSError: the file cannot be opened, or read.
        MissingExtra: it is compressed, and zstandard is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = path.open("rb", buffering=0)
        self.inode = os.fstat(self._source.fileno()).st_ino
        self._unpacked = _Unpacked(self._source) if path.suffix == ZSTD else None
        self._file: BinaryIO = self._source if self._unpacked is None else self._unpacked.file
        self.cuts = 0
        self._begin()

    def _begin(self) -> None:
        self._starts, self._ends, self._numbers = array("Q"), array("Q"), array("Q")
        self._scanned = self._line = 0
        self._open_start = 0
        self._has_tail = False

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def scanned(self) -> float:
        """How much of the file has been looked at, from 0 to 1."""
        size = os.fstat(self._source.fileno()).st_size
        done = self._scanned if self._unpacked is None else self._unpacked.read
        return 1.0 if size == 0 else min(1.0, done / size)

    def number(self, index: int) -> int:
        """The number of a line in its file, from 1."""
        return self._numbers[index]

    def size(self, index: int) -> int:
        """How many bytes a line has."""
        return self._ends[index] - self._starts[index]

    def read(self, index: int, limit: int | None = None) -> bytes:
        """Read a line, or its first bytes.

        Raises:
            OSError: the file cannot be read any more.
        """
        size = self.size(index)
        return _read_at(self._file, self._starts[index], size if limit is None else min(size, limit))

    def scan(self, budget: int | None = None) -> bool:
        """Look for more lines in the next `budget` bytes, or in all there are; whether any were looked at.

        What has been cut off, or written anew in place, is looked at from the beginning.

        Raises:
            OSError: the file cannot be read any more.
        """
        came = self._unpacked is not None and self._unpacked.more(budget)
        end = os.fstat(self._file.fileno()).st_size
        if end < self._scanned:
            self.cuts += 1
            self._begin()
        stop = end if budget is None else min(end, self._scanned + budget)
        if self._scanned >= stop:
            return came
        if self._has_tail:
            self._drop_tail()
        while self._scanned < stop:
            chunk = _read_at(self._file, self._scanned, min(_CHUNK, stop - self._scanned))
            if not chunk:
                break
            self._add(chunk)
        if self._scanned >= end and self._open_start < end:
            self._keep(self._open_start, end)
            self._has_tail = True
        return True

    def _add(self, chunk: bytes) -> None:
        begin = 0
        while (found := chunk.find(b"\n", begin)) >= 0:
            self._keep(self._open_start, self._scanned + found)
            self._open_start = self._scanned + found + 1
            begin = found + 1
        self._scanned += len(chunk)

    def _keep(self, start: int, end: int) -> None:
        self._line += 1
        if end > start:
            self._starts.append(start)
            self._ends.append(end)
            self._numbers.append(self._line)

    def _drop_tail(self) -> None:
        self._has_tail = False
        self._line -= 1
        for kept in (self._starts, self._ends, self._numbers):
            kept.pop()

    def close(self) -> None:
        """Close the file."""
        self._source.close()
        if self._unpacked is not None:
            self._unpacked.file.close()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    pieces: list[bytes] = []
    while size > 0 and (piece := os.pread(file.fileno(), size, offset)):
        pieces.append(piece)
        offset += len(piece)
        size -= len(piece)
    return b"".join(pieces)


class _Unpacked:
    """A compressed file, unpacked into a temporary one as far as it has been asked for.

    A frame that is cut, as by a crash, ends there with what of it can be read, and a newline; the next frame
    goes on behind it. read: bytes of the compressed file.
    """

    def __init__(self, source: BinaryIO) -> None:
        self._zstd = require_zstd("A dump in .zst")
        self._source = source
        self.file: BinaryIO = tempfile.TemporaryFile(prefix="records-", buffering=0)  # noqa: SIM115  see close
        self.read = 0
        self._frame: Any = None
        self._frame_start = 0
        self._is_lost = False

    def more(self, budget: int | None) -> bool:
        """Unpack about as many bytes of the compressed file, or all that are there; whether any were read."""
        end = os.fstat(self._source.fileno()).st_size
        if end < self.read:  # written anew
            self.file.truncate(0)
            self.read, self._frame, self._is_lost = 0, None, False
        began = self.read
        stop = end if budget is None else min(end, began + max(budget, len(_FRAME)))
        while self.read < stop:
            data = _read_at(self._source, self.read, min(_CHUNK, stop - self.read))
            if not data:
                break  # it was cut off meanwhile
            if self._is_lost:
                self._find(data)
                if len(data) < len(_FRAME):
                    break
            else:
                self._unpack(data)
        return self.read != began

    def _find(self, data: bytes) -> None:
        """Look for the next frame, whose mark may begin in the last bytes."""
        found = data.find(_FRAME)
        self._is_lost = found < 0
        self.read += found if found >= 0 else max(0, len(data) - len(_FRAME) + 1)

    def _unpack(self, data: bytes) -> None:
        if self._frame is None:
            self._frame, self._frame_start = self._zstd.ZstdDecompressor().decompressobj(), self.read
        try:
            _write(self.file, self._frame.decompress(data))
        except self._zstd.ZstdError:
            _write(self.file, b"\n")
            self.read, self._frame, self._is_lost = self._frame_start + 1, None, True
            return
        self.read += len(data)
        if self._frame.eof:
            self.read -= len(self._frame.unused_data)
            self._frame = None


def _write(file: BinaryIO, data: bytes) -> None:
    """Append to a file that may be read elsewhere at the same time."""
    offset = os.fstat(file.fileno()).st_size
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written
