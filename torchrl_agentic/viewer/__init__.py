"""The viewer of dumps, `torchrl-agentic view`: in a terminal, as text or as an HTML page; needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_agentic.viewer.app import RolloutViewer

__all__ = ["RolloutViewer"]


def __getattr__(name: str) -> Any:
    """Import the terminal viewer, which needs textual, on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrl_agentic.viewer import app

    return getattr(app, name)
