"""What stands in the bars and in the list of the viewer, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from torchrl_agentic.records import BadLine
from torchrl_agentic.viewer.blocks import number
from torchrl_agentic.viewer.line_view import Lines
from torchrl_agentic.viewer.query import Row, label
from torchrl_agentic.viewer.reading import Reading
from torchrl_agentic.viewer.text_wrap import Line, fit, plain, wrapped

KEYS = {
    "n p": "next trajectory, the one before, in the order of the list",
    "N P": "next step, the one before",
    "j k": "a page down, up",
    "g G": "to the beginning, to the end",
    "tab ← →": "to the list, to the text",
    "f": "search words, in all that is listed",
    "enter b": "next match, the one before, in other trajectories too",
    "esc": "clear the search; leave a comparison or a line of input",
    "/": "query: what is listed, e.g. status:timeout tool:python score<0.5 reason:max_turns -name:x words",
    "o": "sort: none, score ascending, score descending; without a score last",
    "a": "list all steps, or one",
    "t": "choose a step",
    "r": "go to a request id, in any step; its beginning will do, hyphens do not matter",
    "s": "text, or a table of all fields",
    "x": "choose one field of the table, or all",
    "i": "tokens, by who wrote them",
    "c m": "compare with another trajectory that began alike, with the next one",
    "e": "unfold or fold reasoning",
    "+": "show more of long texts",
    "L": "load all of a large trajectory",
    "l": "hide or show the list",
    "F": "follow: go to what comes newest",
    "?": "these keys",
    "q": "quit",
}
"""The keys, and what they do."""
QUERIES = """\
A query is one or more of these, all of which must hold:
  status:timeout       a call was answered so; of several with a comma: status:timeout,crash
  tool:python          a call of this tool
  reason:max_turns     how it ended; reason:none if that is not known
  score<0.5            also > <= >= = !=; score:none where there is none
  turns calls errors step   are numbers too
  name:part id:ab12 group:4147   parts of a name, beginnings of ids
  acc=1                whatever else was noted of a trajectory
  words "more words"   that are said in it
  -status:ok           a minus sign: not so"""
HINTS = "? keys  f search  / query  o sort  s table  i tokens  c compare  q quit"


def row_line(row: Row, width: int, *, with_step: bool) -> Line:
    """Write a line of the list: score, errors, and, where there is room, turns, calls and how it ended."""
    summary = row.summary
    step = ((f"{row.step.name:>4} ", "faint"),) if with_step else ()
    if isinstance(summary, BadLine):
        return fit((*step, (f"{'✗':>7} ", "error"), (label(row), "error")), width)
    errors = f"{summary.n_errors}✗" if summary.n_errors else ""
    more = f"{summary.n_turns:>3}t {summary.n_calls:>3}c {summary.termination_reason:<12.12} "
    return fit(
        (
            *step,
            (f"{number(summary.score):>7} ", "score"),
            (f"{errors:>3} ", "error"),
            (more if width >= 50 else "", "faint"),
            (label(row), ""),
        ),
        width,
    )


def head_line(width: int, *, with_step: bool) -> Line:
    """Write what the columns of the list are."""
    more = "turn call end          " if width >= 50 else ""
    return fit(((f"{'step ' if with_step else ''}  score err {more}trajectory", "faint"),), width)


def top_line(reading: Reading, width: int) -> Line:
    """Say what is read: which file and step, how many are listed, in which order, and how far it is read."""
    library = reading.library
    steps, step = library.steps, reading.step
    at = f"{step.label} ({steps.index(step) + 1}/{len(steps)})" if step in steps else "no step"
    if reading.shows_all_steps:
        at = "all steps"
    place = reading.place
    known = (
        sum(len(step.rows) for step in steps) if reading.shows_all_steps else len(step.rows) if step else 0
    )
    listed = len(reading.shown)
    of = f" of {known:,}" if listed != known else ""
    facts = [
        plain(fit(((str(library.path.name or library.path), ""),), max(12, width // 5))),
        at,
        f"{place + 1 if place >= 0 else '–'}/{listed:,}{of}",
        {"none": "", "score ascending": "score ↑", "score descending": "score ↓"}[reading.sort],
        reading.asked,
        {"text": "", "table": reading.field or "table"}.get(reading.view, reading.view),
    ]
    progress = library.progress
    done = round(10 * progress)
    bar = f" {'━' * done}{'─' * (10 - done)} {progress:.0%}" if steps and progress < 1 else ""
    return fit(((" " + " · ".join(filter(None, facts)), "name"), (bar, "key")), width)


class Help(ModalScreen[None]):
    """Shows the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,question_mark,q", "dismiss", "close"),
        ("j", "page(1)", "down"),
        ("k", "page(-1)", "up"),
    ]

    def compose(self) -> ComposeResult:
        """Make the box."""
        with Vertical(classes="box"):
            yield Lines()

    def on_lines_resized(self) -> None:
        """Lay out the words for the width there is."""
        lines = self.query_one(Lines)
        made = help_lines(lines.room)
        lines.show(len(made), made.__getitem__)

    def action_page(self, by: int) -> None:
        """Scroll by a page."""
        lines = self.query_one(Lines)
        lines.scroll_relative(y=by * lines.size.height, animate=False)


def help_lines(width: int) -> list[Line]:
    """Write the keys, and how queries are written."""
    made: list[Line] = []
    for keys, does in KEYS.items():
        parts = list(wrapped([(does, "value")], max(10, width - 10)))
        for index, (line, _) in enumerate(parts):
            made.append(((f"{keys if index == 0 else '':<9} ", "key"), *line))
    made.append(())
    for text in QUERIES.split("\n"):
        made.extend(line for line, _ in wrapped([(text, "faint")], width))
    return made


class Choose(ModalScreen[int | None]):
    """Lets somebody choose one of many, which can be narrowed by typing. Gives its number."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape", "dismiss", "leave"),
        ("up", "move(-1)", "up"),
        ("down", "move(1)", "down"),
    ]

    def __init__(self, title: str, options: Sequence[str], current: int) -> None:
        super().__init__()
        self._title, self._options, self._current = title, options, current
        self._found = list(range(len(options)))

    def compose(self) -> ComposeResult:
        """Make the box."""
        with Vertical(classes="box"):
            yield Static(Content(self._title))
            yield Input(placeholder="type to narrow, enter takes", compact=True)
            yield Lines(has_cursor=True)

    def on_lines_resized(self) -> None:
        """Show what there is."""
        self._show(self._found.index(self._current) if self._current in self._found else 0)

    def _show(self, cursor: int) -> None:
        lines = self.query_one(Lines)
        room = lines.room
        lines.show(len(self._found), lambda place: fit(((self._options[self._found[place]], ""),), room))
        lines.choose(cursor if self._found else -1)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Leave what was typed."""
        wanted = event.value.lower()
        self._found = [place for place, name in enumerate(self._options) if wanted in name.lower()]
        if event.value or self.query_one(Lines).virtual_size.height:
            self._show(0 if event.value else max(0, self._current))

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        lines = self.query_one(Lines)
        lines.choose(max(0, min(lines.cursor + by, len(self._found) - 1)) if self._found else -1)

    def on_input_submitted(self) -> None:
        """Take what the cursor is on."""
        self._take(self.query_one(Lines).cursor)

    def on_lines_chosen(self, event: Lines.Chosen) -> None:
        """Take what was clicked at."""
        self._take(event.place)

    def _take(self, place: int) -> None:
        self.dismiss(self._found[place] if 0 <= place < len(self._found) else None)
