"""The viewer on a screen without a terminal: keys in, lines out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot

from torchrl_agentic.viewer import RolloutViewer
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.query import label
from torchrl_agentic.viewer.state import ViewerState


class Screen:
    """A running viewer and the text on its screen."""

    def __init__(self, app: RolloutViewer, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds; the timeout of the test bounds the wait."""
        while not holds():
            await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        """Press keys, and wait until their effect is shown."""
        for key in keys:
            await self.pilot.press(key)
            await self.until(lambda: self.app.is_settled or len(self.app.screen_stack) > 1)

    async def type(self, text: str) -> None:
        """Type a text into the open input line, and press enter."""
        for character in text:
            await self.pilot.press("space" if character == " " else character)
        await self.press("enter")

    @property
    def lines(self) -> list[str]:
        """Lines of the screen."""
        return [strip.text for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        """Text of the screen."""
        return "\n".join(self.lines)

    @property
    def names(self) -> list[str]:
        """Labels of the listed trajectories."""
        return [label(row) for row in self.app.state.list.shown]

    @property
    def name(self) -> str:
        """Step and label of the open trajectory."""
        row = self.app.state.list.opened.row
        return "" if row is None else f"{row.step.name} {label(row)}"

    @property
    def top(self) -> str:
        """Text of the bar at the top."""
        return self.lines[0].strip()

    @property
    def bottom(self) -> str:
        """Text of the bar at the bottom."""
        return self.lines[-1].strip()


@asynccontextmanager
async def opened(path: Path, size: tuple[int, int] = (80, 24)) -> AsyncGenerator[Screen]:
    """Open a viewer, and wait until it has read its dump."""
    app = RolloutViewer(ViewerState(Library(path)))
    async with app.run_test(size=size) as pilot:
        screen = Screen(app, pilot)
        await screen.until(lambda: app.is_settled)
        yield screen
