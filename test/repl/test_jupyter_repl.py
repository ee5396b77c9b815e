"""An IPython kernel in a sandbox: the contract of interpreters, and figures."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("ipykernel")

from helpers.limit import limit
from helpers.processes import family, runs

from torchrl_agentic.errors import InfrastructureError, MissingExtra, SandboxError
from torchrl_agentic.repl import ReplDisplay
from torchrl_agentic.repl.base import KEPT, LOST
from torchrl_agentic.repl.jupyter_repl import JupyterRepl, sandbox_for_kernels
from torchrl_agentic.repl.supervised import MARGIN_S, MAX_IMAGES, MAX_TEXTS
from torchrl_agentic.sandbox import BubblewrapSandbox, ResourceLimits, UnsafeSubprocessSandbox
from torchrl_agentic.sandbox.bubblewrap import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
IGNORE = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
KERNEL = "k = get_ipython().kernel; s = k.session; parent = k.get_parent()"
UNSAFE = "ignore:UnsafeSubprocessSandbox runs code"
PNG = "b'\\x89PNG\\r\\n\\x1a\\n'"


@pytest.fixture
async def repl() -> AsyncGenerator[JupyterRepl]:
    async with JupyterRepl() as repl:
        yield repl


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncGenerator[JupyterRepl]:
    """One kernel for all tests that do not damage it."""
    async with JupyterRepl() as repl:
        yield repl


on_shared = pytest.mark.asyncio(loop_scope="module")


async def _works(repl: JupyterRepl) -> None:
    async with asyncio.timeout(limit(20)):
        assert (await repl.execute("40 + 2", timeout=limit(10))).value == "42"


async def _gone(pids: set[int]) -> None:
    async with asyncio.timeout(limit(5)):
        while any(runs(pid) for pid in pids):
            await asyncio.sleep(0.01)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_state_persists_and_the_last_expression_shows(repl: JupyterRepl):
    assert (await repl.execute("x = 20\ndef f(): return x + 1")).text == ""
    result = await repl.execute("print('hi')\nf()")
    assert (result.stdout, result.value, result.status, result.execution_count) == ("hi\n", "21", "ok", 2)
    assert (await repl.execute("None")).value is None
    assert (await repl.execute("list(range(40))")).value == repr(list(range(40)))  # on one line
    assert (await repl.execute("import asyncio; await asyncio.sleep(0, 'waited')")).value == "'waited'"
    assert (await repl.execute("!echo $((6 * 7))")).stdout == "42\n"
    assert (await repl.execute("import os; os.getcwd()")).value == "'/work'"


async def test_exception_is_reported_in_fields(repl: JupyterRepl):
    result = await repl.execute("def f():\n    raise ValueError('a: b\\nmulti: line')\nf()")
    assert result.error is not None
    assert (result.error.ename, result.error.evalue) == ("ValueError", "a: b\nmulti: line")
    assert result.error.traceback.startswith(
        'Traceback (most recent call last):\n  File "<cell 1>", line 3, in <module>\n    f()\n'
    )
    assert "ipykernel" not in result.error.traceback
    assert "\x1b" not in result.error.traceback
    assert result.status == "error"
    assert (await repl.execute("raise SystemExit(3)")).error.ename == "SystemExit"
    assert (await repl.execute("exit()")).error.ename == "SystemExit"
    assert (await repl.execute("f('\x1b[31m'")).error.ename == "SyntaxError"
    assert (await repl.execute("f()")).error.traceback.count("<cell ") == 2
    assert (await repl.execute("%nonsense")).status == "error"
    await _works(repl)


async def test_cells_keep_their_numbers_when_the_kernel_is_a_new_one(repl: JupyterRepl):
    await repl.execute("import os; os._exit(0)")
    result = await repl.execute("1 / 0")
    assert '"<cell 2>"' in result.error.traceback
    assert result.execution_count == 2


async def test_files_of_the_code_do_not_take_the_place_of_modules(repl: JupyterRepl):
    """A kernel restarts in a folder full of modules that would end it; its cells do import them."""
    names = (
        "random",
        "json",
        "zmq",
        "jupyter_client",
        "ipykernel",
        "ipykernel_launcher",
        "traitlets",
        "mine",
    )
    for name in names:
        await repl.sandbox.write_file(f"{name}.py", b"import os; os._exit(7)")
    await repl.restart()
    await _works(repl)
    assert "exit code 7" in (await repl.execute("import mine")).message


async def test_restart_forgets_variables_and_keeps_files(repl: JupyterRepl):
    await repl.execute("x = 1; open('f', 'w').write('kept')")
    await repl.restart()
    result = await repl.execute("x")
    assert result.error.ename == "NameError"
    assert not result.state_lost
    assert (await repl.execute("open('f').read()")).value == "'kept'"


async def test_a_fresh_one_shares_nothing(repl: JupyterRepl):
    await repl.execute("x = 1; open('f', 'w').write('mine')")
    async with repl.fresh() as other:
        assert (
            await other.execute("import os; 'x' in globals(), 'f' in os.listdir()")
        ).value == "(False, False)"


@on_shared
async def test_figures_are_images(shared: JupyterRepl):
    pytest.importorskip("matplotlib")
    result = await shared.execute("import matplotlib.pyplot as plt\nplt.plot([1, 2]);", timeout=limit(60))
    assert [(shown.media_type, shown.data[:8]) for shown in result.display] == [
        ("image/png", b"\x89PNG\r\n\x1a\n")
    ]
    assert result.stderr == ""


@on_shared
async def test_values_and_displays_are_images_or_text_and_nothing_else(shared: JupyterRepl):
    await shared.execute(
        "class Rich:\n"
        "    def __repr__(self): return 'plain'\n"
        "    def _repr_html_(self): return '<script>'\n"
        "    def _repr_javascript_(self): return 'alert()'\n"
        "    def _repr_svg_(self): return '<svg>'\n"
        "class Image(Rich):\n    def __init__(self, data): self.data = data\n"
        "    def _repr_png_(self): return self.data\n"
        "from IPython.display import HTML, Javascript"
    )
    assert (await shared.execute("display(Rich())\nRich()")).display == (ReplDisplay("text/plain", "plain"),)
    assert "alert" not in repr(await shared.execute("display(HTML('<p>alert'), Javascript('alert()'))"))
    result = await shared.execute(f"Image({PNG})")
    assert result.value == "plain"
    assert result.display == (ReplDisplay("image/png", b"\x89PNG\r\n\x1a\n"),)


@on_shared
@pytest.mark.parametrize(
    "data", ["b'GIF89a'", f"{PNG} + b'0' * (1 << 20)", "b''"], ids=["gif", "big", "empty"]
)
async def test_image_without_a_size_is_shown_as_text(shared: JupyterRepl, data: str):
    """Sent without the formatters, as hostile code would."""
    raw = f"'image/png': b64encode({data}).decode(), 'text/html': '<p>', 'text/plain': 'plain'"
    result = await shared.execute(f"from base64 import b64encode\ndisplay({{{raw}}}, raw=True)")
    assert result.display == (ReplDisplay("text/plain", "plain"),)


@on_shared
async def test_only_so_many_displays_are_kept(shared: JupyterRepl):
    image = f"class Image:\n    def _repr_png_(self): return {PNG} + b'0' * 900_000"
    code = f"{image}\nfor _ in range(40): display(Image())"
    result = await shared.execute(code, timeout=limit(30))
    kinds = [shown.media_type for shown in result.display]
    assert kinds.count("image/png") == MAX_IMAGES
    assert len(kinds) <= MAX_IMAGES + MAX_TEXTS
    await _works(shared)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import ctypes; ctypes.string_at(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.closerange(3, 1000)",
        "get_ipython().kernel.session.key = b'another'\nimport time; time.sleep(100)",
        "get_ipython().kernel.shell_stream = None\nget_ipython().kernel = None",
        "import sys, os\nos.kill(-1, 9)",
    ],
    ids=["_exit", "segfault", "kill", "closerange", "key", "kernel", "kill all"],
)
async def test_broken_kernel_is_reported_and_the_next_cell_works(repl: JupyterRepl, code: str):
    """Never an empty success, which would corrupt rewards unnoticed."""
    async with asyncio.timeout(limit(20)):
        result = await repl.execute(f"print('before')\n{code}", timeout=3)
    if result.status not in ("ok", "error"):
        assert result.state_lost
        assert LOST in result.message
    assert result.stdout == "before\n"
    await _works(repl)


@on_shared
async def test_a_value_is_not_lost_in_a_flood_of_displays(shared: JupyterRepl):
    """The kernel drops messages that are not read in time; the value comes with its answer."""
    result = await shared.execute("for i in range(5000): display('x' * 8000)\n42", timeout=limit(60))
    assert (result.status, result.value) == ("ok", "42")


async def test_death_of_the_interpreter_is_reported_at_once_with_its_cause(repl: JupyterRepl):
    async with asyncio.timeout(limit(5)):
        result = await repl.execute("import os; os._exit(3)", timeout=limit(100))
        assert (result.status, result.state_lost) == ("died", True)
        assert result.message == f"The interpreter ended (exit code 3); {LOST}"
        result = await repl.execute(
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", timeout=limit(100)
        )
    assert result.message == f"The interpreter ended (killed by SIGSEGV); {LOST}"


async def test_death_between_two_calls_is_reported_with_the_next(repl: JupyterRepl):
    await repl.execute("import os, threading; threading.Timer(0.05, os._exit, [0]).start()")
    async with asyncio.timeout(limit(5)):
        await asyncio.shield(repl._link.ended())
    result = await repl.execute("1 + 1", timeout=limit(5))
    assert (result.value, result.status, result.state_lost) == ("2", "ok", True)
    assert result.message == f"Before this call, {LOST}"
    assert not (await repl.execute("1")).state_lost


FORGERIES = [
    "for parts in ([b''], [b'x'] * 7, [b'<IDS|MSG>'], [b'<IDS|MSG>', b'', b'{}', b'[]', b'1', b'null']):\n"
    "    k.iopub_socket.send_multipart(parts)",
    "import pickle\n"
    "s.send(k.iopub_socket, 'execute_result', {'data': 3}, parent, buffers=[pickle.dumps(print)])",
    "for content in ({'data': []}, {'data': {'image/png': 7, 'text/plain': [[]]}}, {}, [], 'x'):\n"
    "    for kind in ('execute_result', 'display_data', 'stream', 'error', 'status', 'execute_input'):\n"
    "        s.send(k.iopub_socket, kind, content, parent)",
    "odd = {'name': [], 'execution_state': {}, 'data': {'text/plain': {}}}\n"
    "for kind in ('stream', 'status', 'execute_result'): s.send(k.iopub_socket, kind, odd, {'msg_id': []})",
    "deep = []\nfor _ in range(900): deep = [deep]\n"
    "s.send(k.iopub_socket, 'execute_result', {'data': {'text/plain': deep}}, parent)",
    "s.send(k.iopub_socket, 'execute_result', {'data': {'text/plain': 'x' * (40 << 20)}}, parent)",
]


@on_shared
@pytest.mark.parametrize("code", FORGERIES, ids=["parts", "pickle", "shapes", "parents", "deep", "long"])
async def test_forged_messages_affect_at_most_their_cell(shared: JupyterRepl, code: str):
    """The code knows the key, so the signature proves nothing."""
    await shared.execute("kept = 7")
    async with asyncio.timeout(limit(20)):
        result = await shared.execute(f"{KERNEL}\n{code}", timeout=limit(10))
        after = await shared.execute("kept", timeout=limit(5))
    if result.status not in ("ok", "error"):
        assert result.state_lost
    assert after.text == "7" or after.error.ename == "NameError"


async def test_a_forged_end_does_not_reach_the_next_cell(repl: JupyterRepl):
    code = (
        f"{KERNEL}\nimport time\nreply = {{'status': 'ok', 'execution_count': 1, 'user_expressions': {{}}}}\n"
        "s.send(k.shell_stream.socket, 'execute_reply', reply, parent, ident=k._parent_ident['shell'])\n"
        "s.send(k.iopub_socket, 'status', {'execution_state': 'idle'}, parent)\n"
        "time.sleep(0.5)\nprint('late')\n'forged'"
    )
    await repl.execute(code, timeout=limit(10))
    after = await repl.execute("'honest'", timeout=limit(10))
    assert after.value == "'honest'"
    assert "forged" not in after.text
    await _works(repl)


ENDLESS = """
import os, socket, time
def flood(fd):
    # One message of which there is always more: ZeroMQ keeps its parts until the last one is there.
    frame = bytes([1 | 2]) + (1 << 16).to_bytes(8, 'big') + b'x' * (1 << 16)
    end = time.time() + 3
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.setblocking(True)
        while time.time() < end:
            connection.sendall(frame)
for fd in range(3, 200):
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            name, peer = found.getsockname(), found.getpeername()
    except OSError:
        continue
    if found.family == socket.AF_UNIX and str(name).endswith('k-2'):
        print('found', flush=True)
        flood(fd)
"""


async def test_endless_message_does_not_use_memory(repl: JupyterRepl):
    before = _resident()
    result = await repl.execute(ENDLESS, timeout=limit(20))
    assert result.stdout.startswith("found\n") or result.state_lost
    assert _resident() - before < 64 << 20
    await _works(repl)


async def test_flood_of_messages_does_not_use_memory(repl: JupyterRepl):
    code = (
        f"{KERNEL}\nimport time\nend = time.time() + 2\nwhile time.time() < end:\n"
        "    s.send(k.iopub_socket, 'stream', {'name': 'stdout', 'text': 'x' * 1_000_000}, parent=parent)\n"
        "    s.send(k.iopub_socket, 'display_data', {'data': {'text/plain': 'y' * 100_000}}, parent=parent)"
    )
    before = _resident()
    result = await repl.execute(code, timeout=limit(20))
    assert len(result.stdout) < (1 << 20) + 100
    assert _resident() - before < 64 << 20
    await _works(repl)


@on_shared
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.close(1)",
        "import sys; sys.stdout = None",
        "import sys; sys.stdout = None\n1",
        "import sys; sys.stdout = sys.stderr = None\n1 / 0",
        "import sys; sys.stdout.close()",
        "import os; os.close(0); os.close(2)",
        "input()",
        "import getpass; getpass.getpass()",
        "import subprocess; subprocess.run(['cat'])",
        "import os; os.fork()",
        "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
        "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
        "class R:\n    def __repr__(self): raise KeyboardInterrupt\nR()",
        "class R:\n    def __repr__(self): return '\\ud800'\nR()",
        "raise ValueError('\\ud800')",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "%%capture hidden\nprint('seen')\n1 / 0",
        "get_ipython().set_next_input('x' * 1_000_000)",
        "\0",
        "x = '\ud800'",
        "def f(",
        "exit",
    ],
    ids=repr,
)
async def test_state_survives(shared: JupyterRepl, code: str):
    await shared.execute("kept = 7")
    async with asyncio.timeout(limit(10)):
        result = await shared.execute(code, timeout=limit(5))
    assert result.status in ("ok", "error")
    assert (await shared.execute("print('seen'); kept", timeout=limit(5))).text == "seen\n7"


@on_shared
async def test_asking_for_input_is_an_error_at_once(shared: JupyterRepl):
    async with asyncio.timeout(limit(5)):
        result = await shared.execute("input('name? ')")
    assert result.status == "error"
    assert "does not support input" in result.error.evalue


@on_shared
async def test_output_of_any_length_comes_back(shared: JupyterRepl):
    result = await shared.execute("import sys\nprint('x' * 100_000)\nsys.stderr.write('y' * 1_000_000); None")
    assert result.stdout == "x" * 100_000 + "\n"
    assert result.stderr == "y" * 1_000_000
    before = _resident()
    flood = await shared.execute(
        "import os\nfor _ in range(2000): os.write(1, b'z' * 50_000)", timeout=limit(20)
    )
    assert flood.omitted_bytes > 90_000_000
    assert f"[{flood.omitted_bytes} bytes omitted]" in flood.stdout
    assert len(flood.stdout) < 2_000_000
    assert _resident() - before < 64 << 20
    assert (await shared.execute("print('\\ud800', b'\\xff'.decode('latin1'))")).stdout == "\\ud800 ÿ\n"


@on_shared
async def test_output_of_child_processes_is_captured(shared: JupyterRepl):
    result = await shared.execute("import os; os.system('echo out; echo err >&2'); None")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


@on_shared
async def test_values_and_errors_of_any_length_come_back_short(shared: JupyterRepl):
    result = await shared.execute("'x' * 50_000_000", timeout=limit(20))
    assert result.value is not None
    assert len(result.value) < 10_000
    result = await shared.execute("raise ValueError('x' * 50_000_000)", timeout=limit(20))
    assert len(result.error.evalue) < 10_000
    assert len(result.error.traceback) < 20_000


@on_shared
async def test_code_of_ten_megabytes_runs_and_more_is_refused(shared: JupyterRepl):
    assert (await shared.execute(f"len('{'x' * 10_000_000}')", timeout=limit(30))).value == "10000000"
    assert (await shared.execute(" " * (17 << 20))).status == "error"
    await _works(shared)


@on_shared
@pytest.mark.parametrize(
    "busy",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "import asyncio; await asyncio.sleep(100)",
        "import os; os.system('sleep 100')",
        "import subprocess; subprocess.run(['sleep', '100'])",
        "while True: print('.', flush=True)",
        "while True: display(1)",
    ],
)
async def test_code_out_of_time_is_stopped_and_state_kept(shared: JupyterRepl, busy: str):
    await shared.execute("x = 5")
    async with asyncio.timeout(limit(30)):
        result = await shared.execute(f"print('begun')\n{busy}", timeout=(seconds := limit(0.3)))
    assert (result.status, result.timed_out, result.state_lost, result.error) == (
        "timeout",
        True,
        False,
        None,
    )
    assert result.stdout.startswith("begun\n")
    assert result.message == f"Execution exceeded {seconds:g} s and was stopped; {KEPT}"
    assert (await shared.execute("x", timeout=limit(5))).value == "5"


@on_shared
async def test_the_deadline_is_of_the_cell_and_not_of_each_message(shared: JupyterRepl):
    code = "import time\nfor i in range(100): display(i); print(i, flush=True); time.sleep(0.1)"
    async with asyncio.timeout(limit(8)):  # all of it takes 10 s
        result = await shared.execute(code, timeout=0.5)
    assert result.timed_out


async def test_code_that_swallows_the_interrupt_is_killed_and_its_late_output_gone(repl: JupyterRepl):
    seconds = limit(0.2)
    code = f"print('begun')\n{IGNORE}\nimport subprocess\n" + (
        "subprocess.Popen(['sh', '-c', 'until [ -e go ]; do sleep 0.05; done; echo late'])\n"
        "while True: time.sleep(1)"
    )
    async with asyncio.timeout(limit(10)):
        result = await repl.execute(code, timeout=seconds)
    assert (result.status, result.state_lost, result.stdout) == ("timeout", True, "begun\n")
    assert result.message == f"Execution exceeded {seconds:g} s and was stopped; {LOST}"
    await repl.sandbox.write_file("go", b"")
    after = await repl.execute("import time; time.sleep(0.4); print('clean')", timeout=limit(5))
    assert after.text == "clean"


async def test_code_that_swallows_the_interrupt_and_displays_for_ever_is_killed(repl: JupyterRepl):
    """Messages that still arrive do not make the kernel's grace time longer."""
    async with asyncio.timeout(limit(30)):
        result = await repl.execute(f"{IGNORE}\nwhile True: display(1)", timeout=limit(0.2))
    assert (result.status, result.state_lost) == ("timeout", True)
    await _works(repl)


async def test_the_deadline_covers_waiting_for_earlier_code(repl: JupyterRepl):
    first = asyncio.create_task(repl.execute("import time; time.sleep(100)", timeout=None))
    await asyncio.sleep(0)
    async with asyncio.timeout(limit(5)):
        second = await repl.execute("1", timeout=0.1)
    assert second.timed_out
    assert second.execution_count == -1
    await repl.interrupt()
    async with asyncio.timeout(limit(5)):
        assert (await first).error.ename == "KeyboardInterrupt"


@on_shared
async def test_an_interrupt_before_the_code_has_begun_is_not_lost(shared: JupyterRepl):
    task = asyncio.create_task(shared.execute("import time; time.sleep(100)"))
    await asyncio.sleep(0)
    await shared.interrupt()
    async with asyncio.timeout(limit(5)):
        assert (await task).error.ename == "KeyboardInterrupt"
    await shared.interrupt()
    await _works(shared)


@on_shared
async def test_an_interrupt_that_comes_as_the_code_begins_to_wait_is_not_lost(shared: JupyterRepl):
    """Python has noted the signal, and its main thread sits in a system call that did not see it.

    That happens when the signal comes between Python's last look and the call. Here another thread takes it.
    """
    mask = "import signal, time; signal.pthread_sigmask(signal.{}, {{signal.SIGINT}})"
    code = f"{mask.format('SIG_BLOCK')}\nopen('waits', 'w').close()\ntime.sleep(100)"
    task = asyncio.create_task(shared.execute(code))
    await _exists(shared, "waits")
    await shared.interrupt()
    async with asyncio.timeout(limit(5)):
        assert (await task).error.ename == "KeyboardInterrupt"
    await shared.execute(mask.format("SIG_UNBLOCK"))
    await _works(shared)


async def test_a_cancelled_execute_stops_its_code_and_keeps_state(repl: JupyterRepl):
    await repl.execute("x = 1")
    task = asyncio.create_task(
        repl.execute("x = 2\nprint('no')\nopen('begun', 'w').close()\nwhile True: pass")
    )
    await _exists(repl, "begun")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await repl.execute("x", timeout=limit(5))).text == "2"


async def _exists(repl: JupyterRepl, path: str) -> None:
    async with asyncio.timeout(limit(5)):
        while True:
            try:
                await repl.sandbox.read_file(path)
            except FileNotFoundError:
                await asyncio.sleep(0.01)
            else:
                return


async def test_cancelling_what_cannot_be_interrupted_leaves_nothing_running(repl: JupyterRepl):
    code = f"{IGNORE}\nimport subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
    task = asyncio.create_task(repl.execute(f"{code}open('begun', 'w').close()\nwhile True: pass"))
    await _exists(repl, "begun")
    pids = family(repl._process.process.pid)
    assert len(pids) >= 4
    began = time.monotonic()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _gone(pids)
    assert time.monotonic() - began < MARGIN_S  # the client reported it, and was not waited for in vain
    result = await repl.execute("1 + 1", timeout=limit(5))
    assert (result.value, result.state_lost, result.message) == ("2", True, f"Before this call, {LOST}")


async def test_second_cancellation_while_stopping_has_no_effect(repl: JupyterRepl):
    """The deadline is over and its grace period is not, so the answer is awaited already."""
    code = f"{IGNORE}\nopen('begun', 'w').close()\nwhile True: pass"
    seconds, began = limit(0.3), time.monotonic()
    task = asyncio.create_task(repl.execute(code, timeout=seconds))
    await _exists(repl, "begun")
    await asyncio.sleep(began + seconds + 0.2 - time.monotonic())
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    result = await repl.execute("1 + 1", timeout=limit(5))
    assert (result.value, result.status, result.state_lost) == ("2", "ok", True)


async def test_cancelling_while_a_kernel_starts_leaves_nothing_behind(repl: JupyterRepl):
    await repl.execute("import os; os._exit(0)")
    others = family(os.getpid())
    task = asyncio.create_task(repl.execute("1"))
    await asyncio.sleep(0.1)
    pids = family(os.getpid()) - others
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _gone(pids)
    await _works(repl)


async def test_nothing_is_left_after_close(workspaces):
    repl = JupyterRepl()
    await repl.open()
    await repl.open()
    assert os.listdir(workspaces)
    await repl.execute("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); None")
    pids = family(repl._process.process.pid)
    assert len(pids) >= 4
    await repl.close()
    await repl.close()
    assert not os.listdir(workspaces)
    await _gone(pids)
    with pytest.raises(InfrastructureError, match="not open"):
        await repl.execute("1")
    async with repl:
        await _works(repl)


async def test_closing_while_code_runs_does_not_restart_the_interpreter():
    repl = JupyterRepl()
    await repl.open()
    tasks = [asyncio.create_task(repl.execute("import time; time.sleep(100)")) for _ in range(2)]
    await asyncio.sleep(0.1)
    await repl.close()
    async with asyncio.timeout(limit(5)):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [InfrastructureError] * 2
    assert repl._link is None


async def test_sandbox_killed_from_outside_gives_infra(repl: JupyterRepl):
    task = asyncio.create_task(repl.execute("import time; time.sleep(100)"))
    await asyncio.sleep(0.2)
    os.kill(repl._process.process.pid, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="SIGKILL"):
        async with asyncio.timeout(limit(5)):
            await task
    await _works(repl)


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
async def test_without_isolation_the_running_python_is_used_with_all_its_packages():
    """An environment of one's own names no folders of packages; those of a venv belong to its python."""
    env = {"PATH": "/usr/bin:/bin"}
    async with JupyterRepl(UnsafeSubprocessSandbox(ResourceLimits(env=env))) as repl:
        result = await repl.execute("import sys; sys.prefix", timeout=limit(20))
    assert result.value == repr(sys.prefix)


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
@pytest.mark.parametrize("later", [False, True], ids=["at once", "after its answer"])
async def test_code_that_kills_its_kernel_client_gets_a_result(later: bool):
    """If both run as the same user and no namespace separates them."""
    kill = "os.kill(os.getppid(), 9)"
    code = f"import threading; threading.Timer(0.1, lambda: {kill}).start()" if later else kill
    async with JupyterRepl(UnsafeSubprocessSandbox()) as repl:
        result = await repl.execute(f"import os; {code}", timeout=limit(10))
        assert (result.status, result.state_lost) == (("ok", False) if later else ("died", True))
        if not later:
            assert result.message == f"The interpreter ended (killed by SIGKILL); {LOST}"
        if later:
            async with asyncio.timeout(limit(5)):
                await asyncio.shield(repl._link.ended())
            assert (await repl.execute("1", timeout=limit(10))).state_lost
        await _works(repl)


async def test_opening_twice_at_once_starts_one_interpreter():
    repl = JupyterRepl()
    await asyncio.gather(repl.open(), repl.open())
    await repl.execute("x = 1")
    assert (await repl.execute("x")).value == "1"
    await repl.close()


def test_each_event_loop_has_one_of_its_own():
    """Both are open at the same time, in their own threads."""
    both = threading.Barrier(2)
    values: list[str | None] = []

    async def use(number: int) -> None:
        async with JupyterRepl() as repl:
            await repl.execute(f"x = {number}")
            await asyncio.to_thread(both.wait, 30)
            values.append((await repl.execute("x")).value)

    threads = [threading.Thread(target=asyncio.run, args=[use(number)]) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(values) == ["1", "2"]


async def test_the_code_runs_without_rights_and_without_the_hosts_network(repl: JupyterRepl):
    status = (await repl.execute("print(open('/proc/self/status').read())")).stdout
    assert "CapEff:\t0000000000000000" in status
    assert "Seccomp:\t2" in status
    assert (await repl.execute("import os; os.getuid()")).value == "1000"
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
    assert "unreachable" in (await repl.execute(code)).error.evalue
    listening = "[line.split()[3] for line in open('/proc/net/tcp').readlines()[1:]]"
    assert (await repl.execute(listening)).value == "[]"


async def test_sandbox_without_unix_sockets_is_rejected_with_the_remedy():
    with pytest.raises(ValueError, match=r"network='loopback'"):
        JupyterRepl(BubblewrapSandbox())
    repl = JupyterRepl()
    repl.sandbox = BubblewrapSandbox(replace(repl.sandbox.limits, network="none"))
    with pytest.raises(SandboxError, match=r"network='loopback'"):
        await repl.open()
    assert not repl.sandbox.is_open


async def test_missing_jupyter_error_names_the_remedy():
    sandbox = BubblewrapSandbox(ResourceLimits(network="loopback"))
    async with sandbox:
        if (await sandbox.run([*sandbox.python_argv, "-s", "-c", "import jupyter_client"])).exit_code == 0:
            pytest.skip("the Python that sandboxes show has Jupyter")
    with pytest.raises(SandboxError, match=r"no module named 'jupyter_client'.*fs_read_roots"):
        await JupyterRepl(sandbox).open()


async def test_error_of_a_kernel_that_does_not_start_has_its_output():
    argv = ("/bin/sh", "-c", "echo the reason >&2; exit 5")
    with pytest.raises(SandboxError, match=r"exit code 5\s+the reason"):
        await JupyterRepl(kernel_argv=argv).open()
    with pytest.raises(SandboxError, match="/no/such/kernel"):
        await JupyterRepl(kernel_argv=("/no/such/kernel",)).open()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed kernel spec, whose program prints how it was started and ends."""
    folder = tmp_path / "kernels" / "mine"
    folder.mkdir(parents=True)
    code = "echo $GREETING {resource_dir} $0 >&2; exit 5"
    argv = ["/bin/sh", "-c", code, "{connection_file}"]
    text = json.dumps({"argv": argv, "display_name": "Mine", "language": "sh", "env": {"GREETING": "hello"}})
    (folder / "kernel.json").write_text(text)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))


@pytest.mark.usefixtures("spec")
async def test_a_kernel_that_is_named_is_started_as_its_spec_says(tmp_path: Path):
    repl = JupyterRepl(kernel_name="mine").fresh()
    with pytest.raises(SandboxError, match=rf"hello {tmp_path}/kernels/mine /\S+"):
        await repl.open()


@pytest.mark.usefixtures("spec")
def test_unknown_kernel_error_lists_the_installed_ones():
    with pytest.raises(ValueError, match=r"no kernel spec is named 'your'; installed: .*mine, python3"):
        JupyterRepl(kernel_name="your")
    with pytest.raises(TypeError, match="kernel_name and kernel_argv"):
        JupyterRepl(kernel_name="mine", kernel_argv=("sh",))


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ipykernel" else plain(name)
    )
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[jupyter\]"):
        JupyterRepl()


def test_hidden_packages_are_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchrl_agentic.repl.jupyter_repl.find_packages", dict)
    with pytest.raises(SandboxError, match="only root may read"):
        sandbox_for_kernels()


@pytest.mark.filterwarnings(UNSAFE)
async def test_it_works_in_any_sandbox_and_with_a_plain_kernel():
    """The kernel is stock ipykernel, which prints by messages and has its own displays."""
    sandbox = UnsafeSubprocessSandbox()
    argv = (
        *sandbox.python_argv,
        "-s",
        "-m",
        "ipykernel_launcher",
        "-f",
        "{connection_file}",
        "--log-level=50",
    )
    async with JupyterRepl(sandbox, kernel_argv=argv) as repl:
        result = await repl.execute("x = 2\nprint('hi')\nx", timeout=limit(10))
        assert (result.stdout, result.value) == ("hi\n", "2")
        result = await repl.execute("1 / 0", timeout=limit(10))
        assert result.error.ename == "ZeroDivisionError"
        assert "\x1b" not in result.error.traceback
        result = await repl.execute("while True: pass", timeout=0.5)
        assert result.message.endswith(KEPT)
        pids = family(repl._process.process.pid)
    await _gone(pids)


async def test_importing_it_imports_no_jupyter():
    module = "torchrl_agentic.repl.jupyter_repl"
    code = f"import sys, {module}; print('zmq' in sys.modules, 'ipykernel' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0].split() == [b"False", b"False"]
