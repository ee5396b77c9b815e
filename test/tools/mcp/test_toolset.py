"""Tools of real servers over stdio, each in a process of its own."""

import asyncio
import json
import pickle
from typing import ClassVar

import pytest

from torchrl_agentic import RateLimiter, ToolContext, ToolError
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import FileRefPart, ImagePart, JsonPart, Status, TextPart
from torchrl_agentic.testing import ToolContract
from torchrl_agentic.testing.servers.demo_mcp import config as demo_config
from torchrl_agentic.tools import MCPServerConfig, MCPToolset
from torchrl_agentic.tools.base import Effects


async def test_a_tool_is_offered_as_the_server_describes_it(opened, raw):
    """The schema has keywords that no model class knows: they would be lost if it were rebuilt."""
    async with opened(raw()) as server:
        assert server["first"].input_schema == {
            "type": "object", "properties": {"x": {"type": "integer", "minimum": 1}}, "$comment": "kept",
        }  # fmt: skip
        assert server["first"].description == "The tool first."


async def test_tools_are_there_from_open_to_close(raw):
    toolset = MCPToolset(raw(), tools=["first", "third"])
    assert toolset.tools == ()
    await toolset.open()
    assert [tool.name for tool in toolset.tools] == ["first", "third"]
    await toolset.close()
    assert toolset.tools == ()


async def test_all_pages_of_tools_are_read(opened, raw):
    async with opened(raw()) as server:
        assert list(server.tools) == ["environ", "first", "second", "third", "read_file", "count", "pid"]


async def test_a_list_without_end_is_given_up(raw):
    with pytest.raises(InfrastructureError, match="'raw' sends an endless list of tools"):
        await MCPToolset(raw("endless")).setup()


async def test_an_output_schema_and_annotations_are_kept(opened, demo):
    async with opened(demo()) as server:
        assert server["facts"].output_schema["type"] == "object"
        assert server["echo"].annotations == {"readOnlyHint": True}


async def test_read_only_tools_overlap_and_writers_keep_their_order(opened, demo):
    async with opened(demo()) as server:
        assert server["echo"].effects == Effects(reads=["mcp:demo"])
        assert server["count"].effects == server["work"].effects == Effects(writes=["mcp:demo"])
    async with opened(demo(), effects=Effects.PURE) as server:
        assert server["count"].effects == Effects.PURE


async def test_a_prefix_comes_before_every_name(opened, raw):
    async with opened(raw(), name_prefix="my_", tools=["first", "count"]) as server:
        assert [tool.name for tool in server.tools.values()] == ["my_first", "my_count"]
        assert await server.text("first") == "first"


async def test_only_the_tools_that_were_asked_for_are_offered(opened, raw):
    async with opened(raw(), tools=["third", "first"]) as server:
        assert list(server.tools) == ["first", "third"]


@pytest.mark.parametrize(
    ("wanted", "hint"), [("read_fil", r"; did you mean 'read_file'\?"), ("zzz", r"\.")], ids=["near", "far"]
)
async def test_error_for_a_missing_selected_tool_lists_the_offered_ones(raw, wanted, hint):
    toolset = MCPToolset(raw(), tools=[wanted])
    with pytest.raises(ValueError, match=rf"'{wanted}', .*'raw' .*offer{hint} It offers: environ, first"):
        await toolset.setup()
    assert toolset.shared().pid is None


async def test_tools_of_each_kind_are_called_by_names_that_models_can_write(opened, demo):
    data = b"\x89PNG one pixel"
    async with opened(demo()) as server:
        assert server["odd.name/with spaces"].name == "odd_name_with_spaces"
        assert await server.text("odd.name/with spaces") == "odd"
        assert (await server.call("facts")).parts == (JsonPart({"answer": 42}),)
        failed = await server.call("fail", why="no luck")
        assert failed.status is Status.ERROR
        assert "no luck" in failed.text
        result = await server.call("parts")
    assert result.parts == (
        TextPart("first"),
        ImagePart(data, "image/png"),
        TextPart("[audio audio/wav, 15 bytes]"),
        TextPart("[resource memo://1]\na memo"),
        ImagePart(data, "image/jpeg"),
        FileRefPart("zip://1", "application/zip"),
        FileRefPart("file:///log.txt", "text/plain"),
        TextPart("last"),
        JsonPart({"n": 8}),
    )


async def test_an_error_of_the_protocol_is_for_the_model_to_read(opened, raw):
    async with opened(raw("own_error")) as server:
        with pytest.raises(ToolError, match="the database\nis ␛\\[31masleep") as caught:
            await server.call("first")
        assert caught.value.detail["code"] == -32000  # also the SDK's code for a connection that was closed
        assert server.toolset.shared().restarts == 0


async def test_response_against_the_protocol_gives_infra(opened, raw):
    async with opened(raw("garbage")) as server:
        with pytest.raises(InfrastructureError, match="'raw' violates the protocol: content"):
            await server.call("first")


async def test_progress_is_logged_and_the_last_is_in_the_meta(opened, demo):
    told = []
    async with opened(demo(), on_progress=told.append) as server:
        result = await server.call("work", steps=3, call_id="c7")
    assert [(each.progress, each.total, each.message) for each in told] == [
        (1, 3, "step 1"), (2, 3, "step 2"), (3, 3, "step 3"),
    ]  # fmt: skip
    assert (told[0].tool, told[0].call_id, told[0].trajectory) == ("work", "c7", "t")
    assert result.meta["progress"] == {"progress": 3, "total": 3, "message": "step 3"}


async def test_a_hundred_calls_over_one_session_are_under_way_at_once(opened, demo):
    """All of them wait for the last one: were one held back, none would end."""
    async with opened(demo()) as server:
        calls = [asyncio.create_task(server.text("hold", label=f"{n}")) for n in range(100)]
        while int(await server.text("holding")) < 100:
            assert not any(call.done() for call in calls)
        await server.call("release")
        assert await asyncio.gather(*calls) == [f"{n}" for n in range(100)]


async def test_timed_out_call_is_cancelled_on_the_server(opened, demo):
    async with opened(demo(), request_timeout=0.2) as server:
        with pytest.raises(TimeoutError, match=r"no response within 0\.2 s"):
            await server.call("hold", label="late")
        server.toolset.request_timeout = 30.0
        while (await server.call("cancelled_calls")).meta["structured"]["result"] != ["late"]:
            await asyncio.sleep(0)
        assert await server.text("echo", text="still there") == "still there"


async def test_a_cancelled_call_is_cancelled_at_the_server(opened, demo):
    async with opened(demo()) as server:
        call = asyncio.create_task(server.call("hold", label="unwanted"))
        while await server.text("holding") != "1":
            assert not call.done()
        call.cancel()
        await asyncio.wait((call,))
        assert call.cancelled()
        while (await server.call("cancelled_calls")).meta["structured"]["result"] != ["unwanted"]:
            await asyncio.sleep(0)


async def test_a_limiter_is_shared_by_all_tools_of_the_server(opened, demo):
    """The one slot is taken by a call that cannot end, so that no other tool's may begin."""
    limiter = RateLimiter(max_concurrent=1)
    async with opened(demo(), limiter=limiter) as server:
        first = asyncio.create_task(server.call("hold", label="a"))
        while limiter.stats().in_flight == 0:
            await asyncio.sleep(0)
        second = asyncio.create_task(server.call("echo", text="b"))
        while limiter.stats().waiting == 0:
            await asyncio.sleep(0)
        assert not second.done()
        first.cancel()
        result = await second
    assert result.text == "b"
    assert result.timing.queue_s > 0


async def test_nothing_of_our_environment_reaches_a_server_unless_it_is_asked_for(opened, raw, monkeypatch):
    monkeypatch.setenv("TRAINER_API_KEY", "sk-trainer")
    async with opened(raw(env={"ASKED": "for"})) as server:
        environ = json.loads(await server.text("environ"))
    assert environ["ASKED"] == "for"
    assert "sk-trainer" not in str(environ)
    inherited = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    assert set(environ) <= inherited | {"ASKED", "LC_CTYPE", "PWD", "OLDPWD", "_", "SHLVL"}


async def test_pickled_toolset_reconnects(opened, raw):
    async with opened(raw()) as server:
        twin = pickle.loads(pickle.dumps(server.toolset))
        tools = {tool.name: tool for tool in await twin.setup()}
        try:
            pids = [(await tool.run({}, ToolContext("c"))).text for tool in (tools["pid"], server["pid"])]
        finally:
            await twin.teardown()
    assert pids[0] != pids[1]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tools": "echo"}, TypeError, r"tools=\['echo'\]"),
        ({"sessions": "each"}, ValueError, "'shared' or 'trajectory'"),
        ({"request_timeout": 0}, ValueError, "request_timeout must be above 0"),
        ({"start_timeout": float("nan")}, ValueError, "start_timeout must be above 0"),
    ],
)
def test_invalid_options_are_rejected(options, error, said):
    with pytest.raises(error, match=said):
        MCPToolset(MCPServerConfig("serve"), **options)


def test_error_for_another_config_type_names_the_file_reader():
    with pytest.raises(TypeError, match="mcp_servers"):
        MCPToolset({"command": "npx"})


class TestOneTool(ToolContract):
    """A tool of a server keeps what every tool promises."""

    good: ClassVar = {"text": "hi"}
    bad: ClassVar = [{}, {"text": 1}]

    @pytest.fixture(autouse=True)
    async def server(self, opened):
        async with opened(demo_config()) as server:
            self.tool = server["echo"]
            yield

    def make(self):
        return self.tool
