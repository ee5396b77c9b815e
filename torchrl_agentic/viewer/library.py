"""`Library`: a dump that is read in the background while it is viewed, and while it grows."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from torchrl_agentic.records import BadLine, Dump, Groups
from torchrl_agentic.text import printable
from torchrl_agentic.viewer.layout import Needle
from torchrl_agentic.viewer.listing import NO_MASK, Listing, blocks_of, matches
from torchrl_agentic.viewer.query import Gone, Query, Row, Step, is_id, read_up
from torchrl_agentic.viewer.samples import group_key

_BYTES = 4 << 20  # per step of reading, about 10 ms, in which the user has to wait
_READ, _ROWS = 500, 2000  # rows read, and rows checked by a query, per step
_REFRESH_S, _SLICE_S = 0.5, 0.01
_NEAR_STEPS = 3  # files before and after that of a trajectory in which others of its group may be


class Library:
    """A dump, as far as it has been read.

    A thread calls `work` repeatedly; other threads hold `lock` while they read files.

    Args:
        path: The folder or file.
        mask: Regular expression of text that is shown as a star.
        clock: Source of the time in seconds, for tests.

    Attributes:
        version: Number that grows with each change.
        notes: Messages about files.
        is_idle: Whether there is nothing to read at the moment.
        extras: Names of all extra fields.
        runs: Ids of all runs.
        groups: The groups of the dump, with the batch in which each was yielded.
        counts: Number of matches of the search in each trajectory.

    Raises:
        FileNotFoundError: If the folder or file does not exist.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mask: re.Pattern[str] = NO_MASK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.path.stat()
        if sys.platform != "win32":
            import resource

            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the files of all steps stay open
        self.mask = mask
        self.lock = threading.RLock()
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.version = 0
        self.listing = Listing(Query(), "none", None, mask)
        self.needle: Needle | None = None
        self.counts: dict[Row, int] = {}
        self.is_counted = True
        self.is_idle = False
        self._due: deque[Step] = deque()
        self.extras: set[str] = set()
        self.runs: set[str] = set()
        self.groups = Groups(self.path)
        self._clock = clock
        self._dump: Dump | None = None
        self._refreshed = -_REFRESH_S
        self._counted = 0
        self._counted_of: object = None

    def work(self) -> bool:
        """Read a little more, beginning with the listed step. Return whether there was anything to read."""
        with self.lock:
            looked, read, listed = self._look(), self._read(), self._list()
            self.is_idle = not (looked or read or listed or self._count())
            return not self.is_idle

    def _look(self) -> bool:
        """Check for new and removed files, from time to time."""
        now = self._clock()
        if now - self._refreshed < _REFRESH_S:
            return False
        self._refreshed = now
        try:
            if self._dump is None:
                self._dump = Dump(self.path)
            else:
                self._dump.refresh()
        except ValueError:  # no files yet
            return False
        except OSError as error:
            for step in self.steps:
                self._trouble(step, f"{self.path} can no longer be read: {error.strerror}")
            return False
        changed = self._arrange()
        if self.groups.refresh():
            listing = self.listing
            if listing.query.terms:  # steps and advantages may be others now
                self.listing = Listing(listing.query, listing.sort, listing.step, self.mask)
            self.version += 1
        # Unfinished files come first: those that have grown since can wait.
        self._due = deque(sorted(self.steps, key=lambda step: not step.is_due))
        for step in self.steps:
            step.is_due = True
        return changed

    def _arrange(self) -> bool:
        assert self._dump is not None
        files = self._dump.files
        if [step.file for step in self.steps] == files:
            return False
        known = {step.file: step for step in self.steps}
        for file in known.keys() - set(files):
            self._trouble(known[file], f"{file.path.name} was removed")
        self.steps = [known.get(file) or Step(file, self.groups) for file in files]
        for place, step in enumerate(self.steps):
            step.place = place
        self.version += 1
        return True

    def _trouble(self, step: Step, words: str) -> None:
        if step.trouble != words:
            step.trouble = words
            self.notes.append(words)
            self.version += 1
        step.is_due = False

    def _read(self) -> bool:
        """Read files that are due, for as long as a waiting user does not notice."""
        due, until = self._due, self._clock() + _SLICE_S
        found = bool(due)
        while due and self._clock() < until:
            step = due.popleft()
            self._read_some(step)
            if step.is_due:
                due.appendleft(step)
        return found

    def _read_some(self, step: Step) -> None:
        before, begun = list(step.rows[-1:]), step.beginnings
        try:
            read_up(step, _BYTES, _READ)
        except FileNotFoundError:
            self._trouble(step, f"{step.file.path.name} was removed")
        except OSError as error:
            self._trouble(step, f"{step.file.path.name} cannot be read: {error.strerror}")
        except ImportError as error:
            self._trouble(step, str(error))
        else:
            step.trouble = ""
        if begun and step.beginnings != begun:
            self.notes.append(f"{step.file.path.name} was rewritten or cut, and is read again")
        if step.beginnings != begun or step.rows[-1:] != before:
            self.version += 1
            for row in step.rows[-_READ:]:
                if not isinstance(row.summary, BadLine):
                    self.extras.update(row.summary.extras)
                    self.runs.add(row.summary.run)

    def _list(self) -> bool:
        try:
            taken = self.listing.take(self.steps, _ROWS if not self.listing.query.words else 20)
        except Gone:
            return False
        if taken:
            self.is_counted = False
            self.version += 1
        return taken

    def _count(self) -> bool:
        """Count the matches in some more trajectories."""
        needle, shown = self.needle, self.listing.shown
        if needle is None or self.is_counted:
            return False
        if self._counted_of is not shown:
            self._counted_of, self._counted = shown, 0
        read = 0
        while self._counted < len(shown) and read < _BYTES // 2:
            row = shown[self._counted]
            self._counted += 1
            if row not in self.counts:
                read += row.size + 1000
                with suppress(Gone):
                    self.counts[row] = matches(row, needle, self.mask)
        self.is_counted = self._counted >= len(shown)
        self.version += 1
        return True

    def ask(self, query: Query, sort: str, step: Step | None) -> None:
        """Replace the listing, and find its first rows at once.

        Args:
            query: Condition of the rows.
            sort: Order, one of `SORTS`.
            step: The only step to list; None for all.
        """
        with self.lock:
            if step in self._due:
                self._due.remove(step)
                self._due.appendleft(step)
            self.listing = Listing(query, sort, step, self.mask)
            self._list()
            self.is_counted = self.is_idle = False
            self.version += 1

    def search(self, needle: Needle | None) -> None:
        """Search words in the listed trajectories."""
        with self.lock:
            self.needle, self.counts, self.is_counted = needle, {}, needle is None
            self._counted_of = None
            self.is_idle = False
            self.version += 1

    def find(self, request_id: str) -> Row | None:
        """Return the first trajectory of all steps whose request id has this prefix."""
        with self.lock:
            for step in self.steps:
                for row in step.rows:
                    if not isinstance(row.summary, BadLine) and is_id(row.summary.request_id, request_id):
                        return row
        return None

    def group(self, row: Row) -> list[Row]:
        """Return the trajectories of the same prompt, including the row itself; see `group_key`."""
        if isinstance(row.summary, BadLine):
            return [row]
        key, place = group_key(row.summary), row.step.place
        steps = (
            [row.step] if key[2] is None else self.steps[max(0, place - _NEAR_STEPS) :][: 2 * _NEAR_STEPS + 1]
        )
        return [
            other
            for step in steps
            for other in step.rows
            if not isinstance(found := other.summary, BadLine) and group_key(found) == key
        ]

    @property
    def progress(self) -> float:
        """Part of the dump that has been read, from 0 to 1."""
        if not self.steps:
            return 0.0
        return sum(step.progress for step in self.steps) / len(self.steps)

    def close(self) -> None:
        """Close all files."""
        with self.lock:
            if self._dump is not None:
                self._dump.close()


def read_all(library: Library, query: Query, sort: str) -> list[Row]:
    """Read a dump to its current end, and return the rows of a query.

    Args:
        library: The dump.
        query: Condition of the rows.
        sort: Order, one of `SORTS`.
    """
    while library.work():
        pass
    library.ask(query, sort, None)
    while library.work():
        pass
    return list(library.listing.shown)


def text_of(library: Library, row: Row) -> Iterator[str]:
    """Yield the lines of a trajectory as plain text, with nothing folded or left out.

    Args:
        library: The dump.
        row: The trajectory.
    """
    try:
        blocks = blocks_of(row, library.mask, whole=True)
    except Gone as error:
        yield f"(cannot be read: {printable(str(error))})"
        return
    for number, block in enumerate(blocks):
        if block.title:
            yield printable("".join(text for text, _ in block.title)).rstrip("─ ")
        if number == 0 and not isinstance(row.summary, BadLine) and row.summary.question:
            yield f"  question: {printable(row.summary.question)}"
        for line in block.text.removesuffix("\n").split("\n") if block.text else ():
            yield f"  {printable(line)}"
    yield ""
