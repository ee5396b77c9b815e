"""Tests of interpreters with our supervisor, and of those that a fork server starts, beyond the contract."""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from helpers.limit import limit

from torchrl_agentic import ImagePart, ParsedCall, PythonTool
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.repl import ForkServerRepl, SubprocessRepl, default_repl
from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits, SandboxError, zygote_pool
from torchrl_agentic.sandbox.conformance.host_cases import file_appears
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work

pytestmark = pytest.mark.skipif(cannot_work() is not None, reason=f"no fork server here: {cannot_work()}")
PNG = b"\x89PNG\r\n\x1a\n"
CHANCE = """
import random, os
import numpy
class A: pass
class B: pass
def f(): pass
print(random.random(), numpy.random.rand(), {A, B, f, "x", "yy", 3.5}, hash("text"), os.getcwd(), os.getpid())
import time; print(time.tzname, os.environ.get("LANG"))
"""
LATE = """
import os, threading, time
def late():
    while not os.path.exists('now'):
        time.sleep(0.01)
    print('late', flush=True)
    open('printed', 'w').close()
threading.Thread(target=late).start()
"""


async def test_it_is_the_default_where_it_works():
    assert isinstance(default_repl(), ForkServerRepl)
    assert isinstance(PythonTool().repl, ForkServerRepl)


async def test_figures_and_displayed_objects_return_as_images():
    async with ForkServerRepl(ForkServerSandbox(ResourceLimits(wall_seconds=60))) as repl:
        code = "import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()\nplt.figure(); plt.plot([2])"
        shown = await repl.execute(code, timeout=limit(50))
        assert [(item.media_type, item.data[:8]) for item in shown.display] == [("image/png", PNG)] * 2
        assert "Warning" not in shown.text
        assert (await repl.execute("plt.get_fignums()")).value == "[]"
        as_value = await repl.execute("figure = plt.figure(); figure", timeout=limit(20))
        assert (len(as_value.display), as_value.value) == (1, None)
        many = await repl.execute("for _ in range(7): plt.figure()", timeout=limit(20))
        assert len(many.display) == 5
        assert "[2 images not shown" in many.stderr


async def test_only_valid_images_are_read_as_images():
    code = "class P:\n    def __init__(self, data): self.data = data\n"
    code += "    def _repr_png_(self): return self.data\n"
    async with ForkServerRepl() as repl:
        good = await repl.execute(code + f"display(P({PNG + b'rest'!r}), 'text')")
        assert [item.data for item in good.display] == [PNG + b"rest"]
        assert good.stdout == "text\n"
        assert (await repl.execute("display(P(b'<html>'))")).display == ()
        assert (await repl.execute("P(None)")).value is not None
        large = await repl.execute(f"display(P({PNG!r} + bytes(2 << 20)))")
        assert large.display == ()
        assert "not shown" in large.stderr


async def test_the_tool_gives_images_as_parts():
    dispatcher = Dispatcher([PythonTool()])
    async with dispatcher.session("t") as session:
        code = f"class P:\n    def _repr_png_(self): return {PNG!r}\nP()"
        (result,) = await session.run([ParsedCall("python", {"code": code}, "c1")])
        assert result.parts[1:] == (ImagePart(PNG),)
    await dispatcher.close()


async def test_the_same_code_and_seed_give_the_same_bytes_after_a_restart():
    """Also from another zygote: sets of classes and functions depend on addresses."""

    async def run(seed: int = 0) -> str:
        async with ForkServerRepl(ForkServerSandbox(seed=seed)) as repl:
            first = (await repl.execute(CHANCE)).stdout
            await repl.restart()
            second = (await repl.execute(CHANCE)).stdout
            assert first.split(" ")[:2] == second.split(" ")[:2]
            return first

    before = await run()
    await asyncio.to_thread(zygote_pool.close_pools)
    assert await run() == before
    assert await run(1) != before


async def test_numpy_is_seeded_when_a_cell_is_the_first_to_import_it():
    numbers = []
    for _ in range(2):
        async with ForkServerRepl(ForkServerSandbox(preload=())) as repl:
            numbers.append(
                (await repl.execute("import numpy\nfloat(numpy.random.rand())", timeout=limit(30))).value
            )
    assert numbers[0] == numbers[1] is not None


async def test_output_of_background_threads_is_marked():
    async with ForkServerRepl() as repl:
        assert (await repl.execute(LATE)).status == "ok"
        await repl.sandbox.write_file("now", b"")
        await file_appears(repl.sandbox, "printed")
        result = await repl.execute("print('now')")
        assert (result.background, result.stdout) == ("late\n", "now\n")
        assert result.text == "[background output since the last call]\nlate\nnow"


async def test_a_flood_stops_the_cell_and_keeps_state():
    async with ForkServerRepl() as repl:
        code = "x = 1\nimport os\nwhile True: os.write(1, b'z' * 65536)"
        result = await repl.execute(code, timeout=limit(30))
        assert (result.status, result.state_lost) == ("limit", False)
        assert "printed more than 64 MiB" in result.message
        assert result.omitted_bytes > 60 << 20
        assert (await repl.execute("x")).value == "1"


async def test_processes_that_take_too_much_memory_together_are_ended():
    limits = ResourceLimits(memory_total_bytes=200 << 20)
    async with ForkServerRepl(ForkServerSandbox(limits)) as repl:
        code = (
            "import os, time\nfor _ in range(4):\n"
            "    if os.fork() == 0: x = bytearray(b'x') * (100 << 20); time.sleep(100)\ntime.sleep(100)"
        )
        result = await repl.execute(code, timeout=limit(20))
        assert (result.status, result.state_lost) == ("limit", True)
        assert "200 MiB in all" in result.message


async def test_missing_preloaded_library_raises_on_open():
    with pytest.raises(SandboxError, match="no_such_library"):
        await ForkServerSandbox(preload=["no_such_library"]).open()


async def test_sandbox_has_one_interpreter_and_other_processes():
    async with ForkServerSandbox() as sandbox, ForkServerRepl(sandbox) as first:
        with pytest.raises(SandboxError, match="SubprocessRepl"):
            await ForkServerRepl(sandbox).open()
        async with SubprocessRepl(sandbox) as second:
            await first.execute("x = 1; open('f', 'w').write('shared')")
            assert (await second.execute("'x' in globals(), open('f').read()")).value == "(False, 'shared')"
        assert (await first.execute("x")).value == "1"


async def test_without_memory_for_another_one_it_waits_and_then_says_so(monkeypatch):
    monkeypatch.setattr(zygote_pool, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(zygote_pool, "ROOM_S", 0.1)
    with pytest.raises(SandboxError, match="1 MiB are available"):
        await ForkServerSandbox().open()


def process_names() -> set[str]:
    found: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            found.add(path.read_text().strip())
    return found


async def test_idle_interpreter_returns_its_memory(monkeypatch):
    monkeypatch.setattr("torchrl_agentic.sandbox.bootstrap.IDLE_S", 0.2)
    async with ForkServerRepl(ForkServerSandbox(ResourceLimits(disk_total_bytes=10 << 20))) as repl:
        mark = f"idle{os.urandom(3).hex()}"
        name = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0)"
        await repl.execute(f"{name}; x = 1; open('f', 'w').write('kept')")
        async with asyncio.timeout(limit(20)):
            while mark in process_names():
                await asyncio.sleep(0.02)
        result = await repl.execute("'x' in globals(), open('f').read()")
        assert result.value == "(False, 'kept')"
        assert "state was lost" in result.message


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (
            "import numpy, pandas\nprint(pandas.DataFrame({'a': [1, 2]}).a.sum(), numpy.eye(300).sum())",
            "3 300.0",
        ),
        ("print(multiprocessing.get_context('fork').Pool(2).map(math.sqrt, [1, 4]))", "[1.0, 2.0]"),
        ("print(multiprocessing.get_context('spawn').Pool(2).map(math.sqrt, [1, 4]))", "[1.0, 2.0]"),
        (
            "from multiprocessing import shared_memory\nqueue = multiprocessing.Queue()\n"
            "shared = shared_memory.SharedMemory(create=True, size=1 << 20)\n"
            "def fill(): shared.buf[0] = 7; queue.put(multiprocessing.Value('i', 3).value)\n"
            "child = multiprocessing.get_context('fork').Process(target=fill)\n"
            "child.start(); print(queue.get(), shared.buf[0]); child.join(); shared.close(); shared.unlink()",
            "3 7",
        ),
        (
            "import torch\nprint(torch.eye(200).mm(torch.ones(200, 1)).sum().item(), "
            "torch.zeros(1000).share_memory_().is_shared())",
            "200.0 True",
        ),
    ],
    ids=["numpy and pandas", "fork", "spawn", "shared memory", "torch"],
)
async def test_ordinary_code_fits_in_the_memory_limit(code, printed):
    limits = ResourceLimits(memory_bytes=4 << 30, memory_total_bytes=2 << 30)
    async with ForkServerRepl(ForkServerSandbox(limits)) as repl:
        result = await repl.execute("import math, multiprocessing\n" + code, timeout=limit(90))
        assert (result.stdout.strip(), result.stderr, result.message) == (printed, "", "")
