"""Contracts, a tiny model and helpers for tests of tools, parsers, sandboxes and environments.

The package itself never imports this room; parts that it needs too, such as the tiny model, are elsewhere.
Names are imported on first use: contracts need pytest, policies need torch.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import MissingExtra, load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.rollout.scripted import ScriptedPolicy
    from torchrl_agentic.rollout.tiny_model import TINY, load_tiny
    from torchrl_agentic.testing.clock import VirtualClock
    from torchrl_agentic.testing.contracts.chat_engine_contract import ChatEngineContract
    from torchrl_agentic.testing.contracts.engine_contract import EngineContract
    from torchrl_agentic.testing.contracts.hook_contract import HookContract
    from torchrl_agentic.testing.contracts.interaction_contract import InteractionContract
    from torchrl_agentic.testing.contracts.limiter_contract import LimiterContract
    from torchrl_agentic.testing.contracts.parser_contract import ParserContract
    from torchrl_agentic.testing.contracts.repl_contract import ReplContract
    from torchrl_agentic.testing.contracts.sandbox_contract import SandboxContract
    from torchrl_agentic.testing.contracts.scorer_contract import ScorerContract
    from torchrl_agentic.testing.contracts.stage_contract import StageContract
    from torchrl_agentic.testing.contracts.tool_contract import ToolContract
    from torchrl_agentic.testing.conversations import converse
    from torchrl_agentic.testing.finished import finished_trajectory
    from torchrl_agentic.testing.in_process_workers import InProcessWorkers
    from torchrl_agentic.testing.one_call import call_tool
    from torchrl_agentic.testing.simulated_engine import EngineLoad, SimulatedEngine
    from torchrl_agentic.testing.skip_clock import SkipClockLoop, run_skipping
    from torchrl_agentic.testing.tiny import tiny_questions
    from torchrl_agentic.testing.tokenizers import byte_tokenizer, chat_tokenizer

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


_load = load_lazily(
    __name__,
    {
        "contracts.chat_engine_contract": ("ChatEngineContract",),
        "contracts.engine_contract": ("EngineContract",),
        "contracts.hook_contract": ("HookContract",),
        "contracts.interaction_contract": ("InteractionContract",),
        "contracts.limiter_contract": ("LimiterContract",),
        "contracts.parser_contract": ("ParserContract",),
        "contracts.repl_contract": ("ReplContract",),
        "contracts.sandbox_contract": ("SandboxContract",),
        "contracts.scorer_contract": ("ScorerContract",),
        "contracts.stage_contract": ("StageContract",),
        "contracts.tool_contract": ("ToolContract",),
        ".rollout.scripted": ("ScriptedPolicy",),
        ".rollout.tiny_model": ("TINY", "load_tiny"),
        "clock": ("VirtualClock",),
        "conversations": ("converse",),
        "finished": ("finished_trajectory",),
        "in_process_workers": ("InProcessWorkers",),
        "one_call": ("call_tool",),
        "simulated_engine": ("EngineLoad", "SimulatedEngine"),
        "skip_clock": ("SkipClockLoop", "run_skipping"),
        "tiny": ("tiny_questions",),
        "tokenizers": ("byte_tokenizer", "chat_tokenizer"),
    },
)


def __getattr__(name: str) -> Any:
    if name.endswith("Contract"):
        for package in ("pytest", "pytest_asyncio", "hypothesis"):
            if importlib.util.find_spec(package) is None:
                raise MissingExtra(name, package, "test")
        import pytest  # rewritten assertions show both sides

        modules = ("torchrl_agentic.testing.contracts", "torchrl_agentic.sandbox.conformance")
        pytest.register_assert_rewrite(*(module for module in modules if module not in sys.modules))
    return _load(name)
