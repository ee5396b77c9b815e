"""Control groups limit all processes of a sandbox together, where they can be created."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.processes import run_program, started

from torchrl_agentic.repl import ForkServerRepl
from torchrl_agentic.sandbox import (
    BubblewrapSandbox,
    ForkServerSandbox,
    ResourceLimits,
    cgroups,
    forkserver_sandbox,
)
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.sandbox.inside.interpreter import WATCH_S

works = pytest.mark.skipif(
    cgroups.why_not() is not None or why_not() is not None, reason=f"{cgroups.why_not() or why_not()}"
)
SEVERAL = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        data = bytearray(b'x') * (80 << 20); time.sleep(2); print('held', flush=True); os._exit(0)
for _ in range(5): os.wait()
"""


@works
async def test_several_processes_together_are_killed_over_the_limit_that_each_keeps():
    limits = ResourceLimits(memory_total_bytes=200 << 20, memory_bytes=200 << 20)
    async with BubblewrapSandbox(limits) as sandbox:
        assert sandbox.limits_enforced["memory_total"]
        result = await sandbox.run([*sandbox.python_argv, "-c", SEVERAL])
        assert result.stdout.count("held") < 5
        assert (await sandbox.run(["echo", "still"])).stdout == "still\n"


def _own_groups() -> set[Path]:
    """Return the folders of the control groups that this process has made."""
    ours = Path("/proc/self/cgroup").read_text()
    parents = {one.parent for one in cgroups.candidates(ours, Path("/sys/fs/cgroup"))}
    return {folder for parent in parents for folder in parent.glob(f"torchrl_agentic-{os.getpid()}-*")}


@works
async def test_the_group_is_gone_after_close():
    before = _own_groups()
    sandbox = BubblewrapSandbox()
    await sandbox.open()
    await sandbox.run(["true"])
    assert len(_own_groups() - before) == 1
    await sandbox.close()
    assert _own_groups() <= before


def test_without_groups_the_limit_is_reported_as_not_enforced(monkeypatch):
    monkeypatch.setattr(cgroups, "why_not", lambda: "no")
    assert not BubblewrapSandbox().limits_enforced["memory_total"]


def test_a_group_that_cannot_be_made_says_why(monkeypatch):
    monkeypatch.setattr(cgroups, "_hierarchy", lambda: None)
    with pytest.raises(PermissionError):
        cgroups.MemoryGroup(1 << 20)


grouped = pytest.mark.skipif(
    cgroups.why_not() is not None or forkserver_sandbox.cannot_work() is not None,
    reason=f"{cgroups.why_not() or forkserver_sandbox.cannot_work()}",
)
HIDDEN = """
import mmap
kept = []
for _ in range(50):
    kept.append(mmap.mmap(-1, 8 << 20))
    for at in range(0, 8 << 20, 4096): kept[-1][at] = 1
    kept[-1].madvise(mmap.MADV_DONTNEED)
"""


@grouped
async def test_shared_memory_over_the_limit_ends_the_cell_and_restarts_the_interpreter():
    async with ForkServerRepl(ForkServerSandbox(ResourceLimits(memory_total_bytes=128 << 20))) as repl:
        await repl.execute("x = 1")
        result = await repl.execute(HIDDEN, timeout=limit(30))
        assert (result.status, result.state_lost) == ("limit", True)
        assert "128 MiB in all" in result.message
        assert (await repl.execute("'x' in globals()")).value == "False"


@grouped
async def test_clones_have_groups_of_their_own():
    """Each takes more than half of the limit of one."""
    limits = ResourceLimits(memory_total_bytes=128 << 20)
    take = "taken = bytearray(b'x') * (80 << 20)"
    async with ForkServerRepl(ForkServerSandbox(limits)) as repl:
        await repl.execute("x = 1")
        clones = await repl.fork(3)
        try:
            for one in (repl, *clones):
                result = await one.execute(take + "\nx", timeout=limit(30))
                assert (result.status, result.value) == ("ok", "1")
            assert (await clones[0].execute(HIDDEN, timeout=limit(30))).status == "limit"
            assert (await clones[1].execute("len(taken)")).value == str(80 << 20)
        finally:
            for clone in clones:
                await clone.close()


@grouped
async def test_memory_inherited_by_a_clone_counts_only_for_it():
    limits = ResourceLimits(memory_total_bytes=128 << 20, memory_bytes=1 << 30)
    async with ForkServerRepl(ForkServerSandbox(limits)) as repl:
        await repl.execute("inherited = bytearray(b'x') * (90 << 20)")
        (clone,) = await repl.fork(1)
        async with clone:
            for _ in range(6):  # one of these would get the group that the original has left
                async with ForkServerRepl(ForkServerSandbox(limits)) as other:
                    result = await other.execute("taken = bytearray(b'x') * (80 << 20)", timeout=limit(30))
                    assert result.status == "ok"
            code = "import time\nmore = bytearray(b'x') * (90 << 20)\ntime.sleep(5)"
            assert (await clone.execute(code, timeout=limit(30))).status == "limit"


@grouped
async def test_command_over_the_limit_does_not_end_the_interpreter():
    limits = ResourceLimits(memory_total_bytes=128 << 20, memory_bytes=1 << 30)
    sandbox = ForkServerSandbox(limits)
    async with ForkServerRepl(sandbox) as repl:
        await repl.execute("x = 1")
        command = [*sandbox.python_argv, "-c", "x = bytearray(b'x') * (300 << 20)"]
        result = await sandbox.run(command)
        assert result.exit_code != 0
        assert "128 MiB" in result.stderr
        assert (await repl.execute("import time; time.sleep(1); x", timeout=limit(10))).value == "1"
        assert "stopped" not in (await sandbox.run(["sh", "-c", "exit 3"])).stderr


OVER = "x = bytearray(b'x') * (300 << 20)"


@grouped
@pytest.mark.parametrize("place", ["cell", "child", "command"])
async def test_what_is_over_the_limit_ends_nothing_else(place):
    """The kernel counts the processes that it kills, and does not say whose they were."""
    sandbox = ForkServerSandbox(ResourceLimits(memory_total_bytes=128 << 20, memory_bytes=1 << 30))
    async with ForkServerRepl(sandbox) as repl:
        process = await sandbox.spawn(["cat"])
        if place == "cell":
            assert (await repl.execute(OVER, timeout=limit(30))).status == "limit"
        elif place == "child":
            code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {OVER!r}]).returncode"
            assert (await repl.execute(code, timeout=limit(30))).value == "-9"
        else:
            cell = asyncio.create_task(repl.execute("import time; time.sleep(2)"))
            assert "128 MiB" in (await sandbox.run([*sandbox.python_argv, "-c", OVER])).stderr
            assert (await cell).status == "ok"
        await asyncio.sleep(3 * WATCH_S)  # long enough for the supervisor to look twice
        await process.send(b"here\n")
        assert await process.receive() == b"here\n"
        await process.kill()


def test_a_group_is_used_again_once_nothing_is_in_it():
    if cgroups.why_not() is not None:
        pytest.skip(cgroups.why_not())
    groups = cgroups.MemoryGroups(64 << 20)
    first = groups.take()
    with started(first.entering(["cat"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"inside\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"inside\n"
        groups.give_back(first)
        second = groups.take()
        assert second is not first
        process.stdin.close()
        process.wait()
    assert groups.take() is first
    for group in (first, second):
        groups.give_back(group)
    groups.close()
    assert not first._folder.exists()
    assert not second._folder.exists()


V1 = "4:memory:/a/b\n3:cpuset:/\n0::/\n"
V2 = "0::/user.slice/user@1.service/app.slice/x.scope\n"


def test_groups_are_tried_in_our_own_group_and_then_in_each_above_it(tmp_path):
    first = [one for one in cgroups.candidates(V1, tmp_path) if one.entrance == "tasks"]
    assert [one.parent for one in first] == [
        tmp_path / "memory/a/b",
        tmp_path / "memory/a",
        tmp_path / "memory",
    ]
    second = cgroups.candidates(V2, tmp_path)
    assert [str(one.parent.relative_to(tmp_path)) for one in second] == [
        "user.slice/user@1.service/app.slice/x.scope",
        "user.slice/user@1.service/app.slice",
        "user.slice/user@1.service",
        "user.slice",
        ".",
    ]
    assert {one.limit for one in second} == {"memory.max"}


def test_ordinary_folder_is_not_used_as_a_control_group(tmp_path):
    (one,) = cgroups.candidates("0::/\n", tmp_path)
    assert not cgroups._takes(one)
    assert not list(tmp_path.iterdir())


AS_USER = """
from torchrl_agentic.sandbox import cgroups
assert cgroups.why_not() is None, cgroups.why_not()
group = cgroups.MemoryGroup(64 << 20)
import subprocess
print(subprocess.run(group.entering(["sh", "-c", "x=$(yes | head -c 200000000)"])).returncode)
group.remove()
"""


@pytest.mark.skipif(
    cgroups.why_not() is not None or os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root, control groups and setpriv",
)
def test_a_user_makes_groups_in_one_that_was_delegated():
    group = cgroups.MemoryGroup(1 << 30)
    for path in (group._folder, *group._folder.iterdir()):
        os.chown(path, 65534, 65534)
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-B", "-c"]
    root = str(Path(cgroups.__file__).parents[2])
    result = run_program(
        group.entering([*command, AS_USER]),
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root},
        cwd=root,
    )
    group.remove()
    assert result.stdout == "-9\n", result.stderr
    assert not group._folder.exists()
