"""The lines of the bars and of the list, and two dialogs: `Help` and `Choose`."""

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
from torchrl_agentic.viewer.line_view import LineView
from torchrl_agentic.viewer.query import Row, label
from torchrl_agentic.viewer.render_record import number
from torchrl_agentic.viewer.state import ViewerState
from torchrl_agentic.viewer.text_wrap import Line, fit, plain, wrapped

KEYS = {
    "n p": "next, previous trajectory of the list",
    "N P": "next, previous step",
    "j k": "page down, page up",
    "g G": "go to the beginning, to the end",
    "tab ← →": "go to the list, to the text",
    "f": "search words in all listed trajectories",
    "enter b": "next, previous match, also in other trajectories",
    "esc": "clear the search; close the comparison or the input line",
    "/": "query: filter the list, e.g. status:timeout tool:python score<0.5 reason:max_turns -name:x words",
    "o": "sort: none, score ascending, score descending; trajectories without a score come last",
    "a": "list all steps, or one",
    "t": "choose a step",
    "r": "go to a request id in any step; its beginning is enough, without hyphens",
    "s": "text, or a table of all fields",
    "x": "choose one field of the table, or all",
    "i": "tokens, by their source",
    "S": "samples of the same prompt side by side: scores, advantages, last messages; enter opens one",
    "c m": "compare with another trajectory of the same prompt, with the next one",
    "e": "unfold or fold reasoning",
    "+": "show more of long texts",
    "L": "load all of a large trajectory",
    "l": "hide or show the list",
    "F": "follow the newest trajectory",
    "?": "show these keys",
    "q": "quit",
}
"""Keys and their actions."""
QUERIES = """\
A query is one or more conditions, all of which must hold:
  status:timeout       a call has this status, or one of several: status:timeout,crash
  tool:python          a call of this tool
  reason:max_turns     why it ended; reason:none if unknown
  score<0.5            also > <= >= = !=; score:none if it has none
  turns calls errors step advantage   are numbers too
  name:part id:ab12 group:4147 run:9f   part of a name, beginning of an id
  task:gsm-7 group:12  the task, and the number of the group in a collector
  acc=1                any extra field of a trajectory
  words "more words"   that occur in it
  -status:ok           a minus sign negates a condition"""
_NAME_CELLS = 12
_WIDE = 50  # cells of a list that has room for more than score, errors, name and question
HINTS = "? keys  f search  / query  o sort  s table  i tokens  S samples  c compare  q quit"


def row_line(row: Row, width: int, *, with_step: bool, with_run: bool = False) -> Line:
    """Return a line of the list: score, errors, name and question; turns, calls and end if there is room.

    Args:
        row: The trajectory.
        width: Number of cells in the line.
        with_step: Whether to show the step.
        with_run: Whether to show the run.
    """
    summary = row.summary
    at = row.step.name if isinstance(summary, BadLine) or row.step.file.step is None else summary.step
    step = ((f"{at:>4} ", "faint"),) if with_step else ()
    if isinstance(summary, BadLine):
        return fit((*step, (f"{'✗':>7} ", "error"), (label(row), "error")), width)
    errors = f"{summary.n_errors}✗" if summary.n_errors else ""
    more = f"{summary.n_turns:>3}t {summary.n_calls:>3}c {summary.termination_reason:<12.12} "
    name, question = label(row), plain(((summary.question, ""),))
    if question:
        origin = summary.origin
        if width < _WIDE and origin.group is not None:
            name = f"{origin.group}.{origin.index}"
        cells = _NAME_CELLS if width >= _WIDE else _NAME_CELLS // 2
        name = plain(fit(((name, ""),), cells)).ljust(cells) + " "
    return fit(
        (
            *(((f"{summary.run[:4]:<4} ", "key"),) if with_run else ()),
            *step,
            (f"{number(summary.score):>7} ", "score"),
            (f"{errors:>3} ", "error"),
            (more if width >= _WIDE else "", "faint"),
            (name, "faint" if question else ""),
            (question, ""),
        ),
        width,
    )


def head_line(width: int, *, with_step: bool, with_run: bool = False) -> Line:
    """Return the header of the list.

    Args:
        width: Number of cells in the line.
        with_step: Whether the list shows the step.
        with_run: Whether it shows the run.
    """
    more = "turn call end          " if width >= _WIDE else ""
    begin = f"{'run  ' if with_run else ''}{'step ' if with_step else ''}"
    return fit(((f"{begin}  score err {more}trajectory, question", "faint"),), width)


def top_line(state: ViewerState, width: int) -> Line:
    """Return the top bar: file, step, position, sort order, query, view, and progress of reading.

    Args:
        state: The state of the viewer.
        width: Number of cells in the line.
    """
    library, rows, page = state.library, state.list, state.page
    steps, step = library.steps, rows.step
    at = f"{step.label} ({steps.index(step) + 1}/{len(steps)})" if step in steps else "no step"
    if rows.shows_all_steps:
        at = "all steps"
    place = rows.place
    known = sum(len(step.rows) for step in steps) if rows.shows_all_steps else len(step.rows) if step else 0
    listed = len(rows.shown)
    of = f" of {known:,}" if listed != known else ""
    facts = [
        plain(fit(((str(library.path.name or library.path), ""),), max(12, width // 5))),
        at,
        f"{place + 1 if place >= 0 else '–'}/{listed:,}{of}",
        {"none": "", "score ascending": "score ↑", "score descending": "score ↓"}[rows.sort],
        rows.asked,
        {"text": "", "table": page.field or "table"}.get(page.view, page.view),
    ]
    progress = library.progress
    done = round(10 * progress)
    bar = f" {'━' * done}{'─' * (10 - done)} {progress:.0%}" if steps and progress < 1 else ""
    return fit(((" " + " · ".join(filter(None, facts)), "name"), (bar, "key")), width)


class Help(ModalScreen[None]):
    """Dialog that shows the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,question_mark,q", "dismiss", "close"),
        ("j", "page(1)", "down"),
        ("k", "page(-1)", "up"),
    ]

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        with Vertical(classes="box"):
            yield LineView()

    def on_line_view_resized(self) -> None:
        """Lay out the text for the new width."""
        lines = self.query_one(LineView)
        made = help_lines(lines.room)
        lines.show(len(made), made.__getitem__)

    def action_page(self, by: int) -> None:
        """Scroll by a page."""
        lines = self.query_one(LineView)
        lines.scroll_relative(y=by * lines.size.height, animate=False)


def help_lines(width: int) -> list[Line]:
    """Return the keys, and the syntax of queries."""
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
    """Dialog to choose one of several options; typing narrows them. Its result is the number of the option.

    Args:
        title: Question to the user.
        options: The options.
        current: Number of the option that is chosen at first.
    """

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
        """Create the widgets."""
        with Vertical(classes="box"):
            yield Static(Content(self._title))
            yield Input(placeholder="type to filter, enter to choose", compact=True)
            yield LineView(has_cursor=True)

    def on_line_view_resized(self) -> None:
        """Show the options."""
        self._show(self._found.index(self._current) if self._current in self._found else 0)

    def _show(self, cursor: int) -> None:
        lines = self.query_one(LineView)
        room = lines.room
        lines.show(len(self._found), lambda place: fit(((self._options[self._found[place]], ""),), room))
        lines.choose(cursor if self._found else -1)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the options that contain the typed text."""
        wanted = event.value.lower()
        self._found = [place for place, name in enumerate(self._options) if wanted in name.lower()]
        if event.value or self.query_one(LineView).virtual_size.height:
            self._show(0 if event.value else max(0, self._current))

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        lines = self.query_one(LineView)
        lines.choose(max(0, min(lines.cursor + by, len(self._found) - 1)) if self._found else -1)

    def on_input_submitted(self) -> None:
        """Return the option at the cursor."""
        self._take(self.query_one(LineView).cursor)

    def on_line_view_chosen(self, event: LineView.Chosen) -> None:
        """Return the clicked option."""
        self._take(event.place)

    def _take(self, place: int) -> None:
        self.dismiss(self._found[place] if 0 <= place < len(self._found) else None)
