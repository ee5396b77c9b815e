"""From parsed calls to results: look up, validate, order, limit, run, under deadlines. Plain asyncio."""

from torchrl_agentic.dispatch.dispatcher import Dispatcher, ToolSelection
from torchrl_agentic.dispatch.execution_pool import ExecutionPool, PoolMode, init_execution_pool
from torchrl_agentic.dispatch.session import Session

__all__ = ["Dispatcher", "ExecutionPool", "PoolMode", "Session", "ToolSelection", "init_execution_pool"]
