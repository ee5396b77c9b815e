"""`MainScreen`: the list, the page, the input line and the bars."""

from __future__ import annotations

import operator
from typing import Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input, Static

from torchrl_agentic.text import printable
from torchrl_agentic.viewer.line_view import LineView, style
from torchrl_agentic.viewer.query import QueryError, parse
from torchrl_agentic.viewer.screens import HINTS, head_line, row_line, top_line
from torchrl_agentic.viewer.state import ViewerState
from torchrl_agentic.viewer.text_wrap import Line

PROMPTS = {"search": "search: ", "query": "query: ", "jump": "request id: "}


class InputLine(Horizontal):
    """The line in which a search, a query or a request id is typed.

    Attributes:
        purpose: What is typed, a key of `PROMPTS`; empty while the line is closed.
        typed: The last input for each purpose.
    """

    class Entered(Message):
        """Message: the user pressed enter.

        Args:
            purpose: What was typed, a key of `PROMPTS`.
            text: The text.
        """

        def __init__(self, purpose: str, text: str) -> None:
            super().__init__()
            self.purpose, self.text = purpose, text

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.purpose = ""
        self.typed = dict.fromkeys(PROMPTS, "")

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield Static(id="prompt")
        yield Input(compact=True)

    def open(self, purpose: str) -> None:
        """Open the line.

        Args:
            purpose: What is typed, a key of `PROMPTS`.
        """
        self.purpose = purpose
        self.add_class("open")
        self.query_one("#prompt", Static).update(PROMPTS[purpose])
        line = self.query_one(Input)
        line.value = self.typed[purpose]
        line.focus()

    def close(self) -> None:
        """Close the line."""
        self.purpose = ""
        self.remove_class("open")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the input, and report it."""
        event.stop()
        self.typed[self.purpose] = event.value
        self.post_message(self.Entered(self.purpose, event.value))


class MainScreen(Screen[None]):
    """Draws the state of the viewer, and changes it by the keys.

    Args:
        state: The state.

    Attributes:
        list: The list of trajectories.
        page: The page of the open trajectory.
        version: The version of the library that is shown.
    """

    AUTO_FOCUS = "#list"

    def __init__(self, state: ViewerState) -> None:
        super().__init__()
        self.state = state
        self.list = LineView(id="list", has_cursor=True)
        self.page = LineView(id="page")
        self.version = -1
        self._notice = ""
        self._n_notes = 0  # notes of the library that were shown
        self._subject: object = None

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield Static(id="top")
        with Horizontal():
            with Vertical(id="side"):
                yield Static(id="head")
                yield self.list
            yield self.page
        yield InputLine(id="typing")
        yield Static(id="bottom")

    def look(self) -> None:
        """Show the changes since the last look."""
        state, library = self.state, self.state.library
        if library.version == self.version or not self.is_current or not self.page.is_attached:
            return
        self.version = library.version
        row, focus = state.list.opened.row, state.list.opened.focus
        state.catch_up()
        for note in library.notes[self._n_notes :]:
            self.say(note)
        self._n_notes = len(library.notes)
        opened = state.list.opened
        self.show(with_page=(row, focus) != (opened.row, opened.focus) or opened.row is None)

    def on_line_view_resized(self) -> None:
        """Lay out the page again for the new width."""
        self.show()

    def show(self, *, with_page: bool = True) -> None:
        """Draw the list, the bars, and the page if it has changed."""
        state, rows = self.state, self.state.list.shown
        with_step, with_run = state.list.shows_all_steps, len(state.library.runs) > 1
        room, place = self.list.room, state.list.place
        self.list.show(
            len(rows), lambda place: row_line(rows[place], room, with_step=with_step, with_run=with_run)
        )
        if place != self.list.cursor or with_page:
            self.list.choose(place)
        self._bar("#head", head_line(room, with_step=with_step, with_run=with_run))
        if with_page:
            if state.page.subject != self._subject:
                self._subject = state.page.subject
                self.page.scroll_to(y=0, animate=False)
            made, focus = state.page.lay_out(self.page.room), state.list.opened.focus
            self.page.show(len(made.lines), made.lines.__getitem__)
            if 0 <= focus < len(made.matches) and made.matches[focus] >= 0:
                self.page.bring(made.matches[focus], margin=1)
        self._bar("#top", top_line(state, self.size.width))
        self.say(self._notice)

    def say(self, words: str) -> None:
        """Show a message in the bottom bar, until the next key."""
        self._notice = words
        counter = self.state.search.counter
        follows = "following · " if self.state.list.is_following else ""
        self._bar(
            "#bottom",
            (
                (f" {counter} " if counter else " ", "focus" if counter else ""),
                (follows, "key"),
                (printable(words or HINTS), "faint"),
            ),
        )

    def _bar(self, name: str, line: Line) -> None:
        self.query_one(name, Static).update(
            Text.assemble(*((text, style(kind)) for text, kind in line), no_wrap=True, end="")
        )

    def on_key(self) -> None:
        """Remove the message from the bottom bar."""
        self._notice = ""

    def action_change(self, method: str, *arguments: int | str) -> None:
        """Change the state, and show it.

        Args:
            method: A method of the state, such as "list.go"; it may return a message.
            arguments: Its arguments.
        """
        words = operator.attrgetter(method)(self.state)(*arguments)
        self.show()
        if words:
            self.say(words)

    def on_line_view_chosen(self, event: LineView.Chosen) -> None:
        """Open the trajectory that was chosen in the list."""
        if event.place < len(self.state.list.shown):
            self.state.list.open(self.state.list.shown[event.place])
            self.show()

    def action_scroll(self, to: Literal["up", "down", "home", "end"]) -> None:
        """Scroll by a page, or to an end of it."""
        if to == "home":
            self.page.scroll_home(animate=False)
        elif to == "end":
            self.page.scroll_end(animate=False)
        else:
            pages = 1 if to == "down" else -1
            self.page.scroll_relative(y=pages * max(1, self.page.size.height - 1), animate=False)

    def action_list(self) -> None:
        """Hide or show the list."""
        side = self.query_one("#side")
        side.display = not side.display
        (self.list if side.display else self.page).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the mistake in a query while it is typed."""
        if self.query_one(InputLine).purpose == "query":
            try:
                parse(event.value, self.state.library.extras)
            except QueryError as error:
                self.say(str(error))
            else:
                self.say("")

    def on_input_line_entered(self, event: InputLine.Entered) -> None:
        """Run the search, query or jump that was typed."""
        if event.purpose == "query":
            try:
                self.state.list.query_by(event.text)
            except QueryError as error:
                self.say(str(error))
                return
            self.state.list.ask()
        self.query_one(InputLine).close()
        self.page.focus()
        if event.purpose == "search":
            self.state.search.begin(event.text)
            self.state.page.lay_out(self.page.room)
            if event.text:
                self.action_change("search.go", 1)
        elif event.purpose == "jump":
            self.action_change("jump", event.text)
        else:
            self.show()

    def action_clear(self) -> None:
        """Close the input line or the comparison, and end the search."""
        line = self.query_one(InputLine)
        if line.purpose == "query" and line.query_one(Input).value:
            self.state.list.query_by("")
            self.state.list.ask()
        if line.purpose:
            line.typed[line.purpose] = ""
            line.close()
            self.page.focus()
        elif self.state.page.view == "compare":
            self.state.page.view = "text"
        self.action_change("search.begin", "")
