"""`RolloutViewer`, the terminal application: its keys, its dialogs, and the thread that reads the dump."""

from __future__ import annotations

import threading
from typing import ClassVar

from textual import work
from textual.app import App
from textual.binding import BindingType

from torchrl_agentic.viewer.line_view import LineView
from torchrl_agentic.viewer.main_screen import InputLine, MainScreen
from torchrl_agentic.viewer.query import Gone
from torchrl_agentic.viewer.sample_screen import Choice, SampleScreen, samples_of
from torchrl_agentic.viewer.screens import Choose, Help
from torchrl_agentic.viewer.state import ViewerState

_LOOKS_EVERY_S = 0.1


class RolloutViewer(App[None]):
    """Shows a dump in the terminal, and reads more of it on a background thread.

    Args:
        state: The state of the viewer: which trajectory is open, and how it is shown.

    Attributes:
        main: The screen below all dialogs.
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
        ("n", "screen.change('list.go', 1)", "next trajectory"),
        ("p", "screen.change('list.go', -1)", "previous trajectory"),
        ("N", "screen.change('list.go_step', 1)", "next step"),
        ("P", "screen.change('list.go_step', -1)", "previous step"),
        ("j", "screen.scroll('down')", "page down"),
        ("k", "screen.scroll('up')", "page up"),
        ("g", "screen.scroll('home')", "to the beginning"),
        ("G", "screen.scroll('end')", "to the end"),
        ("f", "type('search')", "search"),
        ("slash", "type('query')", "query"),
        ("r", "type('jump')", "request id"),
        ("enter", "screen.change('search.go', 1)", "next match"),
        ("b", "screen.change('search.go', -1)", "previous match"),
        ("escape", "screen.clear", "clear"),
        ("o", "screen.change('list.sort_next')", "sort"),
        ("a", "screen.change('list.toggle_steps')", "all steps"),
        ("t", "choose_step", "choose a step"),
        ("s", "screen.change('page.toggle_view', 'table')", "table"),
        ("x", "choose_field", "choose a field"),
        ("i", "screen.change('page.toggle_view', 'tokens')", "tokens"),
        ("S", "samples", "samples of the prompt"),
        ("c", "screen.change('page.toggle_view', 'compare')", "compare"),
        ("m", "screen.change('page.compare_next')", "next to compare"),
        ("e", "screen.change('page.toggle_reasoning')", "reasoning"),
        ("plus", "screen.change('page.show_more')", "more of long texts"),
        ("L", "load", "load all"),
        ("l", "screen.list", "list"),
        ("F", "screen.change('list.toggle_following')", "follow"),
        ("question_mark", "help", "keys"),
        ("q", "quit", "quit"),
    ]

    def __init__(self, state: ViewerState) -> None:
        super().__init__()
        self.state = state
        self.main = MainScreen(state)
        self._stopped = threading.Event()

    def get_default_screen(self) -> MainScreen:
        """Return the screen below all dialogs."""
        return self.main

    @property
    def list(self) -> LineView:
        """The list of trajectories."""
        return self.main.list

    @property
    def page(self) -> LineView:
        """The page of the open trajectory."""
        return self.main.page

    @property
    def is_settled(self) -> bool:
        """True if everything has been read and is shown."""
        library = self.state.library
        return library.is_idle and library.version == self.main.version

    def on_mount(self) -> None:
        """Start to read."""
        self._read()
        self.set_interval(_LOOKS_EVERY_S, self.main.look)

    def on_unmount(self) -> None:
        """Stop reading."""
        self._stopped.set()

    @work(thread=True)
    def _read(self) -> None:
        library = self.state.library
        while not self._stopped.is_set():
            # The pause lets the user interface get the lock while there is much to read.
            self._stopped.wait(0.001 if library.work() else 0.1)
        library.close()

    @work(thread=True, exclusive=True, group="load")
    def action_load(self) -> None:
        """Load a large trajectory completely."""
        self.call_from_thread(self.main.say, "loading …")
        try:
            self.state.page.load()
        except Gone as error:
            self.call_from_thread(self.main.say, str(error))
            return
        self.call_from_thread(self.main.say, "")
        self.call_from_thread(self.main.show)

    def action_type(self, purpose: str) -> None:
        """Open the input line."""
        self.main.query_one(InputLine).open(purpose)

    def action_choose_step(self) -> None:
        """Open the dialog to choose a step."""
        rows, steps = self.state.list, list(self.state.library.steps)
        current = steps.index(rows.step) if rows.step in steps else 0

        def take(place: int | None) -> None:
            if place is not None:
                rows.shows_all_steps = False
                rows.ask(steps[place], 0)
                self.main.show()

        self.push_screen(Choose("Which step?", [step.name for step in steps], current), take)

    def action_choose_field(self) -> None:
        """Open the dialog to choose a field of the table."""
        page = self.state.page
        try:
            names = page.fields()
        except Gone as error:
            self.main.say(str(error))
            return

        def take(place: int | None) -> None:
            if place is not None:
                page.field, page.view = names[place - 1] if place else None, "table"
                self.main.show()

        current = names.index(page.field) + 1 if page.field in names else 0
        self.push_screen(Choose("Which field?", ["all fields", *names], current), take)

    def action_samples(self) -> None:
        """Show the samples of the prompt side by side, and open the one that the user chooses."""
        rows, page = self.state.list, self.state.page
        row = rows.opened.row
        samples = None if row is None else samples_of(self.state.library, row)
        if samples is None:
            self.main.say("this line cannot be read, so that it has no prompt")
            return

        def take(choice: Choice | None) -> None:
            if choice is None:
                return
            if choice.action == "compare" and choice.row is not choice.best:
                rows.open(choice.best)
                rows.opened.mate, page.view = choice.row, "compare"
            else:
                rows.reveal(choice.row)
                page.view = "text"
            self.main.show()

        self.push_screen(SampleScreen(samples, row), take)

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())
