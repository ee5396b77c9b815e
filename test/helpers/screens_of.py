"""The viewer with a screen of its own, for the tests: keys in, lines out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot

from torchrl_agentic.viewer import RolloutViewer
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.query import label
from torchrl_agentic.viewer.reading import Reading


class Screen:
    """A viewer that runs, and what is seen of it."""

    def __init__(self, app: RolloutViewer, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something to happen, however long it takes."""
        while not holds():
            await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        """Press keys, and wait until all that they ask for is read and shown."""
        for key in keys:
            await self.pilot.press(key)
            await self.until(lambda: self.app.is_settled or len(self.app.screen_stack) > 1)

    async def type(self, text: str) -> None:
        """Type a text into the line that is open, and enter it."""
        for character in text:
            await self.pilot.press("space" if character == " " else character)
        await self.press("enter")

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        return [strip.text for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(self.lines)

    @property
    def names(self) -> list[str]:
        """What is listed."""
        return [label(row) for row in self.app.reading.shown]

    @property
    def name(self) -> str:
        """What is read."""
        row = self.app.reading.row
        return "" if row is None else f"{row.step.name} {label(row)}"

    @property
    def top(self) -> str:
        """The bar above."""
        return self.lines[0].strip()

    @property
    def bottom(self) -> str:
        """The bar below."""
        return self.lines[-1].strip()


@asynccontextmanager
async def opened(path: Path, size: tuple[int, int] = (80, 24)) -> AsyncGenerator[Screen]:
    """Open a viewer, and wait until it has read its dump."""
    app = RolloutViewer(Reading(Library(path)))
    async with app.run_test(size=size) as pilot:
        screen = Screen(app, pilot)
        await screen.until(lambda: app.is_settled)
        yield screen
