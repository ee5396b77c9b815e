"""Engines: token ids in, sampled token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.engines.base import ChatEngine, Engine, Finish, OnIds, Sampled
    from torchrl_agentic.engines.scripted_engine import ScriptedEngine

_WHERE = {
    "base": ("ChatEngine", "Engine", "Finish", "OnIds", "Sampled"),
    "scripted_engine": ("ScriptedEngine",),
}
__all__ = ["ChatEngine", "Engine", "Finish", "OnIds", "Sampled", "ScriptedEngine"]

__getattr__ = load_lazily(__name__, _WHERE)
