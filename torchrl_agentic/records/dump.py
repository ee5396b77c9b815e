"""A dump of trajectories: a folder with a file per training step, or one file, read where it is looked at."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic_core

from torchrl_agentic.messages import JSON
from torchrl_agentic.records.codec import record_from_json, summary_from_json
from torchrl_agentic.records.jsonl_index import Allowance, Lines
from torchrl_agentic.records.record import BadLine, Summary, TrajectoryRecord
from torchrl_agentic.records.recorder import SUFFIXES
from torchrl_agentic.text import MAX_LINE_DEPTH, TooDeepError, read_json

_UNREADABLE = (
    ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
_HEAD = 4096  # bytes in which the summary of a trajectory nearly always lies
MAX_LINE_BYTES = 256 << 20
"""The longest line that is read: the images that a model was shown are in it."""


class DumpFile:
    """The trajectories of one file, in its order.

    step: the number that its name is, else the name. It is opened with the first look. While a program runs
    the file may grow, shrink or vanish: `scan` says so. allowance: what compressed files that share it may
    unpack to. max_line_bytes: see `Dump`.
    """

    def __init__(
        self, path: Path, *, allowance: Allowance | None = None, max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        self.path = path
        self.allowance, self.max_line_bytes = allowance or Allowance(), max_line_bytes
        self.name = path.name.removesuffix(".zst").removesuffix(".jsonl")
        self.step = int(self.name) if self.name.isascii() and self.name.isdigit() else None
        self._lines: Lines | None = None
        self._opened = 0
        self._summaries: dict[tuple[int, int, int], Summary | BadLine] = {}

    def scan(self, budget: int | None = None) -> bool:
        """Look for more trajectories in the next `budget` bytes, or in all there are; whether any came.

        Raises:
            OSError: the file is gone, or cannot be read; `DumpTooLarge` if it is larger than is allowed.
            MissingExtra: it is compressed, and zstandard is not installed.
        """
        if self._lines is not None and self._is_another():
            self.close()
        if self._lines is None:
            self._lines = Lines(self.path, self.allowance)
            self._opened += 1
        return self._lines.scan(budget)

    def _is_another(self) -> bool:
        """Whether another file has taken the place of the one that is open."""
        assert self._lines is not None
        return os.stat(self.path).st_ino != self._lines.inode

    def __len__(self) -> int:
        """How many there are, as far as has been scanned."""
        return 0 if self._lines is None else len(self._lines)

    @property
    def scanned(self) -> float:
        """How much of the file has been scanned, from 0 to 1."""
        return 0.0 if self._lines is None else self._lines.scanned

    @property
    def beginnings(self) -> int:
        """How often it was begun: when opened, replaced by another file, or cut. Numbers change then."""
        return self._opened + (0 if self._lines is None else self._lines.cuts)

    def size(self, index: int) -> int:
        """How many bytes a trajectory has."""
        return self._known.size(index)

    def line(self, index: int, limit: int | None = None) -> bytes:
        """Read the bytes of a trajectory, or its first ones.

        Raises:
            OSError: the file cannot be read any more.
        """
        return self._known.read(index, limit)

    def summary(self, index: int) -> Summary | BadLine:
        """Read what lists show of a trajectory: from its first bytes, where it was written by a `Recorder`.

        Raises:
            OSError: the file cannot be read any more.
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
        """Read a trajectory; a line longer than `max_line_bytes` is not read.

        Raises:
            OSError: the file cannot be read any more.
        """
        lines = self._known
        if (size := lines.size(index)) > self.max_line_bytes:
            return BadLine(
                lines.number(index),
                f"it has {size:,} bytes, more than max_line_bytes={self.max_line_bytes:,}: give Dump or "
                "read_records a larger one",
            )
        return read_line(lines.read(index), lines.number(index))

    def records(self) -> Iterator[TrajectoryRecord | BadLine]:
        """Look for all there is, and read it, trajectory by trajectory; raises what `scan` does."""
        self.scan()
        for index in range(len(self)):
            yield self.record(index)

    @property
    def _known(self) -> Lines:
        if self._lines is None:
            raise IndexError("nothing is known of the file before scan()")
        return self._lines

    def close(self) -> None:
        """Close the file, and forget what is known of it."""
        if self._lines is not None:
            self._lines.close()
            self._opened += self._lines.cuts
        self._lines = None
        self._summaries.clear()

    def __repr__(self) -> str:
        return f"DumpFile({str(self.path)!r})"


class Dump:
    """The files of a dump, in the order of their steps; those whose names are no numbers last.

    Use it as a context manager, or close it.

    >>> with Dump("rollouts") as dump:
    ...     for file in dump.files:
    ...         file.scan()
    ...         print(file.name, [file.summary(i).score for i in range(len(file))])

    Args:
        path: A folder with a file per step, or one file.
        max_unpacked_bytes: The most bytes that a compressed file may unpack to, into a temporary file, and
            that all files which are open may together; None: 1 GiB, or 100 times their size if that is more.
        max_line_bytes: The most bytes of a line; a longer one is a `BadLine`.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: it is a folder without any .jsonl or .jsonl.zst, or a bound is below 1.
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
            raise ValueError(f"{self.path} holds no {' or '.join(SUFFIXES)} files")

    def refresh(self) -> bool:
        """Look for files that came, and leave out those that are gone; whether that changed anything."""
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
    found = [path for path in folder.iterdir() if path.name.endswith(SUFFIXES) and path.is_file()]

    def order(path: Path) -> tuple[bool, int, str]:
        step = DumpFile(path).step
        return (step is None, step or 0, path.name)

    return sorted(found, key=order)


def read_records(
    path: str | Path, *, max_unpacked_bytes: int | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[TrajectoryRecord | BadLine]:
    """Read a dump, a folder or a file, trajectory by trajectory; a line that cannot be read is reported.

    Args:
        path: A folder with a file per step, or one file.
        max_unpacked_bytes: See `Dump`; one file is open at a time.
        max_line_bytes: See `Dump`.

    Returns:
        An iterator over the trajectories; `BadLine` for a line that cannot be read.

    Raises:
        FileNotFoundError: there is no such folder or file.
        DumpTooLarge: a compressed file unpacks to more than is allowed, or a file has too many lines.
        ValueError: it is a folder without any .jsonl or .jsonl.zst.
        MissingExtra: it is compressed, and zstandard is not installed.
    """
    with Dump(path, max_unpacked_bytes=max_unpacked_bytes, max_line_bytes=max_line_bytes) as dump:
        for file in dump.files:
            yield from file.records()
            file.close()


def read_line(line: bytes, number: int = 1) -> TrajectoryRecord | BadLine:
    """Read a line of a dump. What is no UTF-8 is kept as lone surrogates, as Python reads file names."""
    try:
        return record_from_json(_parsed(line))
    except _UNREADABLE as error:
        return BadLine(number, _reason(line, error))


def _parsed(line: bytes) -> JSON:
    try:
        return pydantic_core.from_json(line)
    except ValueError:  # halves of surrogate pairs, what is no UTF-8, and more than 200 levels
        return read_json(line.decode("utf-8", "surrogateescape"), max_depth=MAX_LINE_DEPTH)


def _reason(line: bytes, error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError) and line[:1] == b"{" and line[-1:] != b"}":
        return f"it was cut off after {len(line)} bytes, as a crash leaves it"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, TooDeepError):
        return str(error)
    return f"{type(error).__name__}: {error}"
