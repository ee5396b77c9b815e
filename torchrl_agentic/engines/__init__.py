"""Engines: token ids in, sampled token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.engines.base import Engine, Finish, OnIds, Sampled
    from torchrl_agentic.engines.lock_step import LockStep
    from torchrl_agentic.engines.scripted_engine import ScriptedEngine
    from torchrl_agentic.engines.transformers_engine import TransformersEngine

_WHERE = {
    "base": ("Engine", "Finish", "OnIds", "Sampled"),
    "lock_step": ("LockStep",),
    "scripted_engine": ("ScriptedEngine",),
    "transformers_engine": ("TransformersEngine",),
}
__all__ = ["Engine", "Finish", "LockStep", "OnIds", "Sampled", "ScriptedEngine", "TransformersEngine"]

__getattr__ = load_lazily(__name__, _WHERE)
