"""A tool under another name."""

from __future__ import annotations

from typing import Any

from torchrl_agentic.tools.wrap.base import Wrapped


class Renamed(Wrapped):
    """A tool under another name: where two servers offer tools of one name, or a model knows it by another.

    name: what the model calls it. description: what the model is told; None: what it was told before. Its
    effects stay those of the tool, so that calls keep their order under any name.

    Raises:
        ValueError: the name is empty.
    """

    def __init__(self, tool: Any, name: str, description: str | None = None) -> None:
        super().__init__(tool)
        if not name:
            raise ValueError(f"{tool!r} needs a name that a model can call; got an empty one")
        self.name = name
        if description is not None:
            self.description = description

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.tool!r}, {self.name!r})"
