"""Make pictures of the viewer: `python docs/screenshots/tui.py DUMP FOLDER [TRAJECTORY [PICTURE ...]]`.

Same dump, same pictures, as SVG: list, calls, table, tokens, samples and comparison of the trajectory of that
name; without one, of the first sample of the prompt whose scores differ most.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrl_agentic.records import TrajectoryRecord, read_records
from torchrl_agentic.viewer import RolloutViewer
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.samples import SampleGroups
from torchrl_agentic.viewer.state import ViewerState

SIZE = (120, 36)
PICTURES = {
    "list": ["o"],
    "calls": ["l", "e"],
    "table": ["s"],
    "tokens": ["i"],
    "compare": ["l", "c"],
    "samples": ["S", *"n" * 20],
    "keys": ["question_mark"],
}
"""What is pressed for each."""


async def picture(dump: Path, keys: list[str], place: int = 0) -> str:
    """Draw the viewer after some keys, on the trajectory in a place of the list."""
    viewer = RolloutViewer(ViewerState(Library(dump)))
    async with viewer.run_test(size=SIZE) as pilot:
        for key in ["", *["n"] * place, *keys]:
            if key:
                await pilot.press(key)
            while not viewer.is_settled:
                await pilot.pause(0.01)
        await pilot.pause()
        drawn = viewer.export_screenshot(title="torchrl-agentic view")
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # those are fetched from elsewhere


def main(dump: Path, folder: Path, trajectory: str = "", names: Sequence[str] = ()) -> None:
    """Write pictures to a folder; all without names."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [record for record in read_records(dump) if isinstance(record, TrajectoryRecord)]
    if trajectory:
        place = [record.trajectory for record in known].index(trajectory)
    else:
        groups = SampleGroups()
        for number, record in enumerate(known):
            if record.step == known[0].step:  # the viewer lists one step
                groups.add(number, record.summary)
        place = max(groups, key=lambda group: group.spread or 0.0).numbers[0]
    for name in names or PICTURES:
        (folder / f"{name}.svg").write_text(asyncio.run(picture(dump, PICTURES[name], place)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4], sys.argv[4:])
