"""Contracts, a tiny model and helpers for tests of tools, parsers, sandboxes and environments.

The package itself never imports this room; parts that it needs too, such as the tiny model, are elsewhere.
Names are imported on first use: contracts need pytest, policies need torch.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import MissingExtra

if TYPE_CHECKING:
    from torchrl_agentic.rollout.scripted import ScriptedPolicy
    from torchrl_agentic.testing.clock import VirtualClock
    from torchrl_agentic.testing.contracts import (
        ChatEngineContract,
        EngineContract,
        HookContract,
        InteractionContract,
        LimiterContract,
        ParserContract,
        ReplContract,
        SandboxContract,
        ScorerContract,
        StageContract,
        ToolContract,
    )
    from torchrl_agentic.testing.conversations import converse
    from torchrl_agentic.testing.finished import finished_trajectory
    from torchrl_agentic.testing.in_process_workers import InProcessWorkers
    from torchrl_agentic.testing.one_call import call_tool
    from torchrl_agentic.testing.simulated_engine import EngineLoad, SimulatedEngine
    from torchrl_agentic.testing.skip_clock import SkipClockLoop, run_skipping
    from torchrl_agentic.testing.tiny import TINY, load_tiny, tiny_questions
    from torchrl_agentic.testing.tokenizers import byte_tokenizer, chat_tokenizer

_WHERE = {
    "ChatEngineContract": "testing.contracts",
    "EngineContract": "testing.contracts",
    "HookContract": "testing.contracts",
    "InteractionContract": "testing.contracts",
    "InProcessWorkers": "testing.in_process_workers",
    "LimiterContract": "testing.contracts",
    "ParserContract": "testing.contracts",
    "ReplContract": "testing.contracts",
    "SandboxContract": "testing.contracts",
    "ScorerContract": "testing.contracts",
    "StageContract": "testing.contracts",
    "ToolContract": "testing.contracts",
    "ScriptedPolicy": "rollout.scripted",
    "EngineLoad": "testing.simulated_engine",
    "SimulatedEngine": "testing.simulated_engine",
    "SkipClockLoop": "testing.skip_clock",
    "VirtualClock": "testing.clock",
    "byte_tokenizer": "testing.tokenizers",
    "call_tool": "testing.one_call",
    "chat_tokenizer": "testing.tokenizers",
    "converse": "testing.conversations",
    "finished_trajectory": "testing.finished",
    "TINY": "rollout.tiny_model",
    "load_tiny": "rollout.tiny_model",
    "run_skipping": "testing.skip_clock",
    "tiny_questions": "testing.tiny",
}
__all__ = [
    "TINY",
    "ChatEngineContract",
    "EngineContract",
    "EngineLoad",
    "HookContract",
    "InProcessWorkers",
    "InteractionContract",
    "LimiterContract",
    "ParserContract",
    "ReplContract",
    "SandboxContract",
    "ScorerContract",
    "ScriptedPolicy",
    "SimulatedEngine",
    "SkipClockLoop",
    "StageContract",
    "ToolContract",
    "VirtualClock",
    "byte_tokenizer",
    "call_tool",
    "chat_tokenizer",
    "converse",
    "finished_trajectory",
    "load_tiny",
    "run_skipping",
    "tiny_questions",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _WHERE[name] == "testing.contracts":
        for package in ("pytest", "pytest_asyncio", "hypothesis"):
            if importlib.util.find_spec(package) is None:
                raise MissingExtra(name, package, "test")
        import pytest  # rewritten assertions show both sides

        modules = ("torchrl_agentic.testing.contracts", "torchrl_agentic.sandbox.conformance")
        pytest.register_assert_rewrite(*(module for module in modules if module not in sys.modules))
    return getattr(importlib.import_module(f"torchrl_agentic.{_WHERE[name]}"), name)
