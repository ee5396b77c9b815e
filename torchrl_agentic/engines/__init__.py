"""Engines: token ids in, sampled token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.engines.base import Engine, Finish, OnIds, Sampled
    from torchrl_agentic.engines.http import HTTPEngine
    from torchrl_agentic.engines.vllm import VLLMEngine

_WHERE = {
    "base": ("Engine", "Finish", "OnIds", "Sampled"),
    "http": ("HTTPEngine",),
    "vllm": ("VLLMEngine",),
}
__all__ = ["Engine", "Finish", "HTTPEngine", "OnIds", "Sampled", "VLLMEngine"]

__getattr__ = load_lazily(__name__, _WHERE)
