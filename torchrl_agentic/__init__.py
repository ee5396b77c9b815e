"""Tool use for language-model reinforcement learning in TorchRL.

The names below are loaded when they are first used: importing the package loads no torch and starts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import load_lazily

_WHERE = {
    "errors": (
        "InfrastructureError", "InvalidTask", "MissingExtra", "SandboxError", "StopSignal", "ToolError",
        "ToolFailed", "UserFailed",
    ),
    "messages": (
        "CallError", "DispatchResult", "FileRefPart", "ImagePart", "JsonPart", "Message", "ParsedCall",
        "ParseResult", "Status", "TextPart", "ToolResult", "ToolResultPart", "Turn", "VideoPart",
    ),
    "tools.schema": ("json_schema_from_pydantic", "validate_args"),
    "tools.base": ("Effects", "Tool", "ToolContext", "Toolset"),
    "tools.function": ("FunctionTool", "Inject", "Injected", "function_tool", "tool"),
    "tools.loading": ("load_function_tools",),
    "tools.row_data": ("RowData",),
    "limits": ("ClusterRateLimiter", "RateLimiter"),
    "parsers": ("PARSERS", "ToolCallParser", "get_parser"),
    "records": ("Recorder", "read_records"),
    "config": ("ConfigError", "LoadedTools", "load_interactions", "load_tools"),
    "tools": (
        "Approved", "Budget", "Budgeted", "Cached", "Cassette", "Faulty", "FileEditTool", "FileReadTool",
        "FileWriteTool", "Geo3kTool", "Gsm8kTool", "Hedged", "HttpTool", "LifecycleTool",
        "MCPServerConfig", "MCPToolset", "PythonTool", "Recorded", "Renamed", "Replayed", "Retrying",
        "SandboxFusionTool", "SearchTool", "ShellTool", "StopTool", "Truncated", "Wrapped", "as_tool",
        "mcp_servers",
    ),
    "interactions": ("Interaction", "Reply", "ScriptedUser", "as_interaction"),
    "tokens.ledger": ("TokenLedger",),
    "trajectory": ("Column", "OpenTurn", "Stage"),
    "evaluation": ("evaluate",),
    "collectors": ("AgentCollector", "Score", "Task", "TaskStream", "Trajectory", "group_advantage"),
    "rollout": (
        "TaskLoader", "agent_policy", "load_tasks", "media_of", "training_policy", "trajectory_batch",
    ),
    "transforms": (
        "AgentHistory", "AnswerRewardTransform", "EndTrajectory", "RecordTransform", "ToolCompose",
        "ToolRewardTransform", "TurnTokenizer", "TurnTransform", "UserRewardTransform", "UserSimulator",
        "collate_rows",
    ),
}  # fmt: skip

__version__ = "0.1.0"
__all__ = [
    "PARSERS",
    "AgentCollector",
    "AgentHistory",
    "AnswerRewardTransform",
    "Approved",
    "Budget",
    "Budgeted",
    "Cached",
    "CallError",
    "Cassette",
    "ClusterRateLimiter",
    "Column",
    "ConfigError",
    "DispatchResult",
    "Effects",
    "EndTrajectory",
    "Faulty",
    "FileEditTool",
    "FileReadTool",
    "FileRefPart",
    "FileWriteTool",
    "FunctionTool",
    "Geo3kTool",
    "Gsm8kTool",
    "Hedged",
    "HttpTool",
    "ImagePart",
    "InfrastructureError",
    "Inject",
    "Injected",
    "Interaction",
    "InvalidTask",
    "JsonPart",
    "LifecycleTool",
    "LoadedTools",
    "MCPServerConfig",
    "MCPToolset",
    "Message",
    "MissingExtra",
    "OpenTurn",
    "ParseResult",
    "ParsedCall",
    "PythonTool",
    "RateLimiter",
    "RecordTransform",
    "Recorded",
    "Recorder",
    "Renamed",
    "Replayed",
    "Reply",
    "Retrying",
    "RowData",
    "SandboxError",
    "SandboxFusionTool",
    "Score",
    "ScriptedUser",
    "SearchTool",
    "ShellTool",
    "Stage",
    "Status",
    "StopSignal",
    "StopTool",
    "Task",
    "TaskLoader",
    "TaskStream",
    "TextPart",
    "TokenLedger",
    "Tool",
    "ToolCallParser",
    "ToolCompose",
    "ToolContext",
    "ToolError",
    "ToolFailed",
    "ToolResult",
    "ToolResultPart",
    "ToolRewardTransform",
    "Toolset",
    "Trajectory",
    "Truncated",
    "Turn",
    "TurnTokenizer",
    "TurnTransform",
    "UserFailed",
    "UserRewardTransform",
    "UserSimulator",
    "VideoPart",
    "Wrapped",
    "agent_policy",
    "as_interaction",
    "as_tool",
    "collate_rows",
    "evaluate",
    "function_tool",
    "get_parser",
    "group_advantage",
    "json_schema_from_pydantic",
    "load_function_tools",
    "load_interactions",
    "load_tasks",
    "load_tools",
    "mcp_servers",
    "media_of",
    "read_records",
    "tool",
    "training_policy",
    "trajectory_batch",
    "validate_args",
]

if TYPE_CHECKING:
    from torchrl_agentic.collectors import (
        AgentCollector,
        Score,
        Task,
        TaskStream,
        Trajectory,
        group_advantage,
    )
    from torchrl_agentic.config import ConfigError, LoadedTools, load_interactions, load_tools
    from torchrl_agentic.errors import (
        InfrastructureError,
        InvalidTask,
        MissingExtra,
        SandboxError,
        StopSignal,
        ToolError,
        ToolFailed,
        UserFailed,
    )
    from torchrl_agentic.evaluation import evaluate
    from torchrl_agentic.interactions import Interaction, Reply, ScriptedUser, as_interaction
    from torchrl_agentic.limits import ClusterRateLimiter, RateLimiter
    from torchrl_agentic.messages import (
        CallError,
        DispatchResult,
        FileRefPart,
        ImagePart,
        JsonPart,
        Message,
        ParsedCall,
        ParseResult,
        Status,
        TextPart,
        ToolResult,
        ToolResultPart,
        Turn,
        VideoPart,
    )
    from torchrl_agentic.parsers import PARSERS, ToolCallParser, get_parser
    from torchrl_agentic.records import Recorder, read_records
    from torchrl_agentic.rollout import agent_policy, media_of, training_policy, trajectory_batch
    from torchrl_agentic.rollout.load_tasks import load_tasks
    from torchrl_agentic.rollout.task_loader import TaskLoader
    from torchrl_agentic.tokens.ledger import TokenLedger
    from torchrl_agentic.tools import (
        Approved,
        Budget,
        Budgeted,
        Cached,
        Cassette,
        Faulty,
        FileEditTool,
        FileReadTool,
        FileWriteTool,
        Geo3kTool,
        Gsm8kTool,
        Hedged,
        HttpTool,
        LifecycleTool,
        MCPServerConfig,
        MCPToolset,
        PythonTool,
        Recorded,
        Renamed,
        Replayed,
        Retrying,
        SandboxFusionTool,
        SearchTool,
        ShellTool,
        StopTool,
        Truncated,
        Wrapped,
        as_tool,
        mcp_servers,
    )
    from torchrl_agentic.tools.base import Effects, Tool, ToolContext, Toolset
    from torchrl_agentic.tools.function import FunctionTool, Inject, Injected, function_tool, tool
    from torchrl_agentic.tools.loading import load_function_tools
    from torchrl_agentic.tools.row_data import RowData
    from torchrl_agentic.tools.schema import json_schema_from_pydantic, validate_args
    from torchrl_agentic.trajectory import Column, OpenTurn, Stage
    from torchrl_agentic.transforms import (
        AgentHistory,
        AnswerRewardTransform,
        EndTrajectory,
        RecordTransform,
        ToolCompose,
        ToolRewardTransform,
        TurnTokenizer,
        TurnTransform,
        UserRewardTransform,
        UserSimulator,
        collate_rows,
    )


__getattr__ = load_lazily(__name__, _WHERE)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
