"""`Reading`, the state of a reader: the open trajectory, its view and the search."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_agentic.records import BadLine
from torchrl_agentic.viewer.blocks import Block, bad_line, fields_of, table, tokens
from torchrl_agentic.viewer.layout import Look, Needle, Page, beside, page
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.listing import SORTS, blocks_of
from torchrl_agentic.viewer.query import LARGE, Gone, Query, Row, Step, parse

MOST = Look().most


class Reading:
    """The state of the viewer, apart from the terminal.

    Args:
        library: The dump.

    Attributes:
        row: The open trajectory, or None.
        mate: The trajectory it is compared with, or None.
        view: "text", "table", "tokens" or "compare".
        field: The only field that the table shows; None for all.
        focus: Index of the match that the user looks at, in this trajectory, or -1.
        asked: The query as it was typed.
        page: The page that was laid out last.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.row: Row | None = None
        self.mate: Row | None = None
        self.view = "text"
        self.field: str | None = None
        self.is_unfolded = False
        self.most = MOST
        self.focus = -1
        self.shows_all_steps = False
        self.sort = SORTS[0]
        self.query, self.asked = Query(), ""
        self.page = Page()
        self._is_widened = False  # whether a query about steps lists all of them
        self._searching = 0
        self._whole: tuple[Row, list[Block]] | None = None
        self._made: tuple[object, list[Block]] | None = None

    @property
    def shown(self) -> Sequence[Row]:
        """The listed trajectories."""
        return self.library.listing.shown

    @property
    def step(self) -> Step | None:
        """The listed step, or the step of the open trajectory."""
        return self.library.listing.step or (self.row.step if self.row is not None else None)

    @property
    def place(self) -> int:
        """Position of the open trajectory in the list, or -1."""
        return self.shown.index(self.row) if self.row in self.shown else -1

    def open(self, row: Row | None) -> None:
        """Open a trajectory, at its beginning."""
        if row is not self.row:
            self.row, self.focus, self.most, self.mate = row, -1, MOST, None
            self._searching = 0

    def query_by(self, text: str) -> None:
        """Set the query of the list; one that names a step is asked of all steps.

        Raises:
            QueryError: If the query cannot be parsed.
        """
        self.query, self.asked = parse(text, self.library.extras), text.strip()
        if self.query.names_step:
            self._is_widened = self._is_widened or not self.shows_all_steps
            self.shows_all_steps = True
        elif self._is_widened:
            self.shows_all_steps = self._is_widened = False

    def ask(self, step: Step | None = None, place: int | None = None) -> None:
        """List the trajectories of the query.

        The open trajectory stays open if it is listed and no `place` is given; otherwise another one is
        opened.

        Args:
            step: The step to list, unless all are listed; None for the current one.
            place: Position in the list of the trajectory to open.
        """
        step = step or self.step or (self.library.steps[0] if self.library.steps else None)
        self.library.ask(self.query, self.sort, None if self.shows_all_steps else step)
        if self.shown and (place is not None or self.row not in self.shown):
            self.open(self.shown[min(place or 0, len(self.shown) - 1)])
        elif not self.shown:
            self.open(None)

    def go(self, by: int) -> None:
        """Open the next or previous trajectory of the list; the first one follows the last."""
        if self.shown:
            place = self.place
            start = place if place >= 0 else -1 if by > 0 else 0
            self.open(self.shown[(start + by) % len(self.shown)])

    def go_step(self, by: int) -> None:
        """Go to the next or previous step, at the same position of the list."""
        steps = self.library.steps
        if not steps:
            return
        at = steps.index(self.step) if self.step in steps else 0
        step = steps[(at + by) % len(steps)]
        if self.shows_all_steps:
            self.open(next((row for row in self.shown if row.step is step), self.row))
        else:
            self.ask(step, max(self.place, 0))

    def catch_up(self) -> None:
        """Follow changes of the files: lines that have grown, first trajectories, removed ones."""
        library = self.library
        is_asked = library.listing.query == self.query
        if library.steps and not (is_asked and (library.listing.step or self.shows_all_steps)):
            self.ask(library.steps[0])
        elif library.listing.step not in (None, *library.steps) and library.steps:
            self.ask(library.steps[-1], 0)
        row = self.row
        if row is not None and row not in self.shown:
            rows = row.step.rows
            if row.index < len(rows) and rows[row.index] in self.shown:
                self.row = rows[row.index]
        if self.row is None and self.shown:
            self.open(self.shown[0])
        if self._searching:
            self.next_match(self._searching)

    def newest(self) -> None:
        """Open the newest trajectory of the newest step."""
        steps = self.library.steps
        if steps and not self.shows_all_steps and self.library.listing.step is not steps[-1]:
            self.ask(steps[-1], 0)
        if self.shown:
            self.open(max(self.shown, key=lambda row: (row.step.place, row.index)))

    def blocks(self) -> list[Block]:
        """Return the blocks of the open trajectory in its view."""
        row = self.row
        if row is None:
            return [Block((), self._why_nothing(), "more")]
        key = (row, self.view, self.field)
        if self._made is None or self._made[0] != key:
            try:
                with self.library.lock:
                    self._made = key, self._blocks(row)
            except Gone as error:
                return [Block((), f"This trajectory cannot be read: {error}", "error")]
        return self._made[1]

    def _blocks(self, row: Row) -> list[Block]:
        if self._whole is not None and self._whole[0] is row:
            return self._whole[1]
        if self.view in ("text", "compare") or row.size > LARGE:
            return blocks_of(row, self.library.mask)
        record = row.record()
        if isinstance(record, BadLine):
            return bad_line(record, row.line(4096).decode("utf-8", "surrogateescape"))
        if self.view == "tokens":
            return tokens(record, self.library.mask)
        return table(record, self.library.mask, self.field)

    def _why_nothing(self) -> str:
        library = self.library
        if not library.steps:
            return f"{library.path} holds no .jsonl or .jsonl.zst files yet; new ones will be shown here."
        if library.progress < 1:
            return "Reading …"
        step = self.library.listing.step
        if self.query != Query():
            return "No trajectory matches the query: / changes it, and esc then clears it."
        if step is not None and step.trouble:
            return step.trouble
        return "There are no trajectories yet; new ones will be shown here."

    def load(self) -> None:
        """Read a large trajectory completely."""
        if self.row is not None:
            blocks = blocks_of(self.row, self.library.mask, whole=True)
            self._whole, self._made = (self.row, blocks), None

    def fields(self) -> list[str]:
        """Return the names of the known fields."""
        names = dict.fromkeys(self.library.extras)
        if self.row is not None and self.row.size <= LARGE:
            with self.library.lock:
                record = self.row.record()
            if not isinstance(record, BadLine):
                names = {**dict.fromkeys(fields_of(record)), **names}
        return list(names)

    def lay_out(self, width: int) -> Page:
        """Lay out the open trajectory for a width, and return the page."""
        if self.view == "compare" and self.row is not None and (mate := self.next_mate(0)) is not None:
            with self.library.lock:
                other = blocks_of(mate, self.library.mask)
            look = Look(width, None, -1, self.is_unfolded, self.most)
            self.page = Page(beside(self.blocks(), other, look))
        else:
            look = Look(width, self.library.needle, self.focus, self.is_unfolded, self.most)
            self.page = page(self.blocks(), look)
        return self.page

    def next_mate(self, by: int = 1) -> Row | None:
        """Choose the trajectory to compare with: another one of the same prompt, or None if there is none."""
        if self.row is None:
            return None
        others = [row for row in self.library.group(self.row) if row is not self.row]
        if not others:
            return None
        at = others.index(self.mate) + by if self.mate in others else 0
        self.mate = others[at % len(others)]
        return self.mate

    def search(self, words: str) -> None:
        """Search words; an empty string ends the search."""
        self.focus, self._searching = -1, 0
        self.library.search(Needle(words) if words else None)

    def next_match(self, by: int) -> bool:
        """Go to the next or previous match, in this or another trajectory; return whether there is one."""
        self._searching = 0
        focus = self.focus + by if self.focus >= 0 or by > 0 else -1
        if 0 <= focus < len(self.page.matches):
            self.focus = focus
            return True
        counts, rows = self.library.counts, self.shown
        at = self.place
        for distance in range(1, len(rows) + 1):
            row = rows[(at + by * distance) % len(rows)]
            if row not in counts and not self.library.is_counted:
                self._searching = by
                return False
            if counts.get(row):
                self.open(row)
                self.lay_out(80)
                self.focus = 0 if by > 0 else len(self.page.matches) - 1
                return True
        return False

    @property
    def counter(self) -> str:
        """Number of the match and of all matches; "+" while they are being counted."""
        library = self.library
        if library.needle is None:
            return ""
        total, before = sum(library.counts.values()), 0
        for row in self.shown:
            if row is self.row:
                break
            before += library.counts.get(row, 0)
        more = "" if library.is_counted else "+"
        if self.view != "text":
            return f"{self.focus + 1}/{len(self.page.matches)} here, {total}{more} in the text of all"
        found = f"{before + self.focus + 1 if self.focus >= 0 else '–'}/{total}{more}"
        return f"{found} searching …" if self._searching else found
