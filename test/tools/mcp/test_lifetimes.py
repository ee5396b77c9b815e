"""Servers that start badly, are lost, come back and end; each in a process of its own."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from fakes import mcp_raw
from helpers.processes import run_program

from torchrl_agentic import RateLimiter, ToolContext
from torchrl_agentic.errors import InfrastructureError, MissingExtra
from torchrl_agentic.limits import CircuitOpen
from torchrl_agentic.sandbox import BubblewrapSandbox
from torchrl_agentic.tools import MCPServerConfig, MCPToolset

SOURCE = Path(mcp_raw.__file__).read_text()


async def test_server_that_exits_at_start_is_reported_with_command_code_and_stderr(raw):
    with pytest.raises(InfrastructureError) as caught:
        await MCPToolset(raw("crash")).setup()
    said = str(caught.value)
    assert "the MCP server 'raw' ended before it was ready (exit code 3)" in said
    assert "mcp_raw.py crash" in said
    assert "ModuleNotFoundError: No module named 'left_out'" in said


async def test_secrets_that_a_server_prints_as_it_dies_are_blotted_out(raw):
    with pytest.raises(InfrastructureError) as caught:
        await MCPToolset(raw("crash", env={"KEY": "left_out"})).setup()
    assert "left_out" not in str(caught.value)
    assert "No module named '***'" in str(caught.value)


async def test_a_command_that_is_not_there_is_named_with_where_it_was_looked_for():
    with pytest.raises(InfrastructureError, match=r"no-such-server -x: no such program; .*PATH: "):
        await MCPToolset(MCPServerConfig("no-such-server", ["-x"])).setup()


async def test_a_folder_that_is_not_there_is_not_taken_for_a_missing_command(raw):
    with pytest.raises(InfrastructureError, match="/no/such/folder"):
        await MCPToolset(raw(cwd="/no/such/folder")).setup()


async def test_a_server_starts_in_its_folder(opened, raw, tmp_path):
    async with opened(raw(cwd=str(tmp_path))) as server:
        pid = int(await server.text("pid"))
        assert os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)


async def test_a_server_that_says_nothing_is_given_up_and_ended(raw, is_running, monkeypatch):
    toolset = MCPToolset(raw("silent"), start_timeout=0.5)
    pids = []
    serve = asyncio.create_subprocess_exec

    async def noted(*args, **kwargs):
        process = await serve(*args, **kwargs)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    with pytest.raises(
        InfrastructureError, match=r"'raw' cannot be used: it was not ready within 0\.5 s: .*silent"
    ):
        await toolset.setup()
    assert len(pids) == 1
    assert not is_running(pids[0])


async def test_other_output_of_a_server_is_skipped_and_logged_once(opened, raw, caplog):
    async with opened(raw("rubbish")) as server:
        assert await server.text("first") == "first"
    (told,) = [record.getMessage() for record in caplog.records if "not a message" in record.getMessage()]
    assert "the MCP server 'raw'" in told
    assert "Welcome to the server!" in told


async def test_error_of_a_server_that_does_not_start_has_its_output():
    config = MCPServerConfig(sys.executable, ["-c", "print('hello world')"], name="talker")
    with pytest.raises(
        InfrastructureError, match=r"'talker' ended before .*it printed 'hello world' to stdout"
    ):
        await MCPToolset(config).setup()


async def test_server_killed_during_a_call_gives_infra_and_restarts(opened, demo):
    async with opened(demo()) as server:
        await server.call("count")
        pid = int(await server.text("pid"))
        calls = [asyncio.create_task(server.call("hold", label=f"{n}")) for n in range(8)]
        while int(await server.text("holding")) < 8:
            assert not any(call.done() for call in calls)
        os.kill(pid, signal.SIGKILL)
        for call in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(call, InfrastructureError)
            assert "'demo' was lost during the call (killed by SIGKILL); its state in memory is lost" in str(
                call
            )
        result = await server.call("count")
    assert result.text == "1"  # it was 1 before: the state is gone, and nobody need be told twice
    assert result.meta["restarts"] == 1


async def test_call_to_a_lost_server_reports_the_lost_state(opened, raw):
    async with opened(raw()) as server:
        pid = int(await server.text("pid"))
        os.kill(pid, signal.SIGKILL)
        while server.toolset.shared().pid is not None:
            await asyncio.sleep(0.001)
        first, second = await server.text("count"), await server.text("count")
    assert "'raw' was lost before this call and reached again; its state in memory is lost" in first
    assert first.endswith("\n1")
    assert second == "2"


async def test_many_calls_that_find_the_server_lost_start_it_once(opened, raw):
    async with opened(raw()) as server:
        os.kill(int(await server.text("pid")), signal.SIGKILL)
        while server.toolset.shared().pid is not None:
            await asyncio.sleep(0.001)
        answers = await asyncio.gather(*(server.call("pid") for _ in range(20)))
    assert len({answer.parts[-1].text for answer in answers}) == 1
    assert {answer.meta["restarts"] for answer in answers} == {1}


async def test_a_server_that_cannot_be_started_again_gives_infra_results(tmp_path, opened):
    program = tmp_path / "server"
    program.write_text(f"#!{sys.executable}\n{SOURCE}")
    program.chmod(0o755)
    async with opened(MCPServerConfig(str(program), name="once")) as server:
        pid = server.toolset.shared().pid
        program.unlink()
        os.kill(pid, signal.SIGKILL)
        while server.toolset.shared().pid is not None:
            await asyncio.sleep(0.001)
        with pytest.raises(InfrastructureError, match=r"'once' cannot be started: .*no such program"):
            await server.call("first")


async def test_a_message_without_end_is_not_kept(monkeypatch, is_running):
    monkeypatch.setattr("torchrl_agentic.tools.mcp.stdio_transport.MAX_SKIPPED", 1 << 20)
    code = "import sys; sys.stdin.readline(); print('x' * (1 << 24))"
    config = MCPServerConfig(sys.executable, ["-c", code], name="flood")
    with pytest.raises(InfrastructureError, match=r"'flood' ended .*it sent a message of more than 2 MiB"):
        await MCPToolset(config, max_result_bytes=1 << 20).setup()


async def test_control_sequences_in_stderr_of_a_server_are_escaped(raw):
    with pytest.raises(InfrastructureError) as caught:
        await MCPToolset(raw("noisy", env={"KEY": "left_out"})).setup()
    said = str(caught.value)
    assert "its stderr ends with:\n␛]0;owned␇␛[2J\na second line ‹202E›***" in said
    assert "\x1b" not in said


async def test_control_sequences_in_a_listing_error_are_escaped(raw):
    with pytest.raises(InfrastructureError, match="does not list its tools: no ␛]0;owned␇") as caught:
        await MCPToolset(raw("refuses")).setup()
    assert len(str(caught.value)) < 1200


async def test_circuit_breaker_counts_lost_servers(opened, demo):
    limiter = RateLimiter(break_after=1, break_seconds=1000)
    async with opened(demo(), limiter=limiter) as server:
        await server.call("echo", text="hi")
        with pytest.raises(InfrastructureError, match="lost during the call"):
            await server.call("die")
        with pytest.raises(CircuitOpen):
            await server.call("echo", text="hi")


async def test_close_leaves_no_process(raw, is_running):
    toolset = MCPToolset(raw())
    tools = {tool.name: tool for tool in await toolset.setup()}
    pid = int((await tools["pid"].run({}, ToolContext("c"))).text)
    assert is_running(pid)
    await toolset.teardown()
    assert not is_running(pid)


async def test_close_ends_a_server_that_does_not_want_to(raw, is_running, monkeypatch):
    monkeypatch.setattr("torchrl_agentic.tools.mcp.stdio_transport.END_S", 0.1)
    toolset = MCPToolset(raw("stubborn"))
    await toolset.setup()
    pid = toolset.shared().pid
    await toolset.teardown()
    assert not is_running(pid)


async def test_close_ends_calls_that_are_under_way(demo, is_running):
    toolset = MCPToolset(demo())
    tools = {tool.name: tool for tool in await toolset.setup()}
    call = asyncio.create_task(tools["hold"].run({"label": "x"}, ToolContext("c")))
    while (await tools["holding"].run({}, ToolContext("c"))).text != "1":
        assert not call.done()
    await toolset.teardown()
    with pytest.raises(InfrastructureError, match="'demo' was lost during the call"):
        await call


async def test_a_setup_that_is_cancelled_leaves_no_process(raw, is_running, monkeypatch):
    started = asyncio.Event()
    pids = []
    serve = asyncio.create_subprocess_exec

    async def noted(*args, **kwargs):
        process = await serve(*args, **kwargs)
        pids.append(process.pid)
        started.set()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    setting_up = asyncio.create_task(MCPToolset(raw("silent")).setup())
    await started.wait()
    setting_up.cancel()
    await asyncio.wait((setting_up,))
    assert setting_up.cancelled()
    assert not is_running(pids[0])


def test_a_toolset_serves_one_event_loop_after_another(raw):
    """As with `asyncio.run` twice: the first loop is gone, with all that was open on it."""
    toolset = MCPToolset(raw())

    async def once():
        tools = {tool.name: tool for tool in await toolset.setup()}
        try:
            return (await tools["first"].run({}, ToolContext("c"))).text
        finally:
            await toolset.teardown()

    assert [asyncio.run(once()), asyncio.run(once())] == ["first", "first"]


async def test_a_server_runs_in_a_sandbox_with_the_environment_it_is_given_and_no_more(opened, monkeypatch):
    """Its source comes along as an argument: there is nothing of ours in there to be imported."""
    monkeypatch.setenv("TRAINER_API_KEY", "sk-trainer")
    sandbox = BubblewrapSandbox()
    config = MCPServerConfig(
        "python3", ["-c", SOURCE], {"ASKED": "for"}, sandbox=sandbox, cwd="/tmp", name="caged"
    )
    async with opened(config) as server:
        environ = await server.text("environ")
        assert '"ASKED": "for"' in environ
        assert '"HOME": "/work"' in environ
        assert '"PWD": "/tmp"' in environ
        assert "sk-trainer" not in environ
        assert not sandbox.is_open  # a template: it runs in a fresh one
        pid = server.toolset.shared().pid
    assert not os.path.exists(f"/proc/{pid}")


async def test_command_missing_in_the_sandbox_is_reported(opened):
    config = MCPServerConfig("no-such-server", sandbox=BubblewrapSandbox(), name="caged")
    with pytest.raises(InfrastructureError, match=r"'caged' ended before it was ready(?s:.)*not found"):
        await MCPToolset(config).setup()


def test_missing_sdk_error_names_the_install_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"MCPToolset needs the 'mcp' package: .*torchrl-agentic\[mcp\]"):
        MCPToolset(MCPServerConfig("serve"))


def test_importing_the_tools_does_not_import_the_sdk():

    code = (
        "import sys; from torchrl_agentic.tools import MCPToolset, mcp_servers, MCPServerConfig; "
        "MCPToolset(MCPServerConfig('x')); assert 'mcp' not in sys.modules; assert 'torch' not in sys.modules"
    )
    run_program([sys.executable, "-c", code], check=True)
