"""Code inside any sandbox uses nothing that only Linux has, as far as can be tested on Linux."""

import sys
from pathlib import Path

import pytest
from helpers.limit import limit

from torchrl_agentic.repl import SubprocessRepl
from torchrl_agentic.sandbox import UnsafeSubprocessSandbox

ELSEWHERE = """
import ctypes, sys
class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "personality", "syscall"):
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = Library
sys.platform = "darwin"
exec(sys.argv[-1])
"""
"""A program that runs Python as on macOS, for code that asks for the system or for calls of the C library."""


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
async def test_code_runs_and_can_be_stopped(tmp_path: Path):
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    python = (sys.executable, str(tmp_path / "elsewhere.py"))
    async with SubprocessRepl(UnsafeSubprocessSandbox(), python_argv=python) as repl:
        assert (await repl.execute("import sys; sys.platform")).value == "'darwin'"
        ended = await repl.execute("import os; os._exit(3)")
        assert (ended.status, ended.state_lost) == ("died", True)
        deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
        stopped = await repl.execute(deaf, timeout=limit(0.2))
        assert (stopped.status, stopped.state_lost) == ("timeout", True)
        assert (await repl.execute("1 + 1")).value == "2"
