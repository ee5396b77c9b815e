"""Engines: token ids in, sampled token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.engines.base import Engine, Finish, OnIds, Sampled
    from torchrl_agentic.engines.http_engine import HTTPEngine
    from torchrl_agentic.engines.vllm_engine import VLLMEngine

_WHERE = {
    "base": ("Engine", "Finish", "OnIds", "Sampled"),
    "http_engine": ("HTTPEngine",),
    "vllm_engine": ("VLLMEngine",),
}
__all__ = ["Engine", "Finish", "HTTPEngine", "OnIds", "Sampled", "VLLMEngine"]

__getattr__ = load_lazily(__name__, _WHERE)
