"""The viewer of dumps, `torchrl-agentic view`: in the terminal, as text, as a page. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_agentic.viewer.app import RolloutViewer

__all__ = ["RolloutViewer"]


def __getattr__(name: str) -> Any:
    """Load the terminal's part, which needs textual, when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrl_agentic.viewer import app

    return getattr(app, name)
