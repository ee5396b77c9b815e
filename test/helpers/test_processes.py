"""Programs of tests end with their test, and all that they started with them."""

import os
import subprocess
import sys

import pytest
from helpers.processes import GROUP, children, run_program, runs, started, with_variable

DAEMON = """
import os, subprocess, sys, time
pid = os.fork()
if pid == 0:
    os.setsid()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    os.write(1, f"{os.getpid()} {child.pid}\\n".encode())
    time.sleep(600)
"""


@pytest.mark.parametrize("then", ["time.sleep(600)", "os._exit(0)"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_processes_in_sessions_of_their_own_end_with_the_test(then: str, error: type[BaseException] | None):
    pids: list[int] = []

    def test() -> None:
        with started([sys.executable, "-c", DAEMON + then], stdout=subprocess.PIPE, text=True) as process:
            pids.extend(map(int, process.stdout.readline().split()))
            assert all(map(runs, pids))
            if error is not None:
                raise error

    if error is None:
        test()
    else:
        with pytest.raises(error):
            test()
    assert len(pids) == 2
    assert not any(map(runs, pids))


def test_a_program_that_hangs_is_ended_at_its_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("helpers.limit.SLACK", 0.01)
    before = {pid for pid in children(os.getpid()) if runs(pid)}
    with pytest.raises(subprocess.TimeoutExpired):
        run_program([sys.executable, "-c", "import time; time.sleep(600)"], timeout=1, capture_output=True)
    assert {pid for pid in children(os.getpid()) if runs(pid)} <= before


def test_other_processes_are_left_alone():
    sleep = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    with started(sleep, stdout=subprocess.PIPE) as other:
        with started(sleep, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == other.stdout.readline() == b"1\n"
        assert process.poll() is not None
        assert other.poll() is None


def test_a_program_runs_as_with_subprocess():
    code = "import os, sys; print(os.environ['A'], input()); print('e', file=sys.stderr); sys.exit(3)"
    given = {"env": {"A": "1"}, "input": "two", "text": True, "capture_output": True}
    done = run_program([sys.executable, "-c", code], **given)
    assert (done.returncode, done.stdout, done.stderr) == (3, "1 two\n", "e\n")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        run_program([sys.executable, "-c", code], check=True, **given)
    assert raised.value.stderr == "e\n"


def test_processes_are_found_by_a_variable_of_their_environment():
    code = "import os; print(os.environ['TORCHRL_AGENTIC_TEST_GROUP'], flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with started([sys.executable, "-c", code], **pipes) as process:
        group = process.stdout.readline().strip()
        assert with_variable(GROUP, group) == [process.pid]
    assert with_variable(GROUP, group) == []
