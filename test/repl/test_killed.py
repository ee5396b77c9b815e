"""Who is to blame for an interpreter that was killed: the cell that ran or left something, else nobody."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.messages import ParsedCall, Status
from torchrl_agentic.repl import ForkServerRepl, JupyterRepl, SubprocessRepl
from torchrl_agentic.sandbox import BubblewrapSandbox, ForkServerSandbox, ResourceLimits
from torchrl_agentic.sandbox.forkserver import cannot_work
from torchrl_agentic.tools import PythonTool

pytestmark = pytest.mark.skipif(cannot_work() is not None, reason=str(cannot_work()))

LIMITS = ResourceLimits(disk_total_bytes=11 << 20)
"""Of no other test: their zygote would have other interpreters."""
KINDS = {
    "forkserver": lambda: ForkServerRepl(ForkServerSandbox(LIMITS)),
    "subprocess": lambda: SubprocessRepl(BubblewrapSandbox()),
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


def host_pid(repl) -> int:
    """Find the process that runs cells by its name, since its number inside is another one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == repl.mark:
                found.append(int(path.parent.name))
        except OSError:
            continue
    (pid,) = found
    return pid


async def marked(repl) -> int:
    """Give the interpreter a name of its own, and its number outside."""
    repl.mark = f"mark{os.urandom(3).hex()}"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{repl.mark}', 0, 0, 0); x = 1"
    assert (await repl.execute(code)).status == "ok"
    return host_pid(repl)


async def gone(pid: int) -> None:
    async with asyncio.timeout(10):
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # whoever watches it takes note


async def test_an_interpreter_that_is_killed_from_outside_between_two_cells_is_nobodys_fault(make):
    async with make() as repl:
        pid = await marked(repl)
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        with pytest.raises(InfrastructureError, match="killed from outside"):
            await repl.execute("open('ran', 'w').close()")
        result = await repl.execute("import os; 'x' in globals(), os.path.exists('ran')")
        assert (result.status, result.value, result.state_lost) == ("ok", "(False, False)", False)


@pytest.mark.parametrize("code", ["import os; os.kill(os.getpid(), 9)", "import os; os._exit(0)"])
async def test_an_interpreter_that_its_own_cell_ends_is_the_cells_fault(make, code):
    async with make() as repl:
        assert (await repl.execute("x = 1")).status == "ok"
        result = await repl.execute(code)
        assert (result.status, result.state_lost) == ("died", True)
        assert (await repl.execute("1 + 1")).value == "2"


@pytest.mark.parametrize("code", [THREAD, PROCESS], ids=["thread", "process"])
async def test_what_a_cell_left_running_and_kills_the_interpreter_later_is_the_cells_fault(make, code):
    async with make() as repl:
        pid = await marked(repl)
        assert (await repl.execute(code)).status == "ok"
        await repl.sandbox.write_file("now", b"")
        await gone(pid)
        result = await repl.execute("'x' in globals()")
        assert (result.value, result.state_lost) == ("False", True)


async def test_an_interpreter_that_was_given_up_for_memory_is_not_killed_from_outside():
    """The supervisor ends it by itself when what a cell has left takes too much."""
    limits = ResourceLimits(disk_total_bytes=11 << 20, memory_total_bytes=96 << 20)
    async with ForkServerRepl(ForkServerSandbox(limits)) as repl:
        pid = await marked(repl)
        program = "import time; x = bytearray(b'x' * (200 << 20)); time.sleep(60)"
        await repl.execute(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}])")
        await gone(pid)
        assert (await repl.execute("1")).state_lost


async def test_a_clone_that_is_killed_from_outside_is_nobodys_fault():
    async with KINDS["forkserver"]() as repl:
        await repl.execute("y = 2")
        (clone,) = await repl.fork()
        async with clone:
            pid = await marked(clone)
            os.kill(pid, signal.SIGKILL)
            await gone(pid)
            with pytest.raises(InfrastructureError, match="killed from outside"):
                await clone.execute("y")
        assert (await repl.execute("y")).value == "2"


async def test_the_tool_answers_infra_once_and_goes_on_with_a_new_interpreter():
    class Seen(PythonTool):
        repls: list = []  # noqa: RUF012

        def _with(self, repl):
            self.repls.append(repl)
            return super()._with(repl)

    tool = Seen(KINDS["forkserver"]())
    dispatcher = Dispatcher([tool])
    async with dispatcher.session("t") as session:
        await session.run([ParsedCall("python", {"code": "x = 1"}, "c0")])
        pid = await marked(tool.repls[0])
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        statuses = []
        for number in range(2):
            (result,) = await session.run([ParsedCall("python", {"code": "1 + 1"}, f"c{number + 1}")])
            statuses.append(result.status)
    await dispatcher.close()
    assert statuses == [Status.INFRA, Status.OK]
