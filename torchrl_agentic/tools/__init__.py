"""Tools that come with the package.

To add one: subclass `Tool` in a file of its own, and let a test inherit `testing.ToolContract`. The names are
loaded when they are first used: a tool that speaks HTTP takes longer to import than all the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_agentic.errors import StopSignal, load_lazily

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
    from torchrl_agentic.tools.verl.lifecycle import LifecycleTool
    from torchrl_agentic.tools.wrappers.approved import Approved
    from torchrl_agentic.tools.wrappers.base import Wrapped
    from torchrl_agentic.tools.wrappers.budget import Budget, Budgeted
    from torchrl_agentic.tools.wrappers.cached import Cached
    from torchrl_agentic.tools.wrappers.cassette import Cassette, CassetteMiss, Recorded, Replayed
    from torchrl_agentic.tools.wrappers.faulty import Faulty
    from torchrl_agentic.tools.wrappers.hedged import Hedged
    from torchrl_agentic.tools.wrappers.renamed import Renamed
    from torchrl_agentic.tools.wrappers.retrying import Retrying
    from torchrl_agentic.tools.wrappers.truncated import Truncated

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
    "Hedged",
    "HttpTool",
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


__getattr__ = load_lazily(
    __name__,
    {
        "file_tools": (
            "FileEditTool",
            "FileReadTool",
            "FileWriteTool",
        ),
        "http": ("HttpTool",),
        "legacy": ("as_tool",),
        "mcp": (
            "MCPProgress",
            "MCPServerConfig",
            "MCPTool",
            "MCPToolset",
            "mcp_servers",
        ),
        "python": ("PythonTool",),
        "sandbox_fusion": (
            "SandboxFusionClient",
            "SandboxFusionTool",
        ),
        "search": ("SearchTool",),
        "shell": ("ShellTool",),
        "stop": ("StopTool",),
        "verl.graders": (
            "Geo3kTool",
            "Gsm8kTool",
        ),
        "verl.lifecycle": ("LifecycleTool",),
        "wrappers.approved": ("Approved",),
        "wrappers.base": ("Wrapped",),
        "wrappers.budget": (
            "Budget",
            "Budgeted",
        ),
        "wrappers.cached": ("Cached",),
        "wrappers.cassette": (
            "Cassette",
            "CassetteMiss",
            "Recorded",
            "Replayed",
        ),
        "wrappers.faulty": ("Faulty",),
        "wrappers.hedged": ("Hedged",),
        "wrappers.renamed": ("Renamed",),
        "wrappers.retrying": ("Retrying",),
        "wrappers.truncated": ("Truncated",),
    },
)
