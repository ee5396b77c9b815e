"""Engines: token ids in, sampled token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.engines.base import ChatEngine, Engine, Finish, OnIds, Sampled

_WHERE = {
    "base": ("ChatEngine", "Engine", "Finish", "OnIds", "Sampled"),
}
__all__ = ["ChatEngine", "Engine", "Finish", "OnIds", "Sampled"]

__getattr__ = load_lazily(__name__, _WHERE)
