import os
from contextlib import asynccontextmanager

import pytest
from fakes import mcp_raw
from helpers.processes import runs

from torchrl_agentic.testing.servers import demo_mcp
from torchrl_agentic.testing.servers.embedded import serving
from torchrl_agentic.tools import MCPServerConfig, MCPToolset
from torchrl_agentic.tools.base import ToolContext


class Opened:
    """A toolset that is set up, and its tools by the server's names."""

    def __init__(self, toolset, tools):
        self.toolset = toolset
        self.tools = {tool.server_name: tool for tool in tools}

    def __getitem__(self, name):
        return self.tools[name]

    async def call(self, name, /, *, call_id="c1", **args):
        return await self.tools[name].run(args, ToolContext(call_id, trajectory="t"))

    async def text(self, name, /, **args):
        return (await self.call(name, **args)).text


@asynccontextmanager
async def _opened(config, **options):
    toolset = MCPToolset(config, **options)
    tools = await toolset.setup()
    try:
        yield Opened(toolset, tools)
    finally:
        await toolset.teardown()


@pytest.fixture
def opened():
    return _opened


@pytest.fixture
def demo():
    """How to start the demo server over stdio."""
    return demo_mcp.config


@pytest.fixture
def raw():
    """How to start the server that misbehaves."""

    def config(mode="", **options):
        return demo_mcp.config(name="raw", **options) if mode is None else _raw(mode, **options)

    return config


def _raw(mode, **options):
    import sys

    return MCPServerConfig(sys.executable, [mcp_raw.__file__, mode], **{"name": "raw", **options})


@pytest.fixture
def http():
    with serving("torchrl_agentic.testing.servers.demo_mcp:http_app") as url:
        yield f"{url}/mcp"


@pytest.fixture
def sse():
    with serving("torchrl_agentic.testing.servers.demo_mcp:sse_app") as url:
        yield f"{url}/sse"


@pytest.fixture
def is_running():
    return runs if os.path.isdir("/proc/self") else lambda pid: os.kill(pid, 0) is None
