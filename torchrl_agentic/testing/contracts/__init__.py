"""Promises as test classes: inherit one, and supply the object under test.

They need pytest, pytest-asyncio and hypothesis: pip install 'torchrl-agentic[test]'.
"""

from torchrl_agentic.testing.contracts.hook import HookContract
from torchrl_agentic.testing.contracts.interaction import InteractionContract
from torchrl_agentic.testing.contracts.limiter import LimiterContract
from torchrl_agentic.testing.contracts.parser import ParserContract
from torchrl_agentic.testing.contracts.repl import ReplContract
from torchrl_agentic.testing.contracts.sandbox import SandboxContract
from torchrl_agentic.testing.contracts.tool import ToolContract

__all__ = [
    "HookContract",
    "InteractionContract",
    "LimiterContract",
    "ParserContract",
    "ReplContract",
    "SandboxContract",
    "ToolContract",
]
