"""Requirements of interpreters in every sandbox, as cases like those of `sandbox.conformance`.

Code that kills, stops or starves its supervisor gets a result that reports this. It never causes an error of
the infrastructure, which a reward leaves out: code could otherwise prevent that its failure counts.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from torchrl_agentic.repl.base import Repl, ReplResult
from torchrl_agentic.repl.duck_typed_repl import repl_in
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.sandbox.conformance import Case
from torchrl_agentic.sandbox.conformance.attack_cases import never_infra
from torchrl_agentic.sandbox.conformance.base import CaseGroup, Make
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

group = CaseGroup("interpreters")
LATER_S = 0.4
"""Seconds for which leftovers of a cell can act while no cell runs."""
ARM = """
import ctypes, fcntl, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
"""
TIMER = """
class Event(ctypes.Structure):
    _fields_ = [('value', ctypes.c_void_p), ('signo', ctypes.c_int), ('notify', ctypes.c_int),
                ('pad', ctypes.c_char * 48)]
timer = ctypes.c_void_p()
lib = libc if hasattr(libc, 'timer_create') else ctypes.CDLL('librt.so.1')
lib.timer_create(1, ctypes.byref(Event(None, 9, 0, b'')), ctypes.byref(timer))
lib.timer_settime(timer, 0, struct.pack('4q', 0, 0, 0, 100_000_000), None)
"""
LOOP = """
frame = sys._getframe()
while not hasattr(frame.f_locals.get('self'), 'streams'): frame = frame.f_back
worker = frame.f_locals['self']
"""
"""Finds the main loop of the interpreter; a Jupyter kernel has none."""


@asynccontextmanager
async def opened(sandbox: Sandbox) -> AsyncGenerator[Repl]:
    """Yield an open interpreter in which a cell has run."""
    async with repl_in(sandbox) as repl:
        assert (await repl.execute("x = 1", timeout=10)).status == "ok"
        yield repl


async def is_answered(repl: Repl, code: str) -> ReplResult:
    """Run code that breaks what it can, wait, and check that it and the next cells get results.

    On a busy machine the damage may come later than `LATER_S`, so any of the next cells may die of it.

    Args:
        repl: The interpreter.
        code: The code.
    """
    with never_infra():
        result = await repl.execute(textwrap.dedent(code), timeout=3)
        await asyncio.sleep(LATER_S)
        for _ in range(2):
            await repl.execute("1", timeout=10)
        after = await repl.execute("40 + 2", timeout=10)
        for _ in range(2):
            if after.status == "died":
                after = await repl.execute("40 + 2", timeout=10)
    assert after.value == "42", after
    return result


@group.case("host_processes", needs=["files"])
async def code_that_kills_its_supervisor_is_answered(sandbox: Sandbox) -> None:
    """Twice in a row: its replacement works as well."""
    async with opened(sandbox) as repl:
        for _ in range(2):
            await is_answered(repl, "import os; os.kill(os.getppid(), 9)")


@group.case("host_processes", needs=["files"])
async def code_that_kills_all_that_it_can_is_answered(sandbox: Sandbox) -> None:
    """All processes, and all of its group."""
    async with opened(sandbox) as repl:
        await is_answered(repl, "import os; os.kill(-1, 9)")
        await is_answered(repl, "import os; os.kill(0, 9)")


@group.case("host_processes", needs=["files"])
async def code_that_stops_its_supervisor_is_answered(sandbox: Sandbox) -> None:
    """The supervisor would then never answer."""
    async with opened(sandbox) as repl:
        await is_answered(repl, "import os; os.kill(os.getppid(), 19)")


@group.case("host_processes", needs=["files"])
async def processes_that_kill_their_supervisor_later_are_answered_for(sandbox: Sandbox) -> None:
    """After the cell that has started them is over."""
    async with opened(sandbox) as repl:
        await is_answered(
            repl,
            """
            import os, subprocess
            kill = f'sleep 0.1; kill -9 {os.getpid()} {os.getppid()}; kill -9 -1'
            subprocess.Popen(['sh', '-c', kill], start_new_session=True)
            """,
        )


@group.case(needs=["linux", "files"])
async def an_interpreter_that_kills_itself_after_its_answer_is_answered_for(sandbox: Sandbox) -> None:
    """Nothing seems to run when it ends, and any process may have sent the signal."""
    ways = {
        "alarm": "signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.setitimer(signal.ITIMER_REAL, 0.1)",
        "handler": (
            "signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), 9))\n"
            "signal.setitimer(signal.ITIMER_REAL, 0.1)"
        ),
        "timer": TIMER,
        "owner of a socket": (
            "fcntl.fcntl(3, fcntl.F_SETOWN, os.getpid()); fcntl.fcntl(3, 10, 9)\n"
            "fcntl.fcntl(3, fcntl.F_SETFL, fcntl.fcntl(3, fcntl.F_GETFL) | os.O_ASYNC)"
        ),
        "thread": "threading.Timer(0.1, os.kill, [os.getpid(), 9]).start()",
        "main loop": LOOP
        + (
            "class Control:\n"
            "    def __init__(self, control): self.control = control\n"
            "    def __getattr__(self, name): return getattr(self.control, name)\n"
            "    def sendall(self, data):\n"
            "        self.control.sendall(data); time.sleep(0.05); os.kill(os.getpid(), 9)\n"
            "worker.control = Control(worker.control)"
        ),
        "processor time": "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
        "def spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()",
        "memory": "x = []\ndef fill():\n    while True: x.append(bytearray(b'x' * (8 << 20)))\n"
        "threading.Thread(target=fill, daemon=True).start()",
    }
    async with opened(sandbox) as repl:
        for name, way in ways.items():
            if name == "memory" and not sandbox.limits_enforced["memory_bytes"]:
                continue
            try:
                await is_answered(repl, ARM + way)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


@group.case(needs=["linux", "files"])
async def garbage_in_all_that_is_open_is_answered(sandbox: Sandbox) -> None:
    """Into its own open files, and into those of its supervisor that it may open."""
    code = """
        import os
        frame = b'{"id": 1, "failed": "x", "killed": true}'
        frame = len(frame).to_bytes(4, 'big') + frame
        frame = len(frame).to_bytes(4, 'big') + frame
        def put(fd):
            try:
                os.set_blocking(fd, False)
                os.write(fd, frame + b'\\xff' * 64)
            except OSError: pass
        for fd in range(64): put(fd)
        for pid in {1, os.getppid()}:
            for fd in range(64):
                try: put(os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK))
                except OSError: pass
    """
    async with opened(sandbox) as repl:
        await is_answered(repl, code)


@group.case("host_processes", needs=["linux", "files"])
async def code_that_leaves_no_room_for_another_interpreter_is_answered(sandbox: Sandbox) -> None:
    """An inaccessible folder, modules that shadow those of Python, and a full disk; then it ends."""
    code = """
        import os, signal
        for name in ('json', 'socket', 'base64', 'encodings', 'sitecustomize', 'usercustomize'):
            open(name + '.py', 'w').write('raise SystemExit(3)')
        os.chmod('.', 0)
        try: os.kill(os.getppid(), 9)
        except OSError: pass
        os.kill(os.getpid(), 9)
    """
    async with opened(sandbox) as repl:
        with never_infra():
            for _ in range(2):
                await repl.execute(textwrap.dedent(code), timeout=3)
            await repl.execute("1", timeout=10)


@group.factory_case("leftover_cpu", needs=["cpu_seconds", "linux", "files"])
async def processor_time_of_leftovers_of_a_cell_is_bounded(make: Make) -> None:
    """Of processes, also in their own sessions, and of threads; a waiting process is not ended."""
    leave = """
        import os, subprocess, sys, threading
        spin = 'import signal; signal.pthread_sigmask(0, range(1, 65))\\nwhile True: pass'
        def start(code, **how): return subprocess.Popen([sys.executable, '-c', code], **how)
        spinning = [start(spin), start(spin, start_new_session=True)]
        serving = start('import time\\nwhile True: time.sleep(0.05)')
    """
    async with opened(make(ResourceLimits(cpu_seconds=1))) as repl:
        assert (await repl.execute(textwrap.dedent(leave), timeout=10)).status == "ok"
        look, value = "[child.poll() for child in (*spinning, serving)]", None
        async with asyncio.timeout(20):
            while value != "[-9, -9, None]":
                await asyncio.sleep(0.2)
                value = (await repl.execute(look, timeout=10)).value
                assert value is not None
        spin = "def spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()"
        assert (await repl.execute(spin, timeout=10)).status == "ok"
        for seconds in (2, 4, 8, 16):  # other processes may use the processor too
            await asyncio.sleep(seconds)
            if (await repl.execute("1", timeout=10)).state_lost:
                return
        raise AssertionError("a thread that a cell has left still uses the processor")


@group.factory_case("memory", needs=["memory_total", "linux", "files"])
async def code_that_takes_all_memory_is_answered(make: Make) -> None:
    """Many processes, some of which the kernel or the supervisor ends."""
    code = """
        import os, time
        for _ in range(12):
            if os.fork() == 0:
                kept = bytearray(b'x' * (40 << 20)); time.sleep(20); os._exit(0)
        kept = bytearray(b'x' * (60 << 20)); time.sleep(2)
    """
    limits = ResourceLimits(memory_total_bytes=256 << 20, memory_bytes=220 << 20)
    async with opened(make(limits)) as repl:
        for _ in range(2):
            await is_answered(repl, code)


@group.factory_case("memory", needs=["memory_total", "x86_64", "files"])
async def code_that_takes_memory_of_the_kernels_is_answered(make: Make) -> None:
    """It belongs to no process; the kernel may kill the supervisor for it."""
    code = """
        import ctypes, os, socket
        libc, kept = ctypes.CDLL(None), []
        for _ in range(200):
            if libc.semget(0, 32000, 0o1600) < 0: break
        try:
            for _ in range(200):
                kept.append(socket.socketpair())
                kept[-1][0].setblocking(False)
                kept[-1][0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                while True:
                    try: kept[-1][0].send(bytes(1 << 16))
                    except BlockingIOError: break
        except OSError: pass
    """
    limits = ResourceLimits(memory_total_bytes=256 << 20, memory_bytes=220 << 20)
    async with opened(make(limits)) as repl:
        for _ in range(2):
            await is_answered(repl, code)


CASES: tuple[Case, ...] = tuple(group.cases)
