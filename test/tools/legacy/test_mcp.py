"""`as_tool(MCPToolTransform())` with servers that are a method; `test_mcp_servers` has real ones."""

import asyncio
import threading
from typing import ClassVar

import pytest
from helpers.legacy_envs import call, run
from helpers.limit import limit
from torchrl.envs.llm.transforms import (
    MCPToolTransform,
)

from torchrl_agentic import as_tool
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import Status


class Server(MCPToolTransform):
    """An MCP client without a server: a loop on a thread, as the real one has it."""

    def _start_mcp_thread(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _execute_tool_async(self, server_name, tool_name, args_json):
        if tool_name == "fail":
            return {"success": False, "error": "MCP tool call failed: no"}
        if tool_name == "hang":
            await asyncio.sleep(600)
        return {"success": True, "result": f"{server_name}/{tool_name} {args_json}"}

    def close(self):
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(cancel_others(), self._loop).result(limit(10))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(limit(10))
            self._loop.close()
        self._loop = self._thread = None


async def cancel_others():
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class TestMCPToolTransform:
    servers: ClassVar = {"files": {"command": "no-such-command"}, "web": {"command": "no-such-command"}}

    @pytest.mark.parametrize(
        ("name", "where"), [("files.read", "files/read"), ("web.a.b", "web/a.b"), ("read", "files/read")]
    )
    def test_server_and_tool_are_read_off_the_name(self, chat, name, where):
        chat = chat(1, as_tool(Server(self.servers), name=name))
        assert chat.step(call(name, path="x")) == [[where + ' {"path": "x"}']]

    def test_a_failure_is_an_error(self, chat):
        chat = chat(1, as_tool(Server(self.servers), name="files.fail"))
        assert chat.step(call("files.fail")) == [["MCP tool call failed: no"]]
        assert chat.errors() == [1]

    def test_its_own_timeout_is_a_timeout(self):
        tool = as_tool(Server(self.servers, timeout=0.1), name="files.hang")
        assert run(tool, {}).status is Status.TIMEOUT
        asyncio.run(tool.teardown())

    def test_a_server_that_is_not_there_is_an_error_and_not_a_hang(self):
        tool = as_tool(MCPToolTransform({"dead": {"command": "/no/such/command"}}), name="dead.tool")
        with pytest.raises(InfrastructureError, match=r"'mcp' package.*use MCPToolset"):
            run(tool, {})
        asyncio.run(tool.teardown())

    def test_a_closed_one_is_an_error(self):
        transform = Server(self.servers)
        tool = as_tool(transform, name="files.read")
        transform.close()
        with pytest.raises(InfrastructureError, match="not running"):
            run(tool, {})
