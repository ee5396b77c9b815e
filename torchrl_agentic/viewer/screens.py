"""What lies over the viewer for a moment: the keys, and choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from torchrl_agentic.viewer.lines import Lines
from torchrl_agentic.viewer.words import KEYS, QUERIES
from torchrl_agentic.viewer.wrap import Line, fit, wrapped


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
        for number, (line, _) in enumerate(parts):
            made.append(((f"{keys if number == 0 else '':<9} ", "key"), *line))
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
