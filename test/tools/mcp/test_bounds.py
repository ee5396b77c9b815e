"""Data of a server is bounded: responses before they are parsed, and descriptions of its tools."""

import asyncio
import gzip
import json
import sys

import pytest
from fakes import mcp_raw
from helpers.loop_stalls import no_stalls
from helpers.processes import run_program
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import JSONRPCRequest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from torchrl_agentic import ToolError
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing.servers.embedded import serving
from torchrl_agentic.tools import MCPServerConfig, MCPToolset
from torchrl_agentic.tools.mcp.message_reader import ENDS, MessageReader, TooLong


@pytest.mark.parametrize("name", ["first", "second"], ids=["id first", "id last"])
async def test_too_large_response_fails_only_its_call(opened, raw, name):
    """The same process continues, and other calls are answered."""
    async with opened(raw("large"), max_result_bytes=1 << 20) as server:
        pid = await server.text("pid")
        whole = server.call(name, x=(1 << 20) - 200)
        too_large = server.call(name, x=5 << 20)
        results = await asyncio.gather(whole, too_large, server.text("pid"), return_exceptions=True)
        assert len(results[0].text) == (1 << 20) - 200
        assert isinstance(results[1], ToolError)
        assert "the response has 5,242,9" in str(results[1])
        assert "more than the allowed 1,048,576 bytes; request a smaller part" in str(results[1])
        assert results[2] == await server.text("pid") == pid


async def test_an_answer_of_many_megabytes_takes_no_memory():
    """100 MB from the server, in a process that may have 90 MiB more than it has."""
    code = f"""
import asyncio, resource
from torchrl_agentic import ToolContext, ToolError
from torchrl_agentic.tools import MCPServerConfig, MCPToolset
from torchrl_agentic.tools.mcp.message_reader import ENDS, TooLong, MessageReader

async def main():
    config = MCPServerConfig({sys.executable!r}, [{mcp_raw.__file__!r}, "large"])
    toolset = MCPToolset(config, tools=["first"])
    (tool,) = await toolset.setup()
    began = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (began + (90 << 20),) * 2)
    try:
        await tool.run({{"x": 100_000_000}}, ToolContext("c"))
    except ToolError as error:
        print(error)
    await toolset.teardown()

asyncio.run(main())
"""
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "the response has 100,000,0" in done.stdout, done.stderr


async def test_a_response_of_too_many_values_fails_only_its_call(opened, raw):
    """Each takes fifty times its bytes, and microseconds; those inside of a text are not counted."""
    async with opened(raw("large")) as server:
        pid = await server.text("pid")
        async with no_stalls():
            with pytest.raises(ToolError, match="than the allowed 50,000 values; request a smaller part"):
                await server.call("third", x=200_000)
        assert await server.text("first", x=60_000) == "," * 60_000
        assert await server.text("pid") == pid


async def test_lines_that_are_no_messages_do_not_hold_up_others(opened, raw):
    async with opened(raw("rubbish")) as server, no_stalls():
        assert await server.text("first") == "first"


async def test_a_server_may_send_many_requests_if_it_reads_the_responses(opened, raw):
    async with opened(raw("pings")) as server, no_stalls():
        assert await server.text("first") == "first"


@pytest.mark.parametrize(
    ("name", "why"), [("second", "more than 100 requests and did not read"), ("third", "the same id")]
)
async def test_a_server_that_does_not_read_the_responses_to_its_requests_is_lost(
    opened, raw, monkeypatch, name, why
):
    monkeypatch.setattr("torchrl_agentic.tools.mcp.mcp_client.UNREAD_S", 0.1)
    async with opened(raw("pings")) as server:
        async with no_stalls():
            with pytest.raises(InfrastructureError, match=why):
                await server.call(name)
        monkeypatch.undo()
        assert (await server.text("first")).endswith("first")


@settings(deadline=None, max_examples=15)
@given(
    before=st.text(max_size=30),
    number=st.integers(0, 10**6) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    is_last=st.booleans(),
)
def test_request_id_is_found_at_both_ends_of_a_message(before, number, is_last):
    """Such as other ids, nested in the omitted part."""
    result = {"result": {"content": [{"id": 7, "text": before + "é" * 3000}], "id": "no"}}
    line = json.dumps(
        {"jsonrpc": "2.0", **result, "id": number} if is_last else {"jsonrpc": "2.0", "id": number, **result},
        ensure_ascii=False,
    ).encode()
    reader = MessageReader(10)
    for other in (7, "no", number):
        reader.sent(JSONRPCRequest(jsonrpc="2.0", id=other, method="tools/call"))
    (message,) = reader.too_long(TooLong(line[:ENDS], line[-ENDS:], len(line)))
    assert message["id"] == number


@pytest.mark.parametrize(
    "head", [b'{"method": "sampling", "params": "', b"rubbish", b'["', b'{"id": 4, "x": "']
)
def test_messages_without_a_response_are_ignored(head):
    reader = MessageReader(10)
    for number in (3, 5):
        reader.sent(JSONRPCRequest(jsonrpc="2.0", id=number, method="tools/call"))
    assert reader.too_long(TooLong(head, b"x" * ENDS + b'", "id": 6}', 10_000)) == []


def answering(make):
    """Make a server over HTTP, in JSON, whose tool answers with what `make` gives for the answer as JSON."""

    async def handle(request):
        message = json.loads(await request.body())
        if "id" not in message:
            return Response(status_code=202)
        if message["method"] != "tools/call":
            return Response(
                json.dumps(
                    {
                        "jsonrpc": "2.0",
                        "id": message["id"],
                        **mcp_raw.answer("", message["method"], message.get("params") or {}),
                    }
                ),
                media_type="application/json",
            )
        result = {"content": [{"type": "text", "text": ",x" * 1_500_000}]}
        return make(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode())

    return Starlette(routes=[Route("/mcp", handle, methods=["POST"])])


def as_json(body):
    return Response(body, media_type="application/json")


def in_pieces(body):
    pieces = (body[at : at + 10_000] for at in range(0, len(body), 10_000))
    return StreamingResponse(pieces, media_type="application/json")


def as_event(body):
    return Response(b"data: " + body + b"\n\n", media_type="text/event-stream")


def in_lines(body):
    """Return an event whose data has many lines; the values of all count."""
    return as_event(body.replace(b"[], ", b"[],\r\ndata: "))


@pytest.mark.parametrize("make", [as_json, in_pieces, as_event, in_lines])
async def test_http_response_of_too_many_values_fails_only_its_call(opened, make):
    values = b'"structuredContent": {"a": [' + b"[], " * 60_000 + b'[]]}, "content"'
    with serving(answering(lambda body: make(body.replace(b'"content"', values)))) as url:
        async with opened(MCPServerConfig(url=f"{url}/mcp", transport="streamable_http")) as server:
            for _ in range(2):
                with pytest.raises(ToolError, match="more than the allowed 50,000 values"):
                    await server.call("first")
            assert server.toolset.shared().restarts == 0


@pytest.mark.parametrize("make", [as_json, in_pieces, as_event])
async def test_too_large_http_response_fails_only_its_call(opened, make):
    with serving(answering(make)) as url:
        config = MCPServerConfig(url=f"{url}/mcp", transport="streamable_http")
        async with opened(config, max_result_bytes=1 << 20) as server:
            for _ in range(2):
                with pytest.raises(ToolError, match="more than the allowed 1,048,576 bytes"):
                    await server.call("first")
            assert server.toolset.shared().restarts == 0
        async with opened(config) as server:
            assert len(await server.text("first")) == 3_000_000  # the SDK alone takes events of 1 MiB


async def test_too_large_sse_response_fails_only_its_call(opened, sse):
    """The SDK alone takes events of 1 MiB."""
    async with opened(
        MCPServerConfig(url=sse, transport="sse", name="old"), max_result_bytes=3 << 20
    ) as server:
        assert len(await server.text("echo", text="x" * (1 << 20))) == 1 << 20
        with pytest.raises(ToolError, match="more than the allowed 3,145,728 bytes"):
            await server.call("echo", text="x" * (3 << 20))
        assert await server.text("echo", text="hi") == "hi"
        assert server.toolset.shared().restarts == 0


async def test_an_answer_over_http_that_is_compressed_unasked_is_not_unpacked(opened):
    def packed(body):
        return Response(
            gzip.compress(body), media_type="application/json", headers={"Content-Encoding": "gzip"}
        )

    with serving(answering(packed)) as url:
        async with opened(MCPServerConfig(url=f"{url}/mcp", transport="streamable_http")) as server:
            with pytest.raises(
                InfrastructureError, match="compressed, although the request did not allow it"
            ):
                await server.call("first")


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("many", "'raw' lists more than 1,000 tools"),
        ("wordy", "'raw' describes its tool 'environ' with 300,[0-9]{3} characters; at most 262,144"),
    ],
)
async def test_descriptions_of_a_server_are_bounded(raw, mode, said):
    with pytest.raises(InfrastructureError, match=said):
        await MCPToolset(raw(mode)).setup()


@pytest.mark.parametrize("bound", [0, 1.5, "1"])
def test_invalid_bound_is_rejected(bound):
    with pytest.raises((TypeError, ValueError), match="max_result_bytes"):
        MCPToolset(MCPServerConfig("serve"), max_result_bytes=bound)
