"""`JsonlIndex`, the lines of a file that may be larger than memory, and may change while it is read."""

from __future__ import annotations

import errno
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any, BinaryIO

from torchrl_agentic.records.line_writer import ZSTD, require_zstd

_CHUNK = 4 << 20
_FRAME = b"\x28\xb5\x2f\xfd"  # magic number of a zstd frame (RFC 8878, 3.1.1)
_PIECE = 1 << 11  # unpacks to at most 64 MiB: 128 KiB for each block of 4 bytes
UNPACKED_BYTES, UNPACKED_TIMES = 1 << 30, 100
"""Default limit: a compressed file may unpack to this many bytes, or this many times its size if larger."""
MAX_LINES = 1 << 24
"""Largest number of lines of a file; each takes 24 bytes of memory."""


class DumpTooLarge(OSError):
    """A file of a dump has more lines, or unpacks to more bytes, than allowed."""


class Allowance:
    """Limit on the unpacked bytes of all open compressed files together.

    Args:
        max_bytes: Largest number of unpacked bytes; None for 1 GiB, or 100 times their size if that is more.

    Attributes:
        packed: Number of bytes of the open compressed files.
        unpacked: Number of bytes of their temporary files.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.packed = self.unpacked = 0

    def most(self, packed: int) -> int:
        """Return how many bytes files of a compressed size may unpack to."""
        return max(UNPACKED_BYTES, UNPACKED_TIMES * packed) if self.max_bytes is None else self.max_bytes


class JsonlIndex:
    """The lines of a file, found once and then read by their number. Blank lines are left out.

    `scan` looks for more lines; only their positions are kept in memory. The last line counts even without a
    newline, as a crash leaves it, and is found again as it grows. A compressed file is unpacked into a
    temporary one as it is scanned.

    Args:
        path: The file.
        allowance: Limit on unpacked bytes of a compressed file, alone and together with others.

    Attributes:
        cuts: Number of times the file was found shorter than before.

    Raises:
        OSError: If the file cannot be opened or read.
        MissingExtra: If the file is compressed and zstandard is not installed.
    """

    def __init__(self, path: Path, allowance: Allowance | None = None) -> None:
        self.path = path
        allowance = allowance or Allowance()
        self._source = path.open("rb", buffering=0)
        self.inode = os.fstat(self._source.fileno()).st_ino
        is_packed = path.suffix == ZSTD
        self._unpacked = _Unpacked(path, self._source, allowance) if is_packed else None
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
        """Part of the file that has been scanned, from 0 to 1."""
        size = os.fstat(self._source.fileno()).st_size
        done = self._scanned if self._unpacked is None else self._unpacked.read
        return 1.0 if size == 0 else min(1.0, done / size)

    def number(self, index: int) -> int:
        """Return the number of a line in its file, from 1."""
        return self._numbers[index]

    def size(self, index: int) -> int:
        """Return the number of bytes of a line."""
        return self._ends[index] - self._starts[index]

    def read(self, index: int, limit: int | None = None) -> bytes:
        """Read a line.

        Args:
            index: Number of the line among those that are not blank, from 0.
            limit: Number of bytes to read; None for all.

        Raises:
            OSError: If the file can no longer be read.
        """
        size = self.size(index)
        return _read_at(self._file, self._starts[index], size if limit is None else min(size, limit))

    def scan(self, budget: int | None = None) -> bool:
        """Look for more lines. A file that was cut or rewritten in place is scanned from the beginning.

        Args:
            budget: Number of bytes to look at; None for all.

        Returns:
            Whether any bytes were looked at.

        Raises:
            DumpTooLarge: If the file has too many lines, or unpacks to too many bytes.
            OSError: If the file can no longer be read.
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
        if len(self._starts) > MAX_LINES:
            raise DumpTooLarge(
                errno.EFBIG,
                f"the file has more than {MAX_LINES:,} lines: split it into several files",
                str(self.path),
            )

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
            self._unpacked.close()

    def __enter__(self) -> JsonlIndex:
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
    """A compressed file, unpacked into a temporary one as far as it was asked for.

    A damaged frame, as a crash leaves it, ends after its readable part with a newline; the next frame
    follows.

    Attributes:
        read: Number of bytes read from the compressed file.
    """

    def __init__(self, path: Path, source: BinaryIO, allowance: Allowance) -> None:
        zstd = require_zstd("A dump in .zst")
        self._error: type[Exception] = zstd.ZstdError
        self._decompressor: Any = zstd.ZstdDecompressor()
        self._path = path
        self._source = source
        self._allowance = allowance
        self._packed = self._size = 0  # sizes that the allowance includes
        self.file: BinaryIO = tempfile.TemporaryFile(prefix="records-", buffering=0)  # noqa: SIM115  closed by `close`
        self._waiting: list[bytes] = []
        self._begin()

    def _begin(self) -> None:
        self.file.truncate(0)
        self._waiting.clear()
        self._count(self._packed, 0)
        self.read = self._written = 0
        self._frame: Any = None
        self._frame_start = 0
        self._is_lost = False
        self._excess = ""  # why the file is too large

    def _count(self, packed: int, size: int) -> None:
        """Update the allowance with the sizes of the compressed and the unpacked file."""
        self._allowance.packed += packed - self._packed
        self._allowance.unpacked += size - self._size
        self._packed, self._size = packed, size

    def more(self, budget: int | None) -> bool:
        """Unpack about `budget` more bytes of the compressed file, or all. Return whether any were read.

        Raises:
            DumpTooLarge: If it unpacks to more than allowed.
        """
        end = os.fstat(self._source.fileno()).st_size
        if end < self.read:  # the file was rewritten
            self._begin()
        self._count(end, self._size)
        if self._excess:
            raise self._too_large()
        stop = end if budget is None else min(end, self.read + max(budget, len(_FRAME)))
        came = False
        try:
            while self.read < stop:
                before = (self.read, self._is_lost)
                data = _read_at(self._source, self.read, min(_CHUNK, stop - self.read))
                self._unpack(data)
                if self._excess:
                    raise self._too_large()
                if before == (self.read, self._is_lost):
                    break  # too few bytes, or the file was cut off meanwhile
                came = True
        finally:
            self._write()
        return came

    def _too_large(self) -> DumpTooLarge:
        return DumpTooLarge(
            errno.EFBIG,
            f"{self._excess}: if you trust the file, unpack it with 'zstd -d', or "
            "pass a larger max_unpacked_bytes to Dump or read_records",
            str(self._path),
        )

    def _unpack(self, data: bytes) -> None:
        """Unpack some bytes, and look for the next frame after a damaged one."""
        view, began, at = memoryview(data), self.read, 0
        while 0 <= at < len(data) and not self._excess:
            if self._is_lost:
                found = data.find(_FRAME, at)
                self._is_lost = found < 0
                at = max(at, len(data) - len(_FRAME) + 1) if found < 0 else found
                if self._is_lost:
                    break
            if self._frame is None:
                self._frame, self._frame_start = self._decompressor.decompressobj(), began + at
            piece = view[at : at + _PIECE]
            try:
                self._add(self._frame.decompress(piece))
            except self._error:
                self._add(b"\n")
                self._frame, self._is_lost = None, True
                at = self._frame_start + 1 - began  # the frame may have begun in earlier bytes
                continue
            at += len(piece)
            if self._frame.eof:
                at -= len(self._frame.unused_data)
                self._frame = None
        self.read = began + at

    def _add(self, data: bytes) -> None:
        size, all_files = self._size + len(data), self._allowance
        if size > (most := all_files.most(self._packed)):
            self._excess = f"the {self._packed:,} bytes of the file unpack to more than {most:,}"
            return
        if all_files.unpacked + len(data) > (most := all_files.most(all_files.packed)):
            self._excess = (
                f"the file and the other open files of the dump unpack to more than {most:,} bytes together"
            )
            return
        self._waiting.append(data)
        self._count(self._packed, size)
        if self._size - self._written >= _CHUNK:
            self._write()

    def _write(self) -> None:
        data = memoryview(b"".join(self._waiting))
        self._waiting.clear()
        while data:
            written = os.pwrite(self.file.fileno(), data, self._written)
            data, self._written = data[written:], self._written + written

    def close(self) -> None:
        """Close the temporary file, and take it out of the allowance."""
        self.file.close()
        self._count(0, 0)
