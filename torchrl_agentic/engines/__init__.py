"""Engines: token ids in, sampled token ids out; or messages in, a message out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.engines.base import ChatEngine, Engine, Finish, OnIds, Sampled
    from torchrl_agentic.engines.http_engine import HTTPEngine
    from torchrl_agentic.engines.lock_step import LockStep
    from torchrl_agentic.engines.scripted_engine import ScriptedEngine
    from torchrl_agentic.engines.transformers_engine import TransformersEngine
    from torchrl_agentic.engines.vllm_engine import VLLMEngine

_WHERE = {
    "base": (
        "ChatEngine",
        "Engine",
        "Finish",
        "OnIds",
        "Sampled",
    ),
    "http_engine": ("HTTPEngine",),
    "lock_step": ("LockStep",),
    "scripted_engine": ("ScriptedEngine",),
    "transformers_engine": ("TransformersEngine",),
    "vllm_engine": ("VLLMEngine",),
}
__all__ = [
    "ChatEngine",
    "Engine",
    "Finish",
    "HTTPEngine",
    "LockStep",
    "OnIds",
    "Sampled",
    "ScriptedEngine",
    "TransformersEngine",
    "VLLMEngine",
]

__getattr__ = load_lazily(__name__, _WHERE)
