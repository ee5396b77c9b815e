"""One trajectory, from its task to its reward, in plain Python: both borders run the same stages.

A message takes this way: `Episode.open_turn` → the stages, in the order of the transforms → what follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.trajectory.columns import Column
    from torchrl_agentic.trajectory.episode import Episode, OpenTurn, Stage

__all__ = ["Column", "Episode", "OpenTurn", "Stage"]

__getattr__ = load_lazily(
    __name__,
    {"columns": ("Column",), "episode": ("Episode", "OpenTurn", "Stage")},
)
