"""From parsed calls to results, in plain asyncio: look up, validate, order, limit and run, under deadlines.

A message takes this way: `Dispatcher.run` → `resolve` → `TurnRun.start` → `dependencies` → `Session.live` →
the tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

if TYPE_CHECKING:
    from torchrl_agentic.dispatch.dispatcher import Dispatcher, SessionRows
    from torchrl_agentic.dispatch.execution_pool import ExecutionPool, PoolMode, init_execution_pool
    from torchrl_agentic.dispatch.session import Session, ToolSelection

__all__ = [
    "Dispatcher",
    "ExecutionPool",
    "PoolMode",
    "Session",
    "SessionRows",
    "ToolSelection",
    "init_execution_pool",
]

__getattr__ = load_lazily(
    __name__,
    {
        "dispatcher": ("Dispatcher", "SessionRows"),
        "execution_pool": (
            "ExecutionPool",
            "PoolMode",
            "init_execution_pool",
        ),
        "session": (
            "Session",
            "ToolSelection",
        ),
    },
)
