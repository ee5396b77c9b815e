"""Tests of bubblewrap beyond the contract of every sandbox."""

import asyncio
import dataclasses
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.processes import family, run_program, started
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.messages import Status, ToolResult
from torchrl_agentic.sandbox import (
    BubblewrapSandbox,
    ResourceLimits,
    SandboxError,
    UnsafeSubprocessSandbox,
)
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.sandbox.conformance.host_cases import check_gone, command_lines, new_mark
from torchrl_agentic.sandbox.process import Capture, PipeReader

ORDER = ["none", "loopback", "allowlist", "full"]
works = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")


@works
async def test_root_is_given_up_outside_too():
    async with BubblewrapSandbox() as sandbox:
        child = await sandbox.spawn(["sh", "-c", "echo up; sleep 100"])
        assert await child.receive() == b"up\n"
        with open(f"/proc/{child.process.pid}/status") as file:
            uids = next(line for line in file if line.startswith("Uid:")).split()[1:]
        assert "0" not in uids
        assert (await sandbox.run(["id", "-u"])).stdout == "1000\n"
        await child.kill()


@works
@pytest.mark.parametrize("start", ["spawn", "run"])
async def test_a_command_does_not_run_if_the_trainer_is_killed_while_bubblewrap_starts(
    start: str, workspaces: str
):
    """On a busy machine, bwrap may ask to die with its parent when that is dead already."""
    mark, held, slow = new_mark(), Path(workspaces, "held"), Path(workspaces, "slow-bwrap")
    slow.write_text(f'#!/bin/sh\nwhile [ -e {held} ]; do sleep 0.01; done\nexec bwrap "$@"\n')
    slow.chmod(0o755)
    code = (
        "import asyncio, os, pathlib\nfrom torchrl_agentic.sandbox import BubblewrapSandbox\n"
        "async def main():\n"
        f"    async with BubblewrapSandbox(bwrap_path={str(slow)!r}) as sandbox:\n"
        f"        pathlib.Path({str(held)!r}).touch()\n"
        f"        await sandbox.{start}(['sleep', os.environ['MARK']])\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    # Not in its command line, which any process that it forks has too until it executes a program.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MARK": mark}
    with started([sys.executable, "-c", code], env=env) as trainer:
        while not any(mark in command_lines().get(pid, "") for pid in family(trainer.pid) - {trainer.pid}):
            assert trainer.poll() is None
            await asyncio.sleep(0.01)
        trainer.kill()
        trainer.wait()
    held.unlink()
    await check_gone(mark)


def test_default_sandbox_without_any_tier_names_the_remedy():
    code = (
        "from torchrl_agentic.sandbox import default_sandbox, landlock, tiers, SandboxError\n"
        "tiers.TIERS = [tier for tier in tiers.TIERS if tier[0].name != 'landlock']\n"
        "try:\n    default_sandbox()\nexcept SandboxError as error:\n    print(error)"
    )
    env = {"PATH": "/nonexistent", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    done = run_program(command, env=env, capture_output=True, text=True, timeout=30, check=True)
    for piece in ("apt install bubblewrap", "UnsafeSubprocessSandbox", "no sandbox works here"):
        assert piece in done.stdout


def test_narrowing_clamps_and_warns():
    limits = ResourceLimits(wall_seconds=5, network="loopback", fs_read_roots=("/usr", "/opt/x"))
    assert limits.narrow(None) is limits
    tighter = limits.narrow(
        ResourceLimits(wall_seconds=1, max_processes=4, fs_read_roots=("/opt", "/usr/lib"))
    )
    assert (tighter.wall_seconds, tighter.max_processes, tighter.network) == (1, 4, "none")
    assert tighter.fs_read_roots == ("/opt/x", "/usr/lib")
    with pytest.warns(UserWarning, match="wall_seconds, network"):
        wider = limits.narrow(ResourceLimits(wall_seconds=50, network="full"))
    assert (wider.wall_seconds, wider.network) == (5, "loopback")


def test_hosts_of_either_side_remain_where_the_other_allows_all():
    hosts = ResourceLimits(network="allowlist", network_allowlist=("a:1", "b:2"))
    every = ResourceLimits(network="full")
    assert every.narrow(hosts).network_allowlist == ("a:1", "b:2")
    with pytest.warns(UserWarning, match="network"):
        assert hosts.narrow(every).network_allowlist == ("a:1", "b:2")
    fewer = dataclasses.replace(hosts, network_allowlist=("b:2", "c:3"))
    assert hosts.narrow(fewer).network_allowlist == ("b:2",)


ENVS = st.none() | st.dictionaries(st.sampled_from("ABC"), st.sampled_from("xy"))
AMOUNTS = st.none() | st.integers(1, 5)
ROOTS = st.lists(st.sampled_from(["/", "/a", "/a/b", "/c"]), max_size=2).map(tuple)
LIMITS = st.builds(
    ResourceLimits,
    **dict.fromkeys(("cpu_seconds", "wall_seconds", "memory_bytes", "max_processes", "disk_bytes"), AMOUNTS),
    memory_total_bytes=AMOUNTS,
    disk_total_bytes=AMOUNTS,
    output_bytes=st.integers(1, 5),
    network=st.sampled_from(ORDER),
    network_allowlist=st.lists(st.sampled_from(["a:1", "b:2"]), max_size=2).map(tuple),
    fs_read_roots=ROOTS,
    fs_write_roots=ROOTS,
    env=ENVS,
)


@pytest.mark.filterwarnings("ignore:a call cannot widen")
@given(LIMITS, LIMITS)
def test_narrowing_never_widens(limits, asked):
    narrowed = limits.narrow(asked)
    for name in (field.name for field in dataclasses.fields(limits)):
        ours, got = getattr(limits, name), getattr(narrowed, name)
        match name:
            case "network":
                assert ORDER.index(got) <= ORDER.index(ours)
            case "network_allowlist":
                assert limits.network == "full" or set(got) <= set(ours)
                assert asked.network == "full" or set(got) <= set(asked.network_allowlist)
            case "fs_read_roots" | "fs_write_roots":
                assert all(any(os.path.commonpath((root, mine)) == mine for mine in ours) for root in got)
            case "env" if ours is None:
                assert got is None
            case "env":
                assert got.items() <= ours.items()
            case _:
                assert ours is None or got <= ours


def test_a_call_can_leave_variables_out_but_not_add_or_change_them():
    limits = ResourceLimits(env={"A": "1", "B": "2"})
    assert limits.narrow(ResourceLimits(env={"B": "2"})).env == {"B": "2"}
    assert limits.narrow(ResourceLimits()).env == {"A": "1", "B": "2"}
    for asked in ({"B": "2", "LD_PRELOAD": "evil.so"}, {"B": "3"}):
        with pytest.warns(UserWarning, match="cannot widen the sandbox's limits: env"):
            assert limits.narrow(ResourceLimits(env=asked)).env == {"B": "2"}
    with pytest.warns(UserWarning, match="env"):
        assert ResourceLimits().narrow(ResourceLimits(env={"A": "1"})).env is None


@works
async def test_bubblewrap_may_be_at_another_path():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # if we are root, bubblewrap is started as nobody
        link = Path(folder, "my_bwrap")
        link.symlink_to(shutil.which("bwrap"))
        sandbox = BubblewrapSandbox(bwrap_path=link)
        assert sandbox.fresh().bwrap_path == str(link)
        async with sandbox:
            assert (await sandbox.run(["echo", "hi"])).stdout == "hi\n"


async def test_missing_bubblewrap_raises_when_the_sandbox_opens():
    with pytest.raises(SandboxError, match=r"bwrap_path='/no/such/bwrap' is not a program"):
        await BubblewrapSandbox(bwrap_path="/no/such/bwrap").open()


@pytest.mark.parametrize(
    "limits", [{"wall_seconds": 0}, {"memory_bytes": -1}, {"cpu_seconds": float("nan")}, {"network": "some"}]
)
def test_invalid_limits_are_rejected(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        ResourceLimits(**limits)


def test_an_allowlist_is_refused():
    with pytest.raises(ValueError, match="got 'allowlist'"):
        BubblewrapSandbox(ResourceLimits(network="allowlist"))


@works
async def test_a_broken_sandbox_is_an_error_and_no_result():
    folder = tempfile.mkdtemp(dir="/var/tmp")
    os.chmod(folder, 0o755)
    async with BubblewrapSandbox(ResourceLimits(fs_read_roots=(folder,))) as sandbox:
        os.rmdir(folder)
        with pytest.raises(SandboxError, match=folder):
            await sandbox.run(["true"])
    with pytest.raises(SandboxError, match="not open"):
        await sandbox.run(["true"])


@works
async def test_the_environment_is_the_one_in_the_limits():
    async with BubblewrapSandbox(ResourceLimits(env={"A": "b"})) as sandbox:
        names = {line.partition("=")[0] for line in (await sandbox.run(["/usr/bin/env"])).stdout.split("\n")}
        assert "A" in names
        assert names <= {"A", "PWD", "", "_", "OLDPWD", "SHLVL"}
    async with BubblewrapSandbox() as sandbox:
        assert "HOME=/work" in (await sandbox.run(["env"])).stdout


@works
async def test_roots_that_were_granted_are_there():
    """In its own folder below /tmp, because only root may use those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        with open(f"{folder}/f", "w") as file:
            file.write("in")
        async with BubblewrapSandbox(ResourceLimits(fs_read_roots=(folder,))) as sandbox:
            assert (await sandbox.run(["cat", f"{folder}/f"])).stdout == "in"
            assert (await sandbox.run(["touch", f"{folder}/g"])).exit_code != 0
            granted = f"not inside /work; granted folders: {folder}$"
            with pytest.raises(PermissionError, match=granted) as raised:
                await sandbox.read_file("/etc/passwd")
            result = ToolResult.from_error(raised.value, "read")
            assert result is not None
            assert result.status is Status.ERROR  # the model has named the path
        async with BubblewrapSandbox(ResourceLimits(fs_write_roots=(folder,))) as sandbox:
            assert (await sandbox.run(["touch", f"{folder}/g"])).exit_code == 0
        assert os.path.exists(f"{folder}/g")


@works
@pytest.mark.parametrize("cwd", ["/", "/tmp", "..", "/work/../etc", "a\0b"])
async def test_a_folder_outside_of_work_is_refused(cwd: str):
    async with BubblewrapSandbox() as sandbox:
        with pytest.raises(PermissionError):
            await sandbox.run(["pwd"], cwd=cwd)
        await sandbox.run(["mkdir", "sub"])
        assert (await sandbox.run(["pwd"], cwd="sub")).stdout == "/work/sub\n"


@works
async def test_a_folder_that_is_not_there_is_the_models_mistake():
    """A sandbox error would count as infra, and the model could cause it at will."""
    async with BubblewrapSandbox() as sandbox:
        result = await sandbox.run(["pwd"], cwd="missing")
        assert result.exit_code != 0


@works
async def test_taking_the_rights_off_its_folder_is_the_models_mistake():
    async with BubblewrapSandbox() as sandbox:
        await sandbox.run(["chmod", "000", "/work"])
        result = await sandbox.run(["true"])
        assert isinstance(result.exit_code, int)


@works
async def test_a_command_that_is_too_long_is_the_models_mistake():
    async with BubblewrapSandbox() as sandbox:
        try:
            result = await sandbox.run(["echo", "x" * 200_000])
        except ValueError:
            return
        assert result.exit_code != 0


@works
async def test_loopback_is_a_network_of_its_own():
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname())\n"
        f"print('own'); socket.create_connection(('127.0.0.1', {port})); print('host')"
    )
    async with BubblewrapSandbox(ResourceLimits(network="loopback")) as sandbox:
        result = await sandbox.run([*sandbox.python_argv, "-c", code])
    server.close()
    assert result.stdout == "own\n"
    assert "ConnectionRefused" in result.stderr


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
async def test_the_unsafe_one_says_that_it_enforces_nothing():
    async with UnsafeSubprocessSandbox() as sandbox:
        assert not any(sandbox.limits_enforced.values())
        assert not sandbox.isolated
        await sandbox.write_file("f", b"x")
        home = (await sandbox.run(["sh", "-c", "echo $HOME"])).stdout.strip()
        assert Path(home, "f").read_bytes() == b"x"


@works
async def test_working_folder_is_removed_with_any_content(workspaces):
    async with BubblewrapSandbox() as sandbox:
        assert len(os.listdir(workspaces)) == 1
        await sandbox.run(
            ["sh", "-c", "mkdir -p a/b/c; ln -s / link; mkfifo pipe; touch a/b/c/f; chmod 000 a/b a"]
        )
    assert not os.listdir(workspaces)


@works
async def test_no_folder_is_left_after_code_nested_folders_deeply(workspaces):
    """Deeper than Python's recursion limit, by which `shutil.rmtree` is bound."""
    sandbox = BubblewrapSandbox()
    await sandbox.open()
    code = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"
    await sandbox.run([*sandbox.python_argv, "-c", code])
    try:
        await sandbox.close()
        assert not os.listdir(workspaces)
    finally:
        run_program(["rm", "-rf", workspaces], check=True)


async def test_a_pipe_that_has_ended_is_never_read_again():
    """Its descriptor may belong to the pipe of another trajectory."""
    ours, writer = os.pipe()
    drain = PipeReader(ours, Capture(1000))
    os.close(writer)
    await asyncio.wait_for(drain.ended.wait(), limit(5))
    others, writer = os.pipe()
    os.set_blocking(others, False)
    assert others == ours, "the test needs the number to be used again"
    os.write(writer, b"somebody else's secret")
    drain.pull()
    text = drain.capture.text()
    os.close(others)
    os.close(writer)
    assert text == ""
