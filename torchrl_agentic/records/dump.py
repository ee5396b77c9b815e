"""Read dumps of trajectories: a folder with a file per training step, or one file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic_core

from torchrl_agentic.messages import JSON
from torchrl_agentic.records.group_record import GROUPS
from torchrl_agentic.records.jsonl_index import Allowance, JsonlIndex
from torchrl_agentic.records.record import BadLine, Summary, TrajectoryRecord
from torchrl_agentic.records.record_json import record_from_json, summary_from_json
from torchrl_agentic.records.recorder import SUFFIXES
from torchrl_agentic.text import MAX_LINE_DEPTH, TooDeepError, read_json

_UNREADABLE = (
    ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
_HEAD = 4096  # bytes that nearly always contain the summary of a trajectory
TIMELINE = "timeline.jsonl"
"""Name of the file of a folder that has the timelines of its batches, and no trajectories."""
MAX_LINE_BYTES = 256 << 20
"""Default for the longest line that is read, which includes the images that a model was shown, in bytes."""


class DumpFile:
    """The trajectories of one file, in its order.

    The file is opened by the first `scan`. It may grow, shrink or vanish while a program runs.

    Args:
        path: The file.
        allowance: Limit on unpacked bytes, shared by compressed files.
        max_line_bytes: Longest line that is read, in bytes.

    Attributes:
        path: The file.
        name: Name of the file without its suffixes.
        step: The name as a number, or None if it is not one.
    """

    def __init__(
        self, path: Path, *, allowance: Allowance | None = None, max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        self.path = path
        self.allowance, self.max_line_bytes = allowance or Allowance(), max_line_bytes
        self.name = path.name.removesuffix(".zst").removesuffix(".jsonl")
        self.step = int(self.name) if self.name.isascii() and self.name.isdigit() else None
        self._lines: JsonlIndex | None = None
        self._opened = 0
        self._summaries: dict[tuple[int, int, int], Summary | BadLine] = {}

    def scan(self, budget: int | None = None) -> bool:
        """Look for more trajectories.

        Args:
            budget: Number of bytes to look at; None for all.

        Returns:
            Whether any bytes were looked at.

        Raises:
            OSError: If the file is gone or cannot be read; `DumpTooLarge` if it is larger than allowed.
            MissingExtra: If the file is compressed and zstandard is not installed.
        """
        if self._lines is not None and self._is_another():
            self.close()
        if self._lines is None:
            self._lines = JsonlIndex(self.path, self.allowance)
            self._opened += 1
        return self._lines.scan(budget)

    def _is_another(self) -> bool:
        """Return whether another file has replaced the open one."""
        assert self._lines is not None
        return os.stat(self.path).st_ino != self._lines.inode

    def __len__(self) -> int:
        """Return the number of trajectories scanned so far."""
        return 0 if self._lines is None else len(self._lines)

    @property
    def scanned(self) -> float:
        """Part of the file that has been scanned, from 0 to 1."""
        return 0.0 if self._lines is None else self._lines.scanned

    @property
    def beginnings(self) -> int:
        """Number of times that the file was opened, replaced or cut, so that trajectories got new numbers."""
        return self._opened + (0 if self._lines is None else self._lines.cuts)

    def size(self, index: int) -> int:
        """Return the number of bytes of a trajectory."""
        return self._known.size(index)

    def line(self, index: int, limit: int | None = None) -> bytes:
        """Read the bytes of a trajectory.

        Args:
            index: Number of the trajectory in the file, from 0.
            limit: Number of bytes to read; None for all.

        Raises:
            OSError: If the file can no longer be read.
        """
        return self._known.read(index, limit)

    def summary(self, index: int) -> Summary | BadLine:
        """Read the summary of a trajectory. If a `Recorder` wrote it, its first bytes are enough.

        Raises:
            OSError: If the file can no longer be read.
        """
        lines = self._known
        key = (lines.cuts, index, lines.size(index))
        if key not in self._summaries:
            self._summaries[key] = self._summary(index)
        return self._summaries[key]

    def _summary(self, index: int) -> Summary | BadLine:
        lines = self._known
        try:
            head = lines.read(index, _HEAD)
            found = summary_from_json(pydantic_core.from_json(head, allow_partial="trailing-strings"))
        except _UNREADABLE:
            found = None
        if found is not None and found.request_id:
            return found
        record = self.record(index)
        return record if isinstance(record, BadLine) else record.summary

    def record(self, index: int) -> TrajectoryRecord | BadLine:
        """Read a trajectory; a line longer than `max_line_bytes` is a `BadLine`.

        Raises:
            OSError: If the file can no longer be read.
        """
        lines = self._known
        if (size := lines.size(index)) > self.max_line_bytes:
            return BadLine(
                lines.number(index),
                f"the line has {size:,} bytes, more than max_line_bytes={self.max_line_bytes:,}: pass a "
                "larger limit to Dump or read_records",
            )
        return read_line(lines.read(index), lines.number(index))

    def records(self) -> Iterator[TrajectoryRecord | BadLine]:
        """Scan the whole file and yield its trajectories, one by one. Raises the errors of `scan`."""
        self.scan()
        for index in range(len(self)):
            yield self.record(index)

    @property
    def _known(self) -> JsonlIndex:
        if self._lines is None:
            raise IndexError(f"{self.path} has not been scanned: call scan() first")
        return self._lines

    def close(self) -> None:
        """Close the file and forget its index."""
        if self._lines is not None:
            self._lines.close()
            self._opened += self._lines.cuts
        self._lines = None
        self._summaries.clear()

    def __repr__(self) -> str:
        return f"DumpFile({str(self.path)!r})"


class Dump:
    """The files of a dump, in the order of their steps; files whose names are not numbers come last.

    Use it as a context manager, or close it.

    >>> with Dump("rollouts") as dump:
    ...     for file in dump.files:
    ...         file.scan()
    ...         print(file.name, [file.summary(i).score for i in range(len(file))])

    Args:
        path: A folder with a file per step, or one file.
        max_unpacked_bytes: Largest number of bytes that a compressed file may unpack to, into a temporary
            file, and all open files together. None means 1 GiB, or 100 times their size if that is more.
        max_line_bytes: Longest line that is read, in bytes; a longer one is a `BadLine`.

    Attributes:
        path: The folder or file.
        files: Its files.

    Raises:
        FileNotFoundError: If the folder or file does not exist.
        ValueError: If the folder has no .jsonl or .jsonl.zst files, or a limit is below 1.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_unpacked_bytes: int | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        bounds = {"max_unpacked_bytes": max_unpacked_bytes, "max_line_bytes": max_line_bytes}
        for name, bound in bounds.items():
            if bound is not None and bound < 1:
                raise ValueError(f"{name} must be 1 or more; got {bound}")
        self._bounds: dict[str, Any] = {
            "allowance": Allowance(max_unpacked_bytes), "max_line_bytes": max_line_bytes,
        }  # fmt: skip
        self.path = Path(path)
        self.files: list[DumpFile] = []
        self.refresh()
        if not self.files:
            raise ValueError(f"the folder {self.path} holds no {' or '.join(SUFFIXES)} files")

    def refresh(self) -> bool:
        """Look for new files, and drop those that are gone. Return whether anything changed."""
        paths = [self.path] if self.path.is_file() else _files(self.path)
        known = {file.path: file for file in self.files}
        for gone in known.keys() - set(paths):
            known[gone].close()
        before = self.files
        self.files = [known[path] if path in known else DumpFile(path, **self._bounds) for path in paths]
        return before != self.files

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Dump:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _files(folder: Path) -> list[Path]:
    found = [
        path
        for path in folder.iterdir()
        if path.name.endswith(SUFFIXES) and path.name not in (TIMELINE, GROUPS) and path.is_file()
    ]

    def order(path: Path) -> tuple[bool, int, str]:
        step = DumpFile(path).step
        return (step is None, step or 0, path.name)

    return sorted(found, key=order)


def read_records(
    path: str | Path, *, max_unpacked_bytes: int | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[TrajectoryRecord | BadLine]:
    """Read a dump, trajectory by trajectory.

    Args:
        path: A folder with a file per step, or one file.
        max_unpacked_bytes: See `Dump`; one file is open at a time.
        max_line_bytes: See `Dump`.

    Returns:
        An iterator over the trajectories; `BadLine` for a line that cannot be read.

    Raises:
        FileNotFoundError: If the folder or file does not exist.
        DumpTooLarge: If a compressed file unpacks to more than allowed, or a file has too many lines.
        ValueError: If the folder has no .jsonl or .jsonl.zst files.
        MissingExtra: If a file is compressed and zstandard is not installed.
    """
    with Dump(path, max_unpacked_bytes=max_unpacked_bytes, max_line_bytes=max_line_bytes) as dump:
        for file in dump.files:
            yield from file.records()
            file.close()


def read_line(line: bytes, number: int = 1) -> TrajectoryRecord | BadLine:
    """Read a line of a dump. Invalid UTF-8 is kept as lone surrogates, as in Python's file names.

    Args:
        line: The line, without its newline.
        number: Number of the line in its file, for the `BadLine`.

    Returns:
        The trajectory, or a `BadLine` if it cannot be read.
    """
    try:
        return record_from_json(_parsed(line))
    except _UNREADABLE as error:
        return BadLine(number, _reason(line, error))


def _parsed(line: bytes) -> JSON:
    try:
        return pydantic_core.from_json(line)
    except ValueError:  # lone surrogates, invalid UTF-8, or more than 200 levels
        return read_json(line.decode("utf-8", "surrogateescape"), max_depth=MAX_LINE_DEPTH)


def _reason(line: bytes, error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError) and line[:1] == b"{" and line[-1:] != b"}":
        return f"the line was cut off after {len(line)} bytes, as by a crash"
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    if isinstance(error, TooDeepError):
        return str(error)
    return f"{type(error).__name__}: {error}"
