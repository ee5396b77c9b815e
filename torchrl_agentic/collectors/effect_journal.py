"""`EffectJournal`: a file with the turns in which calls with effects ran, which survives the process."""

from __future__ import annotations

import bisect
import fcntl
import json
import logging
import os
import uuid
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torchrl_agentic.errors import InfrastructureError

if TYPE_CHECKING:
    from torchrl_agentic.dispatch.resolve import BoundTool

logger = logging.getLogger(__name__)

_FORMAT = "torchrl_agentic effects 1"
_CHUNK = 1 << 20


class EffectJournal:
    """A file that gets a line before the calls of a turn run that have effects.

    A line is written by one system call before the calls start, so that it survives the death of the process,
    SIGKILL included. It is not flushed to the disk: if the whole machine fails, the lines of its last seconds
    may be lost. The file only grows, about 50 bytes per turn; delete it when its run is over, and no earlier
    than the states that were saved with it.

    One process at a time has a file open.

    Args:
        path: The file; created if it is missing.

    Attributes:
        path: The file.
        key: Id of the file, by which a state knows the journal that it was saved with.

    Raises:
        ValueError: If the file is something else than a journal.
        RuntimeError: If another process has it open.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._file)
        try:
            try:
                # The lock ends with the process, whatever its children do. Closing any other handle of this
                # file would end it too, so that all reads use this one.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RuntimeError(
                    f"{self.path} is open in another process: end the run that uses it, or name another file"
                ) from error
            self.key, self._last = self._read()
            self._names: list[str] | None = None
        except BaseException:
            self.close()
            raise

    def _read(self) -> tuple[str, dict[str, int]]:
        """Return the id of the file, and the last turn with effects by trajectory."""
        text = b"".join(iter(_Reader(self._file), b""))
        if not text:
            key = uuid.uuid4().hex
            self._write([_FORMAT, key])
            return key, {}
        first, *lines = text.split(b"\n")
        found = _parsed(first)
        if found is None or found[0] != _FORMAT or not isinstance(found[1], str):
            raise ValueError(f"{self.path} is no journal of effects: name another file")
        if lines[-1:] != [b""]:
            os.write(self._file, b"\n")  # behind a line that was cut off
        last: dict[str, int] = {}
        for line in filter(None, lines):
            mark = _parsed(line)
            if mark is None or not isinstance(mark[0], str) or not isinstance(mark[1], int):
                logger.warning("%s: a line was cut off: %r", self.path, line[:80])
                continue
            last[mark[0]] = max(mark[1], last.get(mark[0], -1))
        return found[1], last

    def mark(self, trajectory: str, turn: int) -> None:
        """Note that calls with effects are about to run.

        Args:
            trajectory: Name of the trajectory.
            turn: Number of the turn, counted from 0.

        Raises:
            InfrastructureError: If it cannot be written, so that the calls must not run.
        """
        try:
            self._write([trajectory, turn])
        except OSError as error:
            raise InfrastructureError(f"the journal {self.path} cannot be written: {error}") from error

    def _write(self, line: Sequence[Any]) -> None:
        if not self._close.alive:  # the number of the handle may belong to another file now
            raise OSError("it is closed")
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, data) != len(data):
            raise OSError("only a part of a line was written")

    def last_turn(self, trajectory: str) -> int | None:
        """Return the last turn with effects that an earlier process noted; None without one."""
        return self._last.get(trajectory)

    def names(self, start: str) -> list[str]:
        """Return the trajectories that an earlier process noted, those whose names begin with a text.

        Args:
            start: The text.
        """
        if self._names is None:
            self._names = sorted(self._last)
        first = last = bisect.bisect_left(self._names, start)
        while last < len(self._names) and self._names[last].startswith(start):
            last += 1
        return self._names[first:last]

    def close(self) -> None:
        """Close the file; may be called again."""
        self._close()


class _Reader:
    """Reads a file from its start, piece by piece."""

    def __init__(self, file: int) -> None:
        self._file, self._place = file, 0

    def __call__(self) -> bytes:
        data = os.pread(self._file, _CHUNK, self._place)
        self._place += len(data)
        return data


def _parsed(line: bytes) -> list[Any] | None:
    """Return a line with two values; None for anything else."""
    try:
        found: object = json.loads(line)
    except ValueError:
        return None
    pair = cast("list[Any]", found) if isinstance(found, list) else []
    return pair if len(pair) == 2 else None


def may_have_effects(tools: Collection[BoundTool], allowed: frozenset[str] | None) -> bool:
    """Return True if one of the tools that a trajectory may use has effects.

    Args:
        tools: All tools.
        allowed: Names of the tools that it may use; None for all.
    """
    return any(one.effects.may_change for one in tools if allowed is None or one.tool.name in allowed)
