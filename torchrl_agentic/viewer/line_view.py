"""`LineView`, a widget that creates its lines when they are shown, and the colours of the viewer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from torchrl_agentic.viewer.text_wrap import Line

COLOURS = {
    "system": "#9aa0b0",
    "user": "#5cc8e8",
    "input": "#5cc8e8",
    "assistant": "#8bd17c",
    "output": "#8bd17c",
    "tool": "#e5b95c",
    "other": "#c8a2e8",
    "call": "#e5b95c",
    "result": "#d8cfae",
    "error": "#f07070",
    "think": "italic #8a93a8",
    "value": "#d5d8e0",
    "key": "#5cc8e8",
    "name": "bold #ffffff",
    "rule": "#5c6580",
    "faint": "#7f879c",
    "more": "italic #b0a8e0",
    "score": "#d5d8e0",
    "same": "#7f879c",
    "differs": "bold #e5b95c",
    "match": "#000000 on #c8b040",
    "focus": "bold #000000 on #ff9a3c",
    "token sampled": "#dff5d8 on #24502c",
    "token prompt": "#b8d8e8 on #1c3444",
    "token boundary": "#b0b0c0 on #30303c",
    "token call": "#f0dcb0 on #50401c",
}
"""Colours by name of a style; the suffix " title" makes a style bold."""
CURSOR = Style(bgcolor="#2c3a5c")


@functools.cache
def style(name: str) -> Style:
    """Return a style by its name."""
    found = Style.parse(COLOURS.get(name.removesuffix(" title"), ""))
    return found + Style(bold=True) if name.endswith(" title") else found


class LineView(ScrollView, can_focus=True):
    """A widget of lines, each created when it is shown. With a cursor, it is a list for the arrow keys.

    Args:
        id: Id of the widget.
        has_cursor: Whether a line can be chosen.
    """

    DEFAULT_CSS = """
    LineView { overflow-x: hidden; scrollbar-gutter: stable; scrollbar-size-vertical: 1; }
    LineView { scrollbar-color: #46507a; scrollbar-background: #1c2130; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up", "move(-1)", "up"),
        ("down", "move(1)", "down"),
        ("left", "app.focus_previous", "to the list"),
        ("right", "app.focus_next", "to the text"),
    ]

    class Chosen(Message):
        """Message: the user chose a line.

        Args:
            lines: The widget.
            place: Number of the line.
        """

        def __init__(self, lines: LineView, place: int) -> None:
            super().__init__()
            self.lines, self.place = lines, place

    class Resized(Message):
        """Message: the width has changed."""

    def __init__(self, *, id: str | None = None, has_cursor: bool = False) -> None:
        super().__init__(id=id)
        self.has_cursor = has_cursor
        self.cursor = -1
        self._line: Callable[[int], Line] = lambda _: ()

    @property
    def room(self) -> int:
        """Number of cells in a line."""
        return max(1, self.scrollable_content_region.width)

    def show(self, count: int, line: Callable[[int], Line]) -> None:
        """Show lines.

        Args:
            count: Number of lines.
            line: Function that returns a line by its number.
        """
        self._line = line
        self.virtual_size = Size(self.room, count)
        self.refresh()

    def choose(self, place: int) -> None:
        """Put the cursor on a line, or on none with -1, and scroll to it."""
        self.cursor = place
        if place >= 0:
            self.bring(place)
        self.refresh()

    def bring(self, place: int, margin: int = 0) -> None:
        """Scroll to a line if it is not visible.

        Args:
            place: Number of the line.
            margin: Number of lines to keep above and below it.
        """
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
        """Move the cursor, or scroll if there is none."""
        if self.has_cursor:
            self._choose(max(0, min(self.cursor + by, self.virtual_size.height - 1)))
        else:
            self.scroll_relative(y=by, animate=False)

    def _choose(self, place: int) -> None:
        if 0 <= place < self.virtual_size.height:
            self.choose(place)
            self.post_message(self.Chosen(self, place))

    def on_click(self, event: events.Click) -> None:
        """Choose the clicked line."""
        if self.has_cursor:
            self._choose(event.y + self.scroll_offset.y)

    def on_resize(self, _: events.Resize) -> None:
        """Report the new width."""
        self.post_message(self.Resized())
