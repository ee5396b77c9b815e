"""`RolloutViewer`, the terminal application: a list, a page, an input line, and the keys."""

from __future__ import annotations

import threading
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from torchrl_agentic.text import printable
from torchrl_agentic.viewer.line_view import LineView, style
from torchrl_agentic.viewer.listing import SORTS
from torchrl_agentic.viewer.query import Gone, QueryError, Row, parse
from torchrl_agentic.viewer.reading import Reading
from torchrl_agentic.viewer.sample_screen import Choice, SampleScreen, samples_of
from torchrl_agentic.viewer.screens import HINTS, Choose, Help, head_line, row_line, top_line
from torchrl_agentic.viewer.text_wrap import Line

PROMPTS = {"search": "search: ", "query": "query: ", "jump": "request id: "}
_LOOKS_EVERY_S = 0.1


class RolloutViewer(App[None]):
    """Shows a dump in the terminal, and reads more of it on a background thread.

    Args:
        reading: The state of the reader: which trajectory is open, and how it is shown.

    Attributes:
        is_following: Whether the newest trajectory is opened as soon as it is read.
        notice: Message in the bottom bar, until the next key.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layers: base; background: #14171f; color: #d5d8e0; }
    #top { height: 1; background: #252b3b; }
    #side { width: 34%; min-width: 26; max-width: 64; border-right: solid #303850; }
    #head { height: 1; }
    #bottom { height: 1; background: #1c2130; }
    #typing { height: 1; display: none; background: #252b3b; }
    #typing.open { display: block; }
    #prompt { width: auto; color: #e5b95c; }
    #typing Input { width: 1fr; }
    ModalScreen { align: center middle; }
    .box { width: 90%; max-width: 110; height: 90%; border: round #5cc8e8; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("n", "go(1)", "next trajectory"),
        ("p", "go(-1)", "previous trajectory"),
        ("N", "go_step(1)", "next step"),
        ("P", "go_step(-1)", "previous step"),
        ("j", "page(1)", "page down"),
        ("k", "page(-1)", "page up"),
        ("g", "home", "to the beginning"),
        ("G", "end", "to the end"),
        ("f", "type('search')", "search"),
        ("slash", "type('query')", "query"),
        ("r", "type('jump')", "request id"),
        ("enter", "match(1)", "next match"),
        ("b", "match(-1)", "previous match"),
        ("escape", "clear", "clear"),
        ("o", "sort", "sort"),
        ("a", "all_steps", "all steps"),
        ("t", "choose_step", "choose a step"),
        ("s", "view('table')", "table"),
        ("x", "choose_field", "choose a field"),
        ("i", "view('tokens')", "tokens"),
        ("S", "samples", "samples of the prompt"),
        ("c", "view('compare')", "compare"),
        ("m", "mate", "next to compare"),
        ("e", "unfold", "reasoning"),
        ("plus", "more", "more of long texts"),
        ("L", "load", "load all"),
        ("l", "list", "list"),
        ("F", "follow", "follow"),
        ("question_mark", "help", "keys"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading
        self.list = LineView(id="list", has_cursor=True)
        self.page = LineView(id="page")
        self.is_following = False
        self.notice = ""
        self._typing = ""
        self._typed = dict.fromkeys(PROMPTS, "")
        self._version = -1
        self._told = 0
        self._stopped = threading.Event()

    def compose(self) -> ComposeResult:
        """Create the widgets."""
        yield Static(id="top")
        with Horizontal():
            with Vertical(id="side"):
                yield Static(id="head")
                yield self.list
            yield self.page
        with Horizontal(id="typing"):
            yield Static(id="prompt")
            yield Input(compact=True)
        yield Static(id="bottom")

    @property
    def is_settled(self) -> bool:
        """True if everything has been read and is shown."""
        library = self.reading.library
        return library.is_idle and library.version == self._version

    def on_mount(self) -> None:
        """Start to read."""
        self.list.focus()
        self._read()
        self.set_interval(_LOOKS_EVERY_S, self.look)

    def on_unmount(self) -> None:
        """Stop reading."""
        self._stopped.set()

    @work(thread=True)
    def _read(self) -> None:
        library = self.reading.library
        while not self._stopped.is_set():
            # The pause lets the user interface get the lock while there is much to read.
            self._stopped.wait(0.001 if library.work() else 0.1)
        library.close()

    def look(self) -> None:
        """Show the changes since the last look."""
        library = self.reading.library
        if library.version == self._version or len(self.screen_stack) > 1 or not self.page.is_attached:
            return
        self._version = library.version
        row, focus = self.reading.row, self.reading.focus
        self.reading.catch_up()
        if self.is_following:
            self.reading.newest()
        for note in library.notes[self._told :]:
            self.say(note)
        self._told = len(library.notes)
        is_other = (row, focus) != (self.reading.row, self.reading.focus)
        self.show(with_page=is_other or self.reading.row is None)

    def on_line_view_resized(self) -> None:
        """Lay out the page again for the new width."""
        self.show()

    def show(self, *, with_page: bool = True) -> None:
        """Draw the list and the bars, and the page unless it is the same."""
        reading = self.reading
        rows, with_step = reading.shown, reading.shows_all_steps
        room = self.list.room
        with_run = len(reading.library.runs) > 1
        self.list.show(
            len(rows), lambda place: row_line(rows[place], room, with_step=with_step, with_run=with_run)
        )
        if reading.place != self.list.cursor or with_page:
            self.list.choose(reading.place)
        self._bar("#head", head_line(room, with_step=with_step, with_run=with_run))
        if with_page:
            made = reading.lay_out(self.page.room)
            self.page.show(len(made.lines), made.lines.__getitem__)
            if 0 <= reading.focus < len(made.matches) and made.matches[reading.focus] >= 0:
                self.page.bring(made.matches[reading.focus], margin=1)
        self._bar("#top", top_line(reading, self.size.width))
        self._show_bottom()

    def _show_bottom(self) -> None:
        counter = self.reading.counter
        follows = "following · " if self.is_following else ""
        notice = self.notice or HINTS
        self._bar(
            "#bottom",
            (
                (f" {counter} " if counter else " ", "focus" if counter else ""),
                (follows, "key"),
                (printable(notice), "faint"),
            ),
        )

    def _bar(self, name: str, line: Line) -> None:
        self.query_one(name, Static).update(
            Text.assemble(*((text, style(kind)) for text, kind in line), no_wrap=True, end="")
        )

    def say(self, words: str) -> None:
        """Show a message in the bottom bar, until the next key."""
        self.notice = words
        self._show_bottom()

    def on_key(self) -> None:
        """Remove the message from the bottom bar."""
        self.notice = ""

    def _turn(self) -> None:
        """Show another page, from its beginning."""
        self.page.scroll_to(y=0, animate=False)
        self.show()

    def action_go(self, by: int) -> None:
        """Open another trajectory of the list."""
        self.reading.go(by)
        self._turn()

    def action_go_step(self, by: int) -> None:
        """Open another step."""
        self.reading.go_step(by)
        self._turn()

    def on_line_view_chosen(self, event: LineView.Chosen) -> None:
        """Open the trajectory that was chosen in the list."""
        if event.place < len(self.reading.shown):
            self.reading.open(self.reading.shown[event.place])
            self._turn()

    def action_page(self, by: int) -> None:
        """Scroll by a page."""
        self.page.scroll_relative(y=by * max(1, self.page.size.height - 1), animate=False)

    def action_home(self) -> None:
        """Scroll to the beginning of the page."""
        self.page.scroll_home(animate=False)

    def action_end(self) -> None:
        """Scroll to the end of the page."""
        self.page.scroll_end(animate=False)

    def action_type(self, what: str) -> None:
        """Open the input line."""
        self._typing = what
        self.query_one("#typing").add_class("open")
        self.query_one("#prompt", Static).update(PROMPTS[what])
        line = self.query_one(Input)
        line.value = self._typed[what]
        line.focus()

    def _close_typing(self) -> None:
        self._typing = ""
        self.query_one("#typing").remove_class("open")
        self.page.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the mistake in a query while it is typed."""
        if self._typing == "query":
            try:
                parse(event.value, self.reading.library.extras)
            except QueryError as error:
                self.say(str(error))
            else:
                self.say("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Run the search, query or jump that was typed."""
        what, text = self._typing, event.value
        self._typed[what] = text
        if what == "query" and not self._ask(text):
            return
        self._close_typing()
        if what == "search":
            self.reading.search(text)
            self.reading.lay_out(self.page.room)
            if text:
                self.action_match(1)
        elif what == "jump":
            self._jump(text)

    def _ask(self, text: str) -> bool:
        try:
            self.reading.query_by(text)
        except QueryError as error:
            self.say(str(error))
            return False
        self.reading.ask()
        self._turn()
        return True

    def _jump(self, request_id: str) -> None:
        row = self.reading.library.find(request_id)
        if row is None:
            more = "" if self.reading.library.progress >= 1 else " yet; the dump is still being read"
            self.say(f"no request id begins with {request_id}{more}")
            return
        self._open(row)
        self._turn()

    def action_match(self, by: int) -> None:
        """Go to another match."""
        reading = self.reading
        if reading.library.needle is None:
            self.say("there is no search: press f to search")
            return
        row = reading.row
        if reading.next_match(by) and reading.row is not row:
            self.page.scroll_to(y=0, animate=False)
        self.show()
        if reading.focus < 0 and reading.library.is_counted:
            self.say("not found in the listed trajectories")

    def action_clear(self) -> None:
        """Close the input line or the comparison, and end the search."""
        if self._typing == "query" and self.query_one(Input).value:
            self._ask("")
        if self._typing:
            self._typed[self._typing] = ""
            self._close_typing()
        elif self.reading.view == "compare":
            self.reading.view = "text"
        self.reading.search("")
        self.show()

    def action_sort(self) -> None:
        """Sort the list in the next order."""
        self.reading.sort = SORTS[(SORTS.index(self.reading.sort) + 1) % len(SORTS)]
        self.reading.ask()
        self.show(with_page=False)

    def action_all_steps(self) -> None:
        """List all steps, or only the step of the open trajectory."""
        step = self.reading.row.step if self.reading.row is not None else None
        self.reading.shows_all_steps = not self.reading.shows_all_steps
        self.reading.ask(step)
        self.show()

    def action_choose_step(self) -> None:
        """Open the dialog to choose a step."""
        steps = list(self.reading.library.steps)
        current = steps.index(self.reading.step) if self.reading.step in steps else 0

        def take(place: int | None) -> None:
            if place is not None:
                self.reading.shows_all_steps = False
                self.reading.ask(steps[place], 0)
                self._turn()

        self.push_screen(Choose("Which step?", [step.name for step in steps], current), take)

    def action_choose_field(self) -> None:
        """Open the dialog to choose a field of the table."""
        try:
            names = self.reading.fields()
        except Gone as error:
            self.say(str(error))
            return

        def take(place: int | None) -> None:
            if place is not None:
                self.reading.field = names[place - 1] if place else None
                self.reading.view = "table"
                self._turn()

        current = names.index(self.reading.field) + 1 if self.reading.field in names else 0
        self.push_screen(Choose("Which field?", ["all fields", *names], current), take)

    def action_view(self, view: str) -> None:
        """Show the trajectory in another view, or as text again."""
        if view == "compare" and self.reading.next_mate(0) is None:
            self.say("no other trajectory of this step has the same prompt")
            return
        self.reading.view = "text" if self.reading.view == view else view
        self.reading.focus = -1
        self._turn()

    def action_samples(self) -> None:
        """Show the samples of the prompt side by side, and open the one that the user chooses."""
        reading = self.reading
        samples = None if reading.row is None else samples_of(reading.library, reading.row)
        if samples is None:
            self.say("this line cannot be read, so that it has no prompt")
            return

        def take(choice: Choice | None) -> None:
            if choice is None:
                return
            if choice.action == "compare" and choice.row is not choice.best:
                reading.open(choice.best)
                reading.mate, reading.view = choice.row, "compare"
            else:
                self._open(choice.row)
                reading.view = "text"
            self._turn()

        self.push_screen(SampleScreen(samples, reading.row), take)

    def _open(self, row: Row) -> None:
        """Open a trajectory, and list its step without a query unless it is listed."""
        if row not in self.reading.shown:
            self.reading.query_by("")
            self._typed["query"] = ""
            self.reading.ask(row.step)
        self.reading.open(row)

    def action_mate(self) -> None:
        """Compare with the next trajectory."""
        if self.reading.view == "compare":
            self.reading.next_mate()
            self.show()

    def action_unfold(self) -> None:
        """Show or hide reasoning."""
        self.reading.is_unfolded = not self.reading.is_unfolded
        self.show()

    def action_more(self) -> None:
        """Show ten times as much of long texts."""
        self.reading.most *= 10
        self.show()

    @work(thread=True, exclusive=True, group="load")
    def action_load(self) -> None:
        """Load a large trajectory completely."""
        self.call_from_thread(self.say, "loading …")
        try:
            self.reading.load()
        except Gone as error:
            self.call_from_thread(self.say, str(error))
            return
        self.call_from_thread(self.say, "")
        self.call_from_thread(self.show)

    def action_list(self) -> None:
        """Hide or show the list."""
        side = self.query_one("#side")
        side.display = not side.display
        (self.list if side.display else self.page).focus()

    def action_follow(self) -> None:
        """Start or stop following the newest trajectory."""
        self.is_following = not self.is_following
        if self.is_following:
            self.reading.newest()
        self._turn()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())
