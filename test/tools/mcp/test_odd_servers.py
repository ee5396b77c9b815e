"""Odd bytes and odd results of a server have the same outcome over each transport, at once."""

import asyncio
import json
import sys

import pytest
from fakes import mcp_odd
from helpers.limit import limit
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import JSONRPCRequest

from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.messages import FileRefPart, JsonPart
from torchrl_agentic.testing.servers.embedded import serving
from torchrl_agentic.tools import MCPServerConfig, MCPToolset
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.mcp.message_reader import NO_RESPONSE, MessageReader

UNREADABLE = "INFRA: the MCP server 'odd' sent a response that cannot be read: "
OUTCOMES = {
    **dict.fromkeys(mcp_odd.TOOLS, "x"),
    "half_emoji": "party \ufffd",
    "latin_1": "caf\ufffd",
    "control": "a\x01b\tc",
    "newline": "a\nb",
    "many_digits": JsonPart({"v": "9" * 5000}),
    "not_a_number": '{"v": "NaN"}',
    "deep": UNREADABLE + "nested more than 200 levels deep; make it flatter",
    "cut": UNREADABLE,
    "long": "ERROR: the response has",
    "number": UNREADABLE + "its result is no object",
    "null": "",
    "php": "",
    "neither": UNREADABLE + "it has neither a result nor an error",
    "text_error": "ERROR: boom",
    "odd_error": "ERROR: null",
    "input": "ERROR: the tool needs input from a user, which is not available",
    "task": "ERROR: the tool has started a task, and tasks are not supported",
    "only_structured": '{"a": 1}',
    "list_structured": '{"result": [1, 2]}',
    "null_flags": "",
    "odd_parts": (
        "[content of the unknown type 'hologram']", "[markdown]\n# hi", "a", "",
        "[image without its data or mimeType]", "[resource]\nno uri", FileRefPart("file:///a", None),
        "bare", "7",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def odd():
    """How to reach the server over each transport."""
    with serving("fakes.mcp_odd:app") as url:
        yield {
            "stdio": MCPServerConfig(sys.executable, [mcp_odd.__file__], name="odd"),
            "json": MCPServerConfig(url=f"{url}/json", name="odd", transport="streamable_http"),
            "events": MCPServerConfig(url=f"{url}/events", name="odd", transport="streamable_http"),
            "sse": MCPServerConfig(url=f"{url}/sse", name="odd"),
        }


async def outcome(tool, expected, **args):
    """Call a tool, and return what is comparable with the expectation."""
    try:
        async with asyncio.timeout(limit(10)):
            result = await tool.run(args, ToolContext("c"))
    except InfrastructureError as error:
        return f"INFRA: {error}"[: max(len(expected), 30)]
    except ToolError as error:
        return f"ERROR: {error}"[: len(expected)]
    if result.is_error:
        return f"ERROR: {result.text}"[: len(expected)]
    parts = tuple(part if isinstance(part, FileRefPart) else str(part) for part in result.parts)
    if isinstance(expected, tuple):
        return parts
    return result.parts[0] if isinstance(expected, JsonPart) else "\n".join(map(str, parts))


@pytest.mark.parametrize("transport", ["stdio", "json", "events", "sse"])
async def test_odd_answers_have_the_same_outcome_over_each_transport(opened, odd, transport, caplog):
    async with opened(odd[transport], max_result_bytes=1 << 20) as server:
        found = {name: await outcome(server[name], wanted) for name, wanted in OUTCOMES.items()}
        assert found == OUTCOMES
        assert server.toolset.shared().restarts == 0
        mended = server["mended"]
        assert (mended.description, mended.output_schema) == ("", None)
        assert (mended.input_schema, mended.annotations) == ({"type": "object"}, {"readOnlyHint": True})
        assert await outcome(mended, "x") == "x"
        assert set(server.tools) == {*mcp_odd.TOOLS, "mended", "slow", "silent"}
    for name in (
        f"'number {len(mcp_odd.TOOLS) + 4}'",
        "'no_schema'",
        "'bad_schema'",
        "'other_schema'",
        "'tasks'",
    ):
        assert f"the MCP server 'odd' has a tool {name} that is not offered: i" in caplog.text


async def test_a_tool_that_was_asked_for_and_cannot_be_offered_is_an_error(odd):
    with pytest.raises(ValueError, match=r"'tasks', which .*'odd' .*task only \(taskSupport 'required'\)"):
        await MCPToolset(odd["stdio"], tools=["text_id", "tasks"]).setup()


async def test_a_request_that_a_server_over_sse_refuses_fails_alone_and_at_once(opened, odd):
    async with opened(odd["sse"]) as server:
        refused = await outcome(server["mended"], "", refuse=True)
        assert refused.startswith("INFRA: the MCP server 'odd' re")
        assert await outcome(server["mended"], "x") == "x"


@pytest.mark.parametrize("transport", ["json", "events"])
async def test_a_response_over_http_without_an_answer_ends_its_call_alone(opened, odd, transport):
    async with opened(odd[transport]) as server:
        said = "INFRA: the MCP server 'odd' sent a response without an answer to the request"
        assert await outcome(server["silent"], said) == said
        assert server.toolset.shared().restarts == 0
        assert await outcome(server["mended"], "x") == "x"
        assert server.toolset.shared().restarts == 0


@pytest.mark.parametrize(
    ("extends", "deadline_s", "is_answered"), [(True, None, True), (False, None, False), (True, 0.3, False)]
)
async def test_progress_extends_the_timeout_up_to_the_deadline(opened, odd, extends, deadline_s, is_answered):
    timeout = limit(0.5)
    async with opened(odd["stdio"], progress_extends_timeout=extends) as server:
        server.toolset.request_timeout = timeout
        deadline = None if deadline_s is None else asyncio.get_running_loop().time() + limit(deadline_s)
        call = server["slow"].run({"seconds": 2 * timeout}, ToolContext("c", deadline=deadline))
        if is_answered:
            assert (await call).text == "x"
        else:
            with pytest.raises(TimeoutError, match="no response within"):
                await call


def asked(*numbers):
    """Return a reader with open requests."""
    reader = MessageReader(1 << 20)
    for number in numbers:
        reader.sent(JSONRPCRequest(jsonrpc="2.0", id=number, method="tools/call", params={"name": "t"}))
    return reader


@pytest.mark.parametrize(
    ("line", "ended"),
    [
        (b'{"jsonrpc": "2.0", "id": 2, "result": {"content": [}}', [2]),
        (b'{"result": {"content": [}}, "id": "2"}', [2]),
        (b'{"jsonrpc": "2.0", "id": 9, "result": {"content": [}}', []),
        (b'{"jsonrpc": "2.0", "result": [}', []),
        (b'{"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "no"}}', []),
        (b'{"jsonrpc": "2.0", "id": true, "result": {}}', []),
        (b'{"jsonrpc": "2.0", "method": "sampling/createMessage", "id": 2, "params": {]}', []),
        (b'DEBUG got {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {}}', []),
    ],
)
def test_a_broken_line_ends_only_the_request_whose_id_it_has(line, ended):
    reader = asked(1, 2)
    found = reader.read_line(line) + reader.read_part()
    assert [message["id"] for message in found] == ended
    assert all(message["error"]["data"] is NO_RESPONSE for message in found)


def test_a_line_of_a_message_that_never_ends_delays_no_other_message():
    reader = asked(1, 2)
    assert reader.read_line(b'{"jsonrpc": "2.0", "id": 1, "result": {"content": [') == []
    assert reader.has_part
    broken, good = reader.read_line(b'{"jsonrpc": "2.0", "id": 2, "result": {}}')
    assert (broken["id"], good["id"]) == (1, 2)
    assert broken["error"]["data"] is NO_RESPONSE
    assert good["result"] == {"content": [], "isError": False}


@given(
    st.lists(
        st.binary(max_size=60) | st.sampled_from([b"{", b'{"id":', b"}", b"[", b'"', b'{"jsonrpc":"2.0"}'])
    )
)
def test_no_bytes_break_the_reader(lines):
    reader = asked(1, 2)
    for line in lines:
        reader.read_line(line)
        reader.read(line, 1)
    reader.read_part()


JSONS = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(JSONS, st.sampled_from([None, 0, 2]), st.booleans())
def test_structured_content_arrives_as_it_was_however_it_is_laid_out(value, indent, is_ascii):
    value = json.loads(json.dumps(value).encode("utf-8", "replace"))
    result = {"content": [], "structuredContent": {"v": value}}
    text = json.dumps({"jsonrpc": "2.0", "id": 7, "result": result}, indent=indent, ensure_ascii=is_ascii)
    reader = asked(1, 7)
    found = [
        message
        for line in text.encode("utf-8", "surrogatepass").split(b"\n")
        for message in reader.read_line(line)
    ]
    assert [message["id"] for message in found] == [7]
    if "\\ud" not in json.dumps(value):
        assert found[0]["result"]["structuredContent"] == {"v": value}
    assert not reader.has_part
