"""What is read at the moment: which trajectory, how it is shown, where in it, and what comes next."""

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
    """What a reader looks at, apart from how a terminal shows it.

    view: "text", "table", "tokens" or "compare". field: the one that the table shows; None: all. focus: the
    number of the match that is looked at, in this trajectory. asked: the query as it was typed.
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
        self._searching = 0
        self._whole: tuple[Row, list[Block]] | None = None
        self._made: tuple[object, list[Block]] | None = None

    @property
    def shown(self) -> Sequence[Row]:
        """What is listed."""
        return self.library.listing.shown

    @property
    def step(self) -> Step | None:
        """The step whose trajectories are listed, or that of the one that is read."""
        return self.library.listing.step or (self.row.step if self.row is not None else None)

    @property
    def place(self) -> int:
        """Where in the list the trajectory stands; -1: nowhere."""
        return self.shown.index(self.row) if self.row in self.shown else -1

    def open(self, row: Row | None) -> None:
        """Read a trajectory, from its beginning."""
        if row is not self.row:
            self.row, self.focus, self.most, self.mate = row, -1, MOST, None
            self._searching = 0

    def query_by(self, text: str) -> None:
        """List what a query says from now on.

        Raises:
            QueryError: it cannot be understood.
        """
        self.query, self.asked = parse(text, self.library.extras), text.strip()

    def ask(self, step: Step | None = None, place: int | None = None) -> None:
        """List what `query` and `sort` say, of one step or of all, and read what stands in that place.

        Without a place the trajectory stays; if it is not listed any more, it is the first one instead.
        """
        step = step or self.step or (self.library.steps[0] if self.library.steps else None)
        self.library.ask(self.query, self.sort, None if self.shows_all_steps else step)
        if self.shown and (place is not None or self.row not in self.shown):
            self.open(self.shown[min(place or 0, len(self.shown) - 1)])
        elif not self.shown:
            self.open(None)

    def go(self, by: int) -> None:
        """Read the next trajectory of the list, or the one before; from the last one to the first."""
        if self.shown:
            place = self.place
            start = place if place >= 0 else -1 if by > 0 else 0
            self.open(self.shown[(start + by) % len(self.shown)])

    def go_step(self, by: int) -> None:
        """Go to the next step, or the one before, and there to the same place of the list."""
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
        """Follow what has changed in files: a line that has grown, the first trajectories, lost ones."""
        library = self.library
        if library.listing.step is None and not self.shows_all_steps and library.steps:
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
        """Read the newest trajectory of the newest step."""
        steps = self.library.steps
        if steps and not self.shows_all_steps and self.library.listing.step is not steps[-1]:
            self.ask(steps[-1], 0)
        if self.shown:
            self.open(max(self.shown, key=lambda row: (row.step.place, row.index)))

    def blocks(self) -> list[Block]:
        """Give what is read, in pieces."""
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
            return f"{library.path} holds no .jsonl or .jsonl.zst files yet; what comes is shown here."
        if library.progress < 1:
            return "Reading …"
        step = self.library.listing.step
        if self.query != Query():
            return "No trajectory is as asked for: / changes the query, esc in it clears it."
        if step is not None and step.trouble:
            return step.trouble
        return "There are no trajectories in it yet; what comes is shown here."

    def load(self) -> None:
        """Read a large trajectory whole, which takes a moment."""
        if self.row is not None:
            blocks = blocks_of(self.row, self.library.mask, whole=True)
            self._whole, self._made = (self.row, blocks), None

    def fields(self) -> list[str]:
        """Say which fields there are, as far as is known."""
        names = dict.fromkeys(self.library.extras)
        if self.row is not None and self.row.size <= LARGE:
            with self.library.lock:
                record = self.row.record()
            if not isinstance(record, BadLine):
                names = {**dict.fromkeys(fields_of(record)), **names}
        return list(names)

    def lay_out(self, width: int) -> Page:
        """Make the page of what is read."""
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
        """Choose what is compared with: the next trajectory that began alike; None: there is no other."""
        if self.row is None:
            return None
        others = [row for row in self.library.group(self.row) if row is not self.row]
        if not others:
            return None
        at = others.index(self.mate) + by if self.mate in others else 0
        self.mate = others[at % len(others)]
        return self.mate

    def search(self, words: str) -> None:
        """Look for words; "" for none."""
        self.focus, self._searching = -1, 0
        self.library.search(Needle(words) if words else None)

    def next_match(self, by: int) -> bool:
        """Look at the next match or the one before, in this trajectory or another; whether there is one."""
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
        """Say which match it is of how many; + while they are not all counted."""
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
