"""The contract of every interpreter, against hostile code too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.repl import Repl

HANG_S = 60.0
ENDLESS_S = 1.0
"""Seconds that endless code gets; enough to begin on a busy machine."""
"""Seconds after which a step counts as hung; a busy machine must change no verdict."""


class ReplContract:
    """Tests of a `Repl`."""

    def make(self) -> Repl:
        """Return the interpreter to test: not open, in a sandbox of its own."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def repl(self) -> AsyncGenerator[Repl]:
        """Yield an open interpreter."""
        async with self.make() as repl:
            yield repl

    @staticmethod
    async def works(repl: Repl) -> None:
        """Check that the interpreter still runs code."""
        async with asyncio.timeout(HANG_S):
            assert (await repl.execute("40 + 2", timeout=HANG_S)).value == "42"

    @pytest.mark.asyncio
    async def test_state_persists_and_the_last_expression_shows(self, repl: Repl) -> None:
        assert (await repl.execute("x = 20\ndef f(): return x + 1")).text == ""
        result = await repl.execute("print('hi')\nf()")
        assert (result.stdout, result.value, result.status, result.execution_count) == ("hi\n", "21", "ok", 2)
        assert (await repl.execute("None")).value is None

    @pytest.mark.asyncio
    async def test_exception_is_reported_in_fields(self, repl: Repl) -> None:
        result = await repl.execute("def f():\n    raise ValueError('a: b\\nmulti: line')\nf()")
        assert result.error is not None
        assert (result.error.ename, result.error.evalue) == ("ValueError", "a: b\nmulti: line")
        assert "<cell 1>" in result.error.traceback
        assert "worker" not in result.error.traceback
        assert result.status == "error"
        assert (await repl.execute("raise SystemExit(3)")).status == "error"
        await self.works(repl)

    @pytest.mark.asyncio
    async def test_restart_forgets_variables_and_keeps_files(self, repl: Repl) -> None:
        await repl.execute("x = 1; open('f', 'w').write('kept')")
        await repl.restart()
        error = (await repl.execute("x")).error
        assert error is not None
        assert error.ename == "NameError"
        assert (await repl.execute("open('f').read()")).value == "'kept'"

    @pytest.mark.asyncio
    async def test_a_fresh_one_shares_nothing(self, repl: Repl) -> None:
        await repl.execute("x = 1; open('f', 'w').write('mine')")
        async with repl.fresh() as other:
            assert (
                await other.execute("'x' in globals(), __import__('os').listdir()")
            ).value == "(False, [])"

    @pytest.mark.parametrize(
        "code",
        [
            "os.write(3, b'junk' * 100)",
            "os.write(3, b'\\xff' * 8)",
            "os.write(3, b'\\0\\0\\0\\2[]')",
            "os.write(3, b'\\0\\0\\0\\4\\0\\0\\0\\5')",
            "os.write(3, b'\\0\\0\\0\\0' * 100)",
            "os._exit(0)",
            "import ctypes; ctypes.string_at(0)",
            "import signal; os.kill(os.getpid(), signal.SIGKILL)",
            "os.closerange(3, 1000); os.write(3, b'x')\nimport time; time.sleep(100)",
            "import threading, time; threading.Timer(0.2, os._exit, [3]).start(); time.sleep(10)",
            "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
            "os.execv('/bin/true', ['true'])",
        ],
        ids=[
            "junk", "long", "no field", "field that leaves", "empty", "_exit", "segfault", "kill",
            "closerange", "thread", "recursion", "exec",
        ],
    )  # fmt: skip
    @pytest.mark.asyncio
    async def test_broken_interpreter_is_reported_and_the_next_cell_works(
        self, repl: Repl, code: str
    ) -> None:
        """Never an empty success: that would poison rewards without a trace."""
        async with asyncio.timeout(HANG_S):
            result = await repl.execute(f"import os; print('before', flush=True)\n{code}", timeout=3)
        if result.status != "error":  # code whose write fails has an honest error
            assert result.status in ("died", "timeout")
            assert result.state_lost
            assert "state was lost" in result.message
            assert result.stdout == "before\n"
        await self.works(repl)

    @pytest.mark.asyncio
    async def test_forged_answer_affects_only_its_cell(self, repl: Repl) -> None:
        code = (
            "import os, struct\n"
            "def field(data): return struct.pack('>I', len(data)) + data\n"
            "os.write(3, field(b''.join(map(field, [b'1', b'=forged', b'', b'', b'', b'image/png', b'x']))))"
        )
        forged = await repl.execute(code)
        assert forged.display == ()
        after = await repl.execute("'honest'", timeout=HANG_S)
        assert after.value == "'honest'" or (after.status == "died" and after.state_lost)
        assert "forged" not in after.text
        await self.works(repl)

    @pytest.mark.asyncio
    async def test_code_that_shuts_its_connection_and_lives_on_cannot_hold_us_up(self, repl: Repl) -> None:
        """With `os._exit` out of the way the process stays; waiting for its end would never return."""
        code = (
            "import os, socket, time\nos._exit = lambda code: None\n"
            "for fd in range(3, 64):\n"
            "    try: socket.socket(fileno=os.dup(fd)).shutdown(2)\n"
            "    except OSError: pass\n"
            "time.sleep(1000)"
        )
        async with asyncio.timeout(HANG_S):
            result = await repl.execute(code, timeout=1)
        assert result.state_lost
        await self.works(repl)

    @pytest.mark.parametrize(
        "code",
        [
            "import os; os.close(1)",
            "import sys; sys.stdout = None",
            "import sys; sys.stdout.close()",
            "import os; os.close(0); os.close(2)",
            "input()",
            "import subprocess; subprocess.run(['cat'])",
            "import os; os.fork()",
            "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
            "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
            "class R:\n    def __repr__(self): raise KeyboardInterrupt\nR()",
            "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)",
            "\0",
            "x = '\ud800'",
            "def f(",
        ],
        ids=repr,
    )
    @pytest.mark.asyncio
    async def test_state_survives(self, repl: Repl, code: str) -> None:
        await repl.execute("kept = 7")
        result = await repl.execute(code, timeout=HANG_S)
        assert result.status in ("ok", "error")
        assert (await repl.execute("print('seen'); kept", timeout=HANG_S)).text == "seen\n7"

    @pytest.mark.parametrize("text", ["a\u2028b", "a\x0cb", "a\x85b", "\r", "é💥"])
    @pytest.mark.asyncio
    async def test_odd_separators_stay_what_they_are(self, repl: Repl, text: str) -> None:
        assert (await repl.execute(f"len('{text!s}')" if text != "\r" else "len('\\r')")).value == str(
            len(text)
        )
        assert (await repl.execute(f"print({text!r}, end='')")).stdout == text

    @pytest.mark.asyncio
    async def test_half_a_surrogate_pair_can_be_printed_and_raised(self, repl: Repl) -> None:
        assert (await repl.execute("print('\\ud800')")).stdout == "\\ud800\n"
        assert (await repl.execute("raise ValueError('\\ud800')")).status == "error"

    @pytest.mark.asyncio
    async def test_output_of_any_length_comes_back(self, repl: Repl) -> None:
        result = await repl.execute(
            "import sys\nprint('x' * 100_000)\nsys.stderr.write('y' * 1_000_000); None"
        )
        assert result.stdout == "x" * 100_000 + "\n"
        assert result.stderr == "y" * 1_000_000
        flood = await repl.execute("import os\nfor _ in range(200): os.write(1, b'z' * 50_000)", timeout=20)
        assert flood.omitted_bytes > 5_000_000
        assert len(flood.stdout) < 2_000_000

    @pytest.mark.asyncio
    async def test_code_of_ten_megabytes_runs_and_more_is_refused(self, repl: Repl) -> None:
        assert (await repl.execute(f"len('{'x' * 10_000_000}')", timeout=30)).value == "10000000"
        assert (await repl.execute(" " * (17 << 20))).status == "error"
        await self.works(repl)

    @pytest.mark.asyncio
    async def test_code_out_of_time_is_stopped_and_state_kept(self, repl: Repl) -> None:
        await repl.execute("x = 5")
        result = await repl.execute("print('begun', flush=True)\nwhile True: pass", timeout=ENDLESS_S)
        assert (result.status, result.timed_out, result.state_lost, result.error) == (
            "timeout",
            True,
            False,
            None,
        )
        assert result.stdout == "begun\n"
        assert (
            result.message == f"Execution exceeded {ENDLESS_S:g} s and was stopped; interpreter state is kept"
        )
        assert (await repl.execute("x")).value == "5"

    @pytest.mark.asyncio
    async def test_code_that_swallows_the_interrupt_is_killed_and_its_late_output_gone(
        self, repl: Repl
    ) -> None:
        code = (
            "import signal, time, subprocess\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            f"subprocess.Popen(['sh', '-c', 'sleep {ENDLESS_S + 1.2}; echo late'])\nwhile True: time.sleep(1)"
        )
        async with asyncio.timeout(HANG_S):
            result = await repl.execute(code, timeout=ENDLESS_S)
        assert (result.status, result.state_lost) == ("timeout", True)
        assert "interpreter state was lost (files in /work are kept)" in result.message
        after = await repl.execute("import time; time.sleep(0.4); print('clean')", timeout=HANG_S)
        assert after.text == "clean"

    @pytest.mark.asyncio
    async def test_the_deadline_covers_waiting_for_earlier_code(self, repl: Repl) -> None:
        first = asyncio.create_task(repl.execute("import time; time.sleep(100)", timeout=None))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(HANG_S):
            second = await repl.execute("1", timeout=0.1)
        assert second.timed_out
        assert second.execution_count == -1
        await repl.interrupt()
        error = (await first).error
        assert error is not None
        assert error.ename == "KeyboardInterrupt"

    @pytest.mark.asyncio
    async def test_a_cancelled_execute_stops_its_code_and_keeps_state(self, repl: Repl) -> None:
        await repl.execute("x = 1")
        task = asyncio.create_task(repl.execute("x = 2\nprint('no')\nwhile True: pass"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await repl.execute("x", timeout=HANG_S)).text == "2"

    @pytest.mark.asyncio
    async def test_open_and_close_are_idempotent(self) -> None:
        repl = self.make()
        await repl.close()
        await repl.open()
        await repl.open()
        await repl.close()
        await repl.close()
        assert not repl.sandbox.is_open
        with pytest.raises(InfrastructureError, match="not open"):
            await repl.execute("1")
        async with repl:
            await self.works(repl)

    @pytest.mark.asyncio
    async def test_opening_twice_at_once_starts_one_interpreter(self) -> None:
        repl = self.make()
        await asyncio.gather(repl.open(), repl.open())
        await repl.execute("x = 1")
        assert (await repl.execute("x")).value == "1"
        await repl.close()

    @pytest.mark.asyncio
    async def test_call_after_a_killed_one_reports_the_lost_state(self) -> None:
        async with self.make() as repl:
            code = "import signal, time; x = 1; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
            task = asyncio.create_task(repl.execute(code))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            result = await repl.execute("1")
            assert result.state_lost
            assert "state was lost" in result.text
