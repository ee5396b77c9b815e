"""Calls of tools and what came of them, in a file that they can be replayed from."""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.private_files import PRIVATE, check_mode, make_folders, open_file
from torchrl_agentic.tools.row_data import local_name
from torchrl_agentic.tools.wrap.encoding import Outcome, canonical
from torchrl_agentic.tools.wrap.entries import Entry, entry_line, nearest, read_entries, read_entry

_Key: TypeAlias = tuple[str, str, str | None]


class Cassette:
    """Calls of tools in a file of JSON lines: appended by `Recorded`, read by `Replayed`.

    Lines are written each in one piece: several tools, threads and processes may write to one file, and a
    crash loses no more than the line it broke, which is passed over. What is there already stays; delete the
    file to begin anew. When it is first read, all of it is kept in memory.

    Trajectories go by their names within their environment, so that another environment can replay them.

    Args:
        path: The file.
        scope: Tells apart environments that share a file; a replay needs the same one.
        mode: Permissions of the file if it is created, whatever the umask is; who may read it may enter the
            folders that are created for it. What is there keeps its own.

    Raises:
        TypeError: If `mode` is no integer.
        ValueError: If `mode` is no permissions of a file.
    """

    def __init__(self, path: str | Path, *, scope: str = "", mode: int = PRIVATE) -> None:
        check_mode("mode", mode)
        self.path = Path(path)
        self.scope = scope
        self.mode = mode
        self._lock = threading.Lock()
        self._file: int | None = None
        self._tape: _Tape | None = None

    def append(
        self,
        trajectory: str,
        tool: str,
        call_id: str,
        args: Mapping[str, JSON],
        outcome: Outcome,
        seconds: float,
    ) -> None:
        """Write down a call and what came of it."""
        line = entry_line(self._named(trajectory), tool, call_id, args, outcome, seconds)
        with self._lock:
            if self._file is None:
                self._file = _open(self.path, self.mode)
            _write(self._file, line)
            if self._tape is not None:
                self._tape.add(read_entry(json.loads(line)))

    def find(
        self, trajectory: str, tool: str, call_id: str, args: Mapping[str, JSON], used: Collection[int] = ()
    ) -> int | None:
        """Find a call that is not among those used: the one of this id, else the next with such arguments."""
        tape, key = self._read(), (self._named(trajectory), tool, canonical(args))
        numbers = [number for number in tape.numbers.get(key, ()) if number not in used]
        own = (number for number in numbers if tape.entries[number].call_id == call_id)
        return next(own, numbers[0] if numbers else None)

    def nearest(self, trajectory: str, tool: str, args: Mapping[str, JSON]) -> Entry | None:
        """Find what was recorded and comes nearest: of this trajectory and tool if there is any."""
        return nearest(self._read().entries, self._named(trajectory), tool, canonical(args) or "")

    def __getitem__(self, number: int) -> Entry:
        return self._read().entries[number]

    def __len__(self) -> int:
        return len(self._read().entries)

    def close(self) -> None:
        """Close the file; a call that is recorded later opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _named(self, trajectory: str) -> str:
        name = local_name(trajectory)
        return f"{self.scope}/{name}" if self.scope else name

    def _read(self) -> _Tape:
        if self._tape is None:
            with self._lock:
                if self._tape is None:
                    self._tape = _Tape(read_entries(self.path))
        return self._tape

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (os.fspath(self.path), self.scope, self.mode))

    def __repr__(self) -> str:
        return f"Cassette({os.fspath(self.path)!r}, scope={self.scope!r})"


class _Tape:
    """What is on a cassette: its entries in their order, and where to find them."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: list[Entry] = []
        self.numbers: defaultdict[_Key, list[int]] = defaultdict(list)
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.numbers[entry.trajectory, entry.tool, entry.args].append(len(self.entries) - 1)


def _open(path: Path, mode: int) -> int:
    """Open a file to append to, behind a newline if a crash has left its last line without one."""
    make_folders(path.parent, mode)
    file = open_file(path, os.O_RDWR | os.O_APPEND, mode)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        _write(file, b"\n")
    return file


def _write(file: int, data: bytes) -> None:
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, data[written:])


def _rebuild(path: str, scope: str, mode: int) -> Cassette:
    return Cassette(path, scope=scope, mode=mode)
