"""`ViewerState`: the list of trajectories, the page of the open one, and the search; without the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrl_agentic.records import BadLine
from torchrl_agentic.viewer.layout import Look, Needle, Page, beside, page
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.listing import SORTS, blocks_of
from torchrl_agentic.viewer.query import LARGE, Gone, Query, Row, Step, parse
from torchrl_agentic.viewer.render_record import Block, bad_line, fields_of, table, tokens

MOST = Look().most


@dataclass(slots=True)
class Opened:
    """The open trajectory, and what is forgotten when another one is opened.

    Attributes:
        row: The trajectory; None if the list is empty.
        mate: The trajectory it is compared with, or None.
        most: Number of characters shown of each text.
        focus: Index of the current match in this trajectory, or -1.
        awaited: Direction of a step to the next match that waits until matches are counted; 0 if none does.
    """

    row: Row | None = None
    mate: Row | None = None
    most: int = MOST
    focus: int = -1
    awaited: int = 0


class TrajectoryList:
    """The listed trajectories, and the open one.

    Args:
        library: The dump.

    Attributes:
        opened: The open trajectory.
        query: Condition of the listed trajectories.
        asked: The query as it was typed.
        sort: Order of the list, one of `SORTS`.
        shows_all_steps: Whether the trajectories of all steps are listed.
        is_following: Whether the newest trajectory is opened as soon as it is read.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.opened = Opened()
        self.query, self.asked = Query(), ""
        self.sort = SORTS[0]
        self.shows_all_steps = self.is_following = False
        self._is_widened = False  # whether a query about steps lists all of them

    @property
    def shown(self) -> Sequence[Row]:
        """The listed trajectories."""
        return self.library.listing.shown

    @property
    def step(self) -> Step | None:
        """The listed step, or the step of the open trajectory."""
        row = self.opened.row
        return self.library.listing.step or (row.step if row is not None else None)

    @property
    def place(self) -> int:
        """Position of the open trajectory in the list, or -1."""
        return self.shown.index(self.opened.row) if self.opened.row in self.shown else -1

    def open(self, row: Row | None) -> None:
        """Open a trajectory, at its beginning."""
        if row is not self.opened.row:
            self.opened = Opened(row)

    def reveal(self, row: Row) -> None:
        """Open a trajectory; unless it is listed, list its step without a query."""
        if row not in self.shown:
            self.query_by("")
            self.ask(row.step)
        self.open(row)

    def query_by(self, text: str) -> None:
        """Set the query of the list; a query that names a step lists all steps.

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
        if self.shown and (place is not None or self.opened.row not in self.shown):
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
            self.open(next((row for row in self.shown if row.step is step), self.opened.row))
        else:
            self.ask(step, max(self.place, 0))

    def sort_next(self) -> None:
        """Sort the list in the next order."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.ask()

    def toggle_steps(self) -> None:
        """List all steps, or only the step of the open trajectory."""
        self.shows_all_steps = not self.shows_all_steps
        self.ask(None if self.opened.row is None else self.opened.row.step)

    def toggle_following(self) -> None:
        """Start or stop opening the newest trajectory."""
        self.is_following = not self.is_following
        if self.is_following:
            self.newest()

    def catch_up(self) -> None:
        """Follow changes of the files: lines that have grown, first trajectories, removed ones."""
        library = self.library
        is_asked = library.listing.query == self.query
        if library.steps and not (is_asked and (library.listing.step or self.shows_all_steps)):
            self.ask(library.steps[0])
        elif library.listing.step not in (None, *library.steps) and library.steps:
            self.ask(library.steps[-1], 0)
        opened = self.opened
        if opened.row is not None and opened.row not in self.shown:
            rows = opened.row.step.rows
            if opened.row.index < len(rows) and rows[opened.row.index] in self.shown:
                opened.row = rows[opened.row.index]
        if opened.row is None and self.shown:
            self.open(self.shown[0])

    def newest(self) -> None:
        """Open the newest trajectory of the newest step."""
        steps = self.library.steps
        if steps and not self.shows_all_steps and self.library.listing.step is not steps[-1]:
            self.ask(steps[-1], 0)
        if self.shown:
            self.open(max(self.shown, key=lambda row: (row.step.place, row.index)))


class TrajectoryPage:
    """How the open trajectory is shown.

    Args:
        rows: The list.

    Attributes:
        view: "text", "table", "tokens" or "compare".
        field: The only field that the table shows; None for all.
        is_unfolded: Whether reasoning is shown.
        page: The page that was laid out last.
    """

    def __init__(self, rows: TrajectoryList) -> None:
        self.view = "text"
        self.field: str | None = None
        self.is_unfolded = False
        self.page = Page()
        self._list, self._library = rows, rows.library
        self._whole: tuple[Row, list[Block]] | None = None
        self._made: tuple[object, list[Block]] | None = None

    @property
    def subject(self) -> tuple[object, ...]:
        """Trajectory, view and field of the page; another subject is shown from its beginning."""
        row = self._list.opened.row
        return (None if row is None else (row.step, row.index)), self.view, self.field

    def toggle_view(self, view: str) -> str:
        """Show another view, or the text again; return why this is not possible, or ""."""
        if view == "compare" and self.next_mate(0) is None:
            return "no other trajectory of this step has the same prompt"
        self.view = "text" if self.view == view else view
        self._list.opened.focus = -1
        return ""

    def compare_next(self) -> None:
        """Compare with the next trajectory, if one is compared."""
        if self.view == "compare":
            self.next_mate()

    def toggle_reasoning(self) -> None:
        """Show or hide reasoning."""
        self.is_unfolded = not self.is_unfolded

    def show_more(self) -> None:
        """Show ten times as much of long texts."""
        self._list.opened.most *= 10

    def blocks(self) -> list[Block]:
        """Return the blocks of the open trajectory in its view."""
        row = self._list.opened.row
        if row is None:
            return [Block((), self._why_nothing(), "more")]
        key = (row, self.view, self.field)
        if self._made is None or self._made[0] != key:
            try:
                with self._library.lock:
                    self._made = key, self._blocks(row)
            except Gone as error:
                return [Block((), f"This trajectory cannot be read: {error}", "error")]
        return self._made[1]

    def _blocks(self, row: Row) -> list[Block]:
        if self._whole is not None and self._whole[0] is row:
            return self._whole[1]
        if self.view in ("text", "compare") or row.size > LARGE:
            return blocks_of(row, self._library.mask)
        record = row.record()
        if isinstance(record, BadLine):
            return bad_line(record, row.line(4096).decode("utf-8", "surrogateescape"))
        if self.view == "tokens":
            return tokens(record, self._library.mask)
        return table(record, self._library.mask, self.field)

    def _why_nothing(self) -> str:
        library = self._library
        if not library.steps:
            return f"{library.path} holds no .jsonl or .jsonl.zst files yet; new ones will be shown here."
        if library.progress < 1:
            return "Reading …"
        step = library.listing.step
        if self._list.query != Query():
            return "No trajectory matches the query: / changes it, and esc then clears it."
        if step is not None and step.trouble:
            return step.trouble
        return "There are no trajectories yet; new ones will be shown here."

    def load(self) -> None:
        """Read a large trajectory completely."""
        if (row := self._list.opened.row) is not None:
            blocks = blocks_of(row, self._library.mask, whole=True)
            self._whole, self._made = (row, blocks), None

    def fields(self) -> list[str]:
        """Return the names of the known fields."""
        names, row = dict.fromkeys(self._library.extras), self._list.opened.row
        if row is not None and row.size <= LARGE:
            with self._library.lock:
                record = row.record()
            if not isinstance(record, BadLine):
                names = {**dict.fromkeys(fields_of(record)), **names}
        return list(names)

    def lay_out(self, width: int) -> Page:
        """Lay out the open trajectory for a width, and return the page."""
        opened = self._list.opened
        if self.view == "compare" and (mate := self.next_mate(0)) is not None:
            with self._library.lock:
                other = blocks_of(mate, self._library.mask)
            look = Look(width, None, -1, self.is_unfolded, opened.most)
            self.page = Page(beside(self.blocks(), other, look))
        else:
            look = Look(width, self._library.needle, opened.focus, self.is_unfolded, opened.most)
            self.page = page(self.blocks(), look)
        return self.page

    def next_mate(self, by: int = 1) -> Row | None:
        """Select another trajectory of the same prompt to compare with, or None if there is none."""
        opened = self._list.opened
        others = [] if opened.row is None else self._library.group(opened.row)
        others = [row for row in others if row is not opened.row]
        if not others:
            return None
        at = others.index(opened.mate) + by if opened.mate in others else 0
        opened.mate = others[at % len(others)]
        return opened.mate


class Search:
    """The search for words in the listed trajectories.

    Args:
        rows: The list.
        page: The page of the open trajectory.
    """

    def __init__(self, rows: TrajectoryList, page: TrajectoryPage) -> None:
        self._list, self._page, self._library = rows, page, rows.library

    def begin(self, words: str) -> None:
        """Search words; an empty string ends the search."""
        self._list.opened.focus, self._list.opened.awaited = -1, 0
        self._library.search(Needle(words) if words else None)

    def go(self, by: int) -> str:
        """Go to the next or previous match. Return the reason if there is none, else ""."""
        if self._library.needle is None:
            return "there is no search: press f to search"
        self.next_match(by)
        is_missing = self._list.opened.focus < 0 and self._library.is_counted
        return "not found in the listed trajectories" if is_missing else ""

    def next_match(self, by: int) -> bool:
        """Go to the next or previous match, in this or another trajectory; return whether there is one."""
        opened, counts, rows = self._list.opened, self._library.counts, self._list.shown
        opened.awaited = 0
        focus = opened.focus + by if opened.focus >= 0 or by > 0 else -1
        if 0 <= focus < len(self._page.page.matches):
            opened.focus = focus
            return True
        at = self._list.place
        for distance in range(1, len(rows) + 1):
            row = rows[(at + by * distance) % len(rows)]
            if row not in counts and not self._library.is_counted:
                opened.awaited = by
                return False
            if counts.get(row):
                self._list.open(row)
                found = self._page.lay_out(80)
                self._list.opened.focus = 0 if by > 0 else len(found.matches) - 1
                return True
        return False

    @property
    def counter(self) -> str:
        """Number of the match and of all matches; "+" while they are being counted."""
        library, opened = self._library, self._list.opened
        if library.needle is None:
            return ""
        total, before = sum(library.counts.values()), 0
        for row in self._list.shown:
            if row is opened.row:
                break
            before += library.counts.get(row, 0)
        more = "" if library.is_counted else "+"
        if self._page.view != "text":
            return f"{opened.focus + 1}/{len(self._page.page.matches)} here, {total}{more} in the text of all"
        found = f"{before + opened.focus + 1 if opened.focus >= 0 else '–'}/{total}{more}"
        return f"{found} searching …" if opened.awaited else found


class ViewerState:
    """The state of the viewer, apart from the terminal.

    Args:
        library: The dump.

    Attributes:
        list: The listed trajectories, and the open one.
        page: How the open trajectory is shown.
        search: The search.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.list = TrajectoryList(library)
        self.page = TrajectoryPage(self.list)
        self.search = Search(self.list, self.page)

    def catch_up(self) -> None:
        """Follow changes of the files, and go to the match or the newest trajectory that was waited for."""
        self.list.catch_up()
        if by := self.list.opened.awaited:
            self.search.next_match(by)
        if self.list.is_following:
            self.list.newest()

    def jump(self, request_id: str) -> str:
        """Open the trajectory whose request id has this prefix; return why this is not possible, or ""."""
        row = self.library.find(request_id)
        if row is None:
            more = "" if self.library.progress >= 1 else " yet; the dump is still being read"
            return f"no request id begins with {request_id}{more}"
        self.list.reveal(row)
        return ""
