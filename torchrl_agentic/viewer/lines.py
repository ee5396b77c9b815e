"""The widget that shows lines, of which there may be millions, and perhaps one of them chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from torchrl_agentic.viewer.styles import CURSOR, style
from torchrl_agentic.viewer.wrap import Line


class Lines(ScrollView, can_focus=True):
    """Shows lines, each made when it is needed. A list has a cursor, which the arrow keys move."""

    DEFAULT_CSS = """
    Lines { overflow-x: hidden; scrollbar-gutter: stable; scrollbar-size-vertical: 1; }
    Lines { scrollbar-color: #46507a; scrollbar-background: #1c2130; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up", "move(-1)", "up"),
        ("down", "move(1)", "down"),
        ("left", "app.focus_previous", "to the list"),
        ("right", "app.focus_next", "to the text"),
    ]

    class Chosen(Message):
        """Somebody chose a line. lines: of which widget."""

        def __init__(self, lines: Lines, place: int) -> None:
            super().__init__()
            self.lines, self.place = lines, place

    class Resized(Message):
        """There is another width to fill."""

    def __init__(self, *, id: str | None = None, has_cursor: bool = False) -> None:
        super().__init__(id=id)
        self.has_cursor = has_cursor
        self.cursor = -1
        self._line: Callable[[int], Line] = lambda _: ()

    @property
    def room(self) -> int:
        """How many cells a line has."""
        return max(1, self.scrollable_content_region.width)

    def show(self, count: int, line: Callable[[int], Line]) -> None:
        """Show so many lines; `line` makes one by its number."""
        self._line = line
        self.virtual_size = Size(self.room, count)
        self.refresh()

    def choose(self, place: int) -> None:
        """Put the cursor on a line, -1 for none, and bring it into view."""
        self.cursor = place
        if place >= 0:
            self.bring(place)
        self.refresh()

    def bring(self, place: int, margin: int = 0) -> None:
        """Scroll to a line, if it is out of sight."""
        top, height = self.scroll_offset.y, max(1, self.scrollable_content_region.height)
        if not top + margin <= place < top + height - margin:
            self.scroll_to(y=max(0, place - height // 3), animate=False)

    def render_line(self, y: int) -> Strip:
        """Draw a line of the screen."""
        place = y + self.scroll_offset.y
        line = self._line(place) if place < self.virtual_size.height else ()
        base = self.rich_style + CURSOR if place == self.cursor and self.has_cursor else self.rich_style
        strip = Strip([Segment(text, base + style(name)) for text, name in line])
        return strip.crop_extend(0, self.room, base)

    def action_move(self, by: int) -> None:
        """Move the cursor, or scroll where there is none."""
        if self.has_cursor:
            self._choose(max(0, min(self.cursor + by, self.virtual_size.height - 1)))
        else:
            self.scroll_relative(y=by, animate=False)

    def _choose(self, place: int) -> None:
        if 0 <= place < self.virtual_size.height:
            self.choose(place)
            self.post_message(self.Chosen(self, place))

    def on_click(self, event: events.Click) -> None:
        """Choose what is clicked at."""
        if self.has_cursor:
            self._choose(event.y + self.scroll_offset.y)

    def on_resize(self, _: events.Resize) -> None:
        """Say that there is another width."""
        self.post_message(self.Resized())
