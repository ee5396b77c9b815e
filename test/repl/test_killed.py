"""The cause of a lost interpreter: the code that has run in it, if that can have caused the loss."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from helpers.limit import limit

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import ParsedCall, Status
from torchrl_agentic.repl import ForkServerRepl, JupyterRepl, Repl, SubprocessRepl
from torchrl_agentic.repl.base import ALL_LOST, LOST
from torchrl_agentic.sandbox import BubblewrapSandbox, ForkServerSandbox, LandlockSandbox, ResourceLimits
from torchrl_agentic.sandbox.conformance.host_cases import check_gone
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.tools import FileReadTool, PythonTool, ShellTool

pytestmark = pytest.mark.skipif(cannot_work() is not None, reason=str(cannot_work()))

LIMITS = ResourceLimits(disk_total_bytes=11 << 20)
"""Limits of no other test, because their zygote would have other interpreters."""
KINDS = {
    "forkserver": lambda: ForkServerRepl(ForkServerSandbox(LIMITS)),
    "subprocess": lambda: SubprocessRepl(BubblewrapSandbox()),
    "landlock": lambda: SubprocessRepl(LandlockSandbox()),
    "jupyter": JupyterRepl,
}
MARK = "TORCHRL_AGENTIC_MARK"
THREAD = """
import os, threading
def wait():
    while not os.path.exists('now'):
        event.wait(0.01)
    os.kill(os.getpid(), 9)
event = threading.Event()
threading.Thread(target=wait, daemon=True).start()
"""
PROCESS = """
import os, subprocess
script = f'while [ ! -e now ]; do sleep 0.02; done; kill -9 {os.getpid()}'
child = subprocess.Popen(['sh', '-c', script])
"""


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def host_pids(repl) -> list[int]:
    """Find the process that runs cells by its name, because its PID inside is different."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == repl.mark:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


async def marked(repl) -> int:
    """Return the PID outside of an interpreter, after giving it a unique name."""
    repl.mark = f"mark{os.urandom(3).hex()}"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{repl.mark}', 0, 0, 0); x = 1"
    assert (await repl.execute(code)).status == "ok"
    (pid,) = host_pids(repl)
    return pid


async def cell_that_runs(repl) -> asyncio.Task:
    """Return a task that executes code without end, and has begun: it gives the interpreter another name."""
    repl.mark = f"mark{os.urandom(3).hex()}"
    code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{repl.mark}', 0, 0, 0); time.sleep(10_000)"
    cell = asyncio.create_task(repl.execute(code, timeout=limit(50)))
    async with asyncio.timeout(limit(10)):
        while not host_pids(repl):
            await asyncio.sleep(0.01)
    return cell


async def gone(pid: int) -> None:
    async with asyncio.timeout(limit(10)):
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # its supervisor notices


def parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nPPid:")[2].split()[0])


async def test_interpreter_killed_between_cells_is_reported_with_the_next(make):
    """A timer of the cell may have done it."""
    async with make() as repl:
        pid = await marked(repl)
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        result = await repl.execute("'x' in globals()")
        assert (result.status, result.value, result.state_lost) == ("ok", "False", True)
        assert result.message == f"Before this call, {LOST}"
        assert not (await repl.execute("1")).state_lost


@pytest.mark.parametrize("code", ["import os; os.kill(os.getpid(), 9)", "import os; os._exit(0)"])
async def test_interpreter_ended_by_its_cell_is_an_error_of_the_cell(make, code):
    async with make() as repl:
        assert (await repl.execute("x = 1")).status == "ok"
        result = await repl.execute(code)
        assert (result.status, result.state_lost) == ("died", True)
        assert (await repl.execute("1 + 1")).value == "2"


@pytest.mark.parametrize("code", [THREAD, PROCESS], ids=["thread", "process"])
async def test_leftover_process_that_kills_the_interpreter_is_blamed_on_its_cell(make, code):
    async with make() as repl:
        pid = await marked(repl)
        assert (await repl.execute(code)).status == "ok"
        await repl.sandbox.write_file("now", b"")
        await gone(pid)
        result = await repl.execute("'x' in globals()")
        assert (result.value, result.state_lost) == ("False", True)


async def test_leftover_process_over_the_memory_limit_is_killed():
    """Between two cells: by its control group, which spares the interpreter, or by the supervisor, with all.

    A process that is killed for memory while a cell runs costs that cell its interpreter.
    """
    limits = ResourceLimits(disk_total_bytes=11 << 20, memory_total_bytes=96 << 20)
    async with ForkServerRepl(ForkServerSandbox(limits)) as repl:
        pid = await marked(repl)
        mark = f"mark{os.urandom(3).hex()}"
        program = (
            f"import os, time; '{mark}'\n"
            "while not os.path.exists('now'): time.sleep(0.02)\n"
            "x = bytearray(b'x' * (200 << 20)); time.sleep(60)"
        )
        code = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {program!r}])"
        assert (await repl.execute(code)).status == "ok"
        await repl.sandbox.write_file("now", b"")
        if repl.sandbox.limits_enforced["memory_total"]:
            await check_gone(mark)
            assert (await repl.execute("child.wait(20)", timeout=limit(30))).value == "-9"
        else:
            await gone(pid)
            assert (await repl.execute("1")).state_lost


async def test_killed_clone_does_not_affect_the_original():
    async with KINDS["forkserver"]() as repl:
        await repl.execute("y = 2")
        (clone,) = await repl.fork()
        async with clone:
            pid = await marked(clone)
            os.kill(pid, signal.SIGKILL)
            await gone(pid)
            assert (await clone.execute("'y' in globals()")).state_lost
        assert (await repl.execute("y")).value == "2"


@pytest.mark.parametrize("kind", ["forkserver", "subprocess", "landlock"])
@pytest.mark.parametrize("meanwhile", [True, False], ids=["while a cell runs", "between two cells"])
async def test_a_supervisor_that_is_lost_is_replaced(kind, meanwhile):
    """All files of a fork server's trajectory are lost with it, because it is process 1 of its namespaces."""
    lost = ALL_LOST if kind == "forkserver" else LOST
    async with KINDS[kind]() as repl:
        await repl.execute("open('kept', 'w').close()")
        supervisor = parent(await marked(repl))
        if not meanwhile:
            os.kill(supervisor, signal.SIGKILL)
        else:
            cell = await cell_that_runs(repl)
            os.kill(supervisor, signal.SIGKILL)
            async with asyncio.timeout(limit(10)):
                result = await cell
            assert (result.status, result.state_lost) == ("died", True)
            assert result.message.endswith(lost)
        await gone(supervisor)
        result = await repl.execute("import os; 'x' in globals(), os.path.exists('kept')")
        assert result.value == f"(False, {kind != 'forkserver'})"
        assert result.state_lost is not meanwhile
        assert meanwhile or lost in result.message
        assert not (await repl.execute("1")).state_lost


async def test_interpreter_lost_before_any_code_gives_infra():
    """For example files that were written for the code are lost."""
    limits = ResourceLimits(disk_total_bytes=12 << 20)
    async with (
        ForkServerRepl(ForkServerSandbox(limits)) as ready,
        ForkServerRepl(ForkServerSandbox(limits)) as repl,
    ):
        supervisor = parent(await marked(ready))
        await repl.sandbox.write_file("task", b"")
        zygote = parent(supervisor)
        children = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
        for child in map(int, children):  # also the spares
            if child != supervisor:
                os.kill(child, signal.SIGKILL)
                await gone(child)
        with pytest.raises(InfrastructureError, match="from outside"):
            await repl.execute("1")
        result = await repl.execute("1")
        assert (result.value, result.state_lost) == ("1", False)


async def test_killed_zygote_gives_infra_and_others_continue():
    """Nothing inside can reach it, and all trajectories of it are lost together."""
    sandbox = ForkServerSandbox(LIMITS)
    repls = [
        ForkServerRepl(sandbox.fresh()),
        SubprocessRepl(sandbox.fresh()),
        ForkServerRepl(sandbox.fresh()),
    ]
    for repl in repls:
        await repl.open()
        await repl.execute("x = 1")
    supervisor = parent(await marked(repls[2]))
    zygote = parent(supervisor)
    cells = [await cell_that_runs(repl) for repl in repls[:2]]
    os.kill(zygote, signal.SIGKILL)
    await gone(supervisor)
    async with asyncio.timeout(limit(20)):
        for found in await asyncio.gather(*cells, repls[2].execute("1"), return_exceptions=True):
            assert isinstance(found, InfrastructureError), found
        for repl in repls:
            assert (await repl.execute("40 + 2")).value == "42"
            await repl.close()


@pytest.mark.parametrize("kind", [ForkServerSandbox, LandlockSandbox], ids=["forkserver", "landlock"])
async def test_failures_of_model_code_never_give_infra(kind):
    """Python, commands and files in one sandbox, whose supervisor is lost in between."""
    sandbox = kind()
    repls: list[Repl] = []

    class Remembered(ForkServerRepl if kind is ForkServerSandbox else SubprocessRepl):
        def fresh(self, sandbox=None):
            repls.append(super().fresh(sandbox))
            return repls[-1]

    tools = [PythonTool(Remembered(sandbox)), ShellTool(sandbox), FileReadTool(sandbox)]
    calls = [("python", {"code": "2"}), ("shell", {"command": "echo on"}), ("file_read", {"path": "f"})]
    dispatcher = Dispatcher(tools)
    async with dispatcher.session("t") as session:
        for name, args in calls:
            await session.run([ParsedCall("shell", {"command": "echo text > f"}, "c0")])
            await session.run([ParsedCall("python", {"code": "x = 1"}, "c1")])
            supervisor = parent(await marked(repls[-1]))
            os.kill(supervisor, signal.SIGKILL)
            await gone(supervisor)
            (result,) = await session.run([ParsedCall(name, args, "c2")])
            assert result.status is not Status.INFRA, (name, result)
    await dispatcher.close()
