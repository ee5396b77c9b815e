"""Make pictures of the viewer from a dump: `python docs/screenshots/tui.py DUMP FOLDER [PLACE]`.

Same dump, same pictures, as SVG: list, calls, table, tokens and comparison of the trajectory in that place.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from torchrl_agentic.viewer.app import Viewer
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.reading import Reading

SIZE = (120, 36)
PICTURES = {
    "list": ["o"],
    "calls": ["l", "e"],
    "table": ["s"],
    "tokens": ["i"],
    "compare": ["l", "c"],
    "keys": ["question_mark"],
}
"""What is pressed for each."""


async def picture(dump: Path, keys: list[str], place: int = 0) -> str:
    """Draw the viewer after some keys, on the trajectory in a place of the list."""
    viewer = Viewer(Reading(Library(dump)))
    async with viewer.run_test(size=SIZE) as pilot:
        for key in ["", *["n"] * place, *keys]:
            if key:
                await pilot.press(key)
            while not viewer.is_settled:
                await pilot.pause(0.01)
        await pilot.pause()
        return viewer.export_screenshot(title="torchrl-agentic view")


def main(dump: Path, folder: Path, place: int = 0) -> None:
    """Write all pictures to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, keys in PICTURES.items():
        (folder / f"{name}.svg").write_text(asyncio.run(picture(dump, keys, place)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
