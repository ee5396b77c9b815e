"""Tests of an interpreter in one process beyond the contract."""

import asyncio
import ctypes
import os
import signal
from pathlib import Path

import pytest
from helpers.limit import limit

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.repl import SubprocessRepl
from torchrl_agentic.sandbox import (
    BubblewrapSandbox,
    ResourceLimits,
    SandboxError,
    UnsafeSubprocessSandbox,
)
from torchrl_agentic.sandbox.bubblewrap import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")


async def test_nothing_is_left_after_close(workspaces):
    repl = SubprocessRepl(BubblewrapSandbox())
    await repl.open()
    assert os.listdir(workspaces)
    pid = repl._process.process.pid
    await repl.execute("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); None")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert children
    await repl.close()
    assert not os.listdir(workspaces)
    async with asyncio.timeout(limit(5)):
        while any(Path(f"/proc/{child}").exists() for child in [pid, *children]):
            await asyncio.sleep(0.02)


async def test_sandbox_killed_from_outside_gives_infra():
    async with SubprocessRepl(BubblewrapSandbox()) as repl:
        task = asyncio.create_task(repl.execute("import time; time.sleep(100)"))
        await asyncio.sleep(0.2)
        os.kill(repl._process.process.pid, signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="lost"):
            async with asyncio.timeout(limit(5)):
                await task


async def test_error_of_a_python_that_does_not_start_has_its_output():
    repl = SubprocessRepl(BubblewrapSandbox(), python_argv=("sh", "-c", "echo no such thing >&2", "sh"))
    with pytest.raises(SandboxError, match="no such thing"):
        await repl.open()
    assert not repl.sandbox.is_open


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
@pytest.mark.skipif(not os.path.exists("/proc/sysvipc/shm"), reason="no System V segments to be seen here")
async def test_without_namespaces_memory_of_other_processes_is_not_counted():
    """An unattached segment of this process outlives an interpreter that used too much."""
    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, 1 << 20, 0o1600)
    try:
        sandbox = UnsafeSubprocessSandbox(ResourceLimits(memory_total_bytes=200 << 20))
        async with SubprocessRepl(sandbox) as repl:
            result = await repl.execute("import time\nx = bytearray(b'x') * (300 << 20)\ntime.sleep(20)")
            assert result.status != "ok"
        assert f" {segment} " in Path("/proc/sysvipc/shm").read_text()
    finally:
        libc.shmctl(segment, 0, None)
