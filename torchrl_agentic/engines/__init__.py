"""Engines: token ids in, sampled token ids out; or messages in, a message out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.engines.base import (
        ChatEngine,
        ContextExceeded,
        Engine,
        EnginePressure,
        EngineUnusable,
        Finish,
        OnIds,
        Sampled,
    )
    from torchrl_agentic.engines.duck_typed_engine import ensure_engine
    from torchrl_agentic.engines.engine_pool import EnginePool
    from torchrl_agentic.engines.http_engine import HTTPEngine
    from torchrl_agentic.engines.openai_engine import OpenAIEngine
    from torchrl_agentic.engines.pool_engines import PoolMember
    from torchrl_agentic.engines.recorded_engine import RecordedEngine
    from torchrl_agentic.engines.sampling import Sampling
    from torchrl_agentic.engines.scripted_engine import ScriptedEngine
    from torchrl_agentic.engines.transformers_engine import TransformersEngine
    from torchrl_agentic.engines.usage import Price, Usage
    from torchrl_agentic.engines.vllm_engine import VLLMEngine

_WHERE = {
    "base": (
        "ChatEngine",
        "ContextExceeded",
        "Engine",
        "EnginePressure",
        "EngineUnusable",
        "Finish",
        "OnIds",
        "Sampled",
    ),
    "engine_pool": ("EnginePool",),
    "http_engine": ("HTTPEngine",),
    "duck_typed_engine": ("ensure_engine",),
    "openai_engine": ("OpenAIEngine",),
    "pool_engines": ("PoolMember",),
    "recorded_engine": ("RecordedEngine",),
    "sampling": ("Sampling",),
    "scripted_engine": ("ScriptedEngine",),
    "transformers_engine": ("TransformersEngine",),
    "usage": ("Price", "Usage"),
    "vllm_engine": ("VLLMEngine",),
}
__all__ = [
    "ChatEngine",
    "ContextExceeded",
    "Engine",
    "EnginePool",
    "EnginePressure",
    "EngineUnusable",
    "Finish",
    "HTTPEngine",
    "OnIds",
    "OpenAIEngine",
    "PoolMember",
    "Price",
    "RecordedEngine",
    "Sampled",
    "Sampling",
    "ScriptedEngine",
    "TransformersEngine",
    "Usage",
    "VLLMEngine",
    "ensure_engine",
]

__getattr__ = load_lazily(__name__, _WHERE)
