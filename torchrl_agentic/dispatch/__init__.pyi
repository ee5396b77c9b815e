from torchrl_agentic.dispatch.dispatcher import Dispatcher as Dispatcher
from torchrl_agentic.dispatch.dispatcher import SessionRows as SessionRows
from torchrl_agentic.dispatch.execution_pool import ExecutionPool as ExecutionPool
from torchrl_agentic.dispatch.execution_pool import PoolMode as PoolMode
from torchrl_agentic.dispatch.execution_pool import init_execution_pool as init_execution_pool
from torchrl_agentic.dispatch.session import Session as Session
from torchrl_agentic.dispatch.session import ToolSelection as ToolSelection
