"""Tools of servers that speak the Model Context Protocol (MCP), over stdio, SSE and streamable HTTP.

`mcp_client`, `stdio_transport` and `http_transport` import the official SDK, and are imported
when a toolset is set up; the other modules do not need it.
"""

from torchrl_agentic.tools.mcp.approval import ChangedTool
from torchrl_agentic.tools.mcp.mcp_tool import MCPProgress, MCPTool
from torchrl_agentic.tools.mcp.server_config import MCPServerConfig
from torchrl_agentic.tools.mcp.servers_file import mcp_servers
from torchrl_agentic.tools.mcp.toolset import MCPToolset

__all__ = ["ChangedTool", "MCPProgress", "MCPServerConfig", "MCPTool", "MCPToolset", "mcp_servers"]
