"""Contracts as test classes: inherit one, and supply the object under test.

They need pytest, pytest-asyncio and hypothesis: pip install 'torchrl-agentic[test]'.
"""

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

__all__ = [
    "ChatEngineContract",
    "EngineContract",
    "HookContract",
    "InteractionContract",
    "LimiterContract",
    "ParserContract",
    "ReplContract",
    "SandboxContract",
    "ScorerContract",
    "StageContract",
    "ToolContract",
]
