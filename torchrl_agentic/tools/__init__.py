"""Tools that come with the package.

To add one: subclass `Tool` in a file of its own, and let a test inherit `testing.ToolContract`. The names are
loaded when they are first used: a tool that speaks HTTP takes longer to import than all the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchrl_agentic.errors import StopSignal

if TYPE_CHECKING:
    from torchrl_agentic.tools.file_tools import FileEditTool, FileReadTool, FileWriteTool
    from torchrl_agentic.tools.http import HttpTool
    from torchrl_agentic.tools.legacy import as_tool
    from torchrl_agentic.tools.mcp import MCPProgress, MCPServerConfig, MCPTool, MCPToolset, mcp_servers
    from torchrl_agentic.tools.python import PythonTool
    from torchrl_agentic.tools.sandbox_fusion import SandboxFusionClient, SandboxFusionTool
    from torchrl_agentic.tools.search import SearchTool
    from torchrl_agentic.tools.shell import ShellTool
    from torchrl_agentic.tools.stop import StopTool
    from torchrl_agentic.tools.verl.graders import Geo3kTool, Gsm8kTool
    from torchrl_agentic.tools.verl.image_zoom import ImageZoomTool
    from torchrl_agentic.tools.verl.lifecycle import LifecycleTool
    from torchrl_agentic.tools.wrappers import (
        Approved,
        Budget,
        Budgeted,
        Cached,
        Cassette,
        CassetteMiss,
        Faulty,
        Recorded,
        Renamed,
        Replayed,
        Retrying,
        Truncated,
        Wrapped,
    )

_WHERE = {
    "Approved": "wrappers",
    "Budget": "wrappers",
    "Budgeted": "wrappers",
    "Cached": "wrappers",
    "Cassette": "wrappers",
    "CassetteMiss": "wrappers",
    "Faulty": "wrappers",
    "FileEditTool": "file_tools",
    "FileReadTool": "file_tools",
    "FileWriteTool": "file_tools",
    "Geo3kTool": "verl.graders",
    "Gsm8kTool": "verl.graders",
    "HttpTool": "http",
    "ImageZoomTool": "verl.image_zoom",
    "LifecycleTool": "verl.lifecycle",
    "MCPProgress": "mcp",
    "MCPServerConfig": "mcp",
    "MCPTool": "mcp",
    "MCPToolset": "mcp",
    "PythonTool": "python",
    "Recorded": "wrappers",
    "Renamed": "wrappers",
    "Replayed": "wrappers",
    "Retrying": "wrappers",
    "SandboxFusionClient": "sandbox_fusion",
    "SandboxFusionTool": "sandbox_fusion",
    "SearchTool": "search",
    "ShellTool": "shell",
    "StopTool": "stop",
    "Truncated": "wrappers",
    "Wrapped": "wrappers",
    "as_tool": "legacy",
    "mcp_servers": "mcp",
}
__all__ = [
    "Approved",
    "Budget",
    "Budgeted",
    "Cached",
    "Cassette",
    "CassetteMiss",
    "Faulty",
    "FileEditTool",
    "FileReadTool",
    "FileWriteTool",
    "Geo3kTool",
    "Gsm8kTool",
    "HttpTool",
    "ImageZoomTool",
    "LifecycleTool",
    "MCPProgress",
    "MCPServerConfig",
    "MCPTool",
    "MCPToolset",
    "PythonTool",
    "Recorded",
    "Renamed",
    "Replayed",
    "Retrying",
    "SandboxFusionClient",
    "SandboxFusionTool",
    "SearchTool",
    "ShellTool",
    "StopSignal",
    "StopTool",
    "Truncated",
    "Wrapped",
    "as_tool",
    "mcp_servers",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
