"""Servers over HTTP, on loopback, each in a process of its own."""

import asyncio
import json
import logging

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from torchrl_agentic import ToolContext
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import ImagePart
from torchrl_agentic.testing.servers.demo_mcp import demo_server
from torchrl_agentic.testing.servers.embedded import serving
from torchrl_agentic.tools import MCPServerConfig, MCPToolset


@pytest.fixture(params=["http", "sse"])
def url(request):
    return request.getfixturevalue(request.param)


async def test_a_server_over_http_is_used_like_one_over_stdio(opened, url):
    """The transport is found out: the URL alone is given."""
    async with opened(MCPServerConfig(url=url)) as server:
        assert await server.text("echo", text="hi") == "hi"
        assert isinstance((await server.call("parts")).parts[1], ImagePart)
        assert (await server.call("work", steps=2)).meta["progress"]["message"] == "step 2"


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("/events", lambda: demo_server().sse_app(sse_path="/events")),
        ("/sse", lambda: demo_server().streamable_http_app(streamable_http_path="/sse")),
    ],
)
async def test_a_server_whose_url_looks_like_the_other_transport_is_used_all_the_same(opened, path, make):
    with serving(make()) as url:
        async with opened(MCPServerConfig(url=url + path)) as server:
            assert await server.text("echo", text="hi") == "hi"


async def test_a_hundred_calls_are_under_way_at_once(opened, url):
    async with opened(MCPServerConfig(url=url)) as server:
        calls = [asyncio.create_task(server.text("hold", label=f"{n}")) for n in range(100)]
        while int(await server.text("holding")) < 100:
            assert not any(call.done() for call in calls)
        await server.call("release")
        assert await asyncio.gather(*calls) == [f"{n}" for n in range(100)]


async def test_a_cancelled_call_is_cancelled_at_the_server(opened, url):
    async with opened(MCPServerConfig(url=url), request_timeout=5) as server:
        call = asyncio.create_task(server.call("hold", label="unwanted"))
        while await server.text("holding") != "1":
            assert not call.done()
        call.cancel()
        await asyncio.wait((call,))
        while (await server.call("cancelled_calls")).meta["structured"]["result"] != ["unwanted"]:
            await asyncio.sleep(0)


async def test_server_that_dies_during_a_call_gives_infra(opened, url, caplog):
    async with opened(MCPServerConfig(url=url, name="far")) as server:
        with pytest.raises(InfrastructureError, match="'far' was lost during the call"):
            await server.call("die")
        with pytest.raises(InfrastructureError, match=r"'far' cannot be used: .*connection attempts failed"):
            await server.call("echo", text="hi")


async def test_http_server_announces_new_tools(opened, url):
    async with opened(MCPServerConfig(url=url)) as server:
        before = server.toolset.revision
        await server.call("grow", name="later")
        while server.toolset.revision == before:  # that comes by another stream than the result
            await asyncio.sleep(0.001)
        assert "later" in [tool.name for tool in await server.toolset.refresh()]


async def test_each_trajectory_has_a_session_of_its_own_with_a_server_over_http(http):
    toolset = MCPToolset(MCPServerConfig(url=http), sessions="trajectory")
    tools = {tool.name: tool for tool in await toolset.setup()}
    try:
        async with (
            tools["count"].session("a") as a,
            tools["counted"].session("a") as a_too,
            tools["count"].session("b") as b,
        ):
            texts = [(await live.run({}, ToolContext("c"))).text for live in (a, a, b, a_too)]
    finally:
        await toolset.teardown()
    assert texts == ["1", "2", "1", "2"]


async def test_unreachable_server_raises_at_setup():
    with pytest.raises(
        InfrastructureError, match=r"cannot be used: .*attempts failed: http://127.0.0.1:9/mcp$"
    ):
        await MCPToolset(MCPServerConfig(url="http://127.0.0.1:9/mcp?key=hidden")).setup()


class Noted:
    """A server that stores its requests and sends scripted responses."""

    def __init__(self, answer):
        self.requests = []
        self.answer = answer
        self.app = Starlette(routes=[Route("/{path:path}", self.reply, methods=["GET", "POST", "DELETE"])])

    async def reply(self, request):
        body = await request.body()
        self.requests.append((request.method, dict(request.headers), body))
        return self.answer(request, json.loads(body) if body else {})


async def test_rejecting_server_is_reported_with_its_status_and_without_the_token(caplog):
    caplog.set_level(logging.DEBUG)
    noted = Noted(lambda *_: PlainTextResponse("no", status_code=401))
    with serving(noted.app) as url:
        config = MCPServerConfig(url=url, auth_token="t0p-s3cret", headers={"X-Key": "s3cond-s3cret"})
        with pytest.raises(InfrastructureError, match="it responded with 401") as caught:
            await MCPToolset(config).setup()
    sent = noted.requests[0][1]
    assert (sent["authorization"], sent["x-key"]) == ("Bearer t0p-s3cret", "s3cond-s3cret")
    assert len(noted.requests) == 1  # nothing is tried again with another transport
    told = caplog.text + str(caught.value)
    assert "t0p-s3cret" not in told
    assert "s3cond-s3cret" not in told


async def test_lost_session_is_reconnected():
    """Like a server that was restarted behind the same URL."""
    sessions = []
    result = {"content": [{"type": "text", "text": "hello"}]}

    def answer(request, message):
        if request.method != "POST":
            return PlainTextResponse("", status_code=405)
        if "id" not in message:
            return PlainTextResponse("", status_code=202)
        if message["method"] == "initialize":
            sessions.append(f"s{len(sessions)}")
            found = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "x", "version": "1"},
            }
            reply = JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": found})
            reply.headers["mcp-session-id"] = sessions[-1]
            return reply
        if request.headers["mcp-session-id"] != sessions[-1] or forgetful.pop("now", False):
            return PlainTextResponse("no such session", status_code=404)
        tools = [{"name": "hello", "inputSchema": {"type": "object"}}]
        found = {"tools": tools} if message["method"] == "tools/list" else result
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": found})

    forgetful = {}
    with serving(Noted(answer).app) as url:
        toolset = MCPToolset(MCPServerConfig(url=url, name="far"))
        (hello,) = await toolset.setup()
        assert (await hello.run({}, ToolContext("c"))).text == "hello"
        forgetful["now"] = True
        with pytest.raises(
            InfrastructureError, match=r"lost during the call .it no longer knows the session"
        ):
            await hello.run({}, ToolContext("c"))
        result_again = await hello.run({}, ToolContext("c"))
        assert (result_again.text, result_again.meta["restarts"]) == ("hello", 1)
        await toolset.teardown()
    assert sessions == ["s0", "s1"]


async def test_http_error_during_a_call_gives_infra(opened):
    def answer(request, message):
        if request.method != "POST":
            return PlainTextResponse("", status_code=405)
        if "id" not in message:
            return PlainTextResponse("", status_code=202)
        if message["method"] == "tools/call":
            return PlainTextResponse("overloaded", status_code=503)
        found = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "x", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "hello", "inputSchema": {"type": "object"}}]},
        }[message["method"]]
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": found})

    with serving(Noted(answer).app) as url:
        async with opened(MCPServerConfig(url=url, name="far")) as server:
            with pytest.raises(InfrastructureError, match=r"the MCP server 'far' .*503"):
                await server.call("hello")
            assert server.toolset.shared().restarts == 0
