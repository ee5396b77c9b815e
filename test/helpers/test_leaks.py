"""A test that leaves files or processes behind fails itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import run_program

ROOT = Path(__file__).parents[2]
LEAKS = {
    "socket": "socket.socket()",
    "file": "open(__file__)",
    "event_loop": "asyncio.new_event_loop()",
    "process": "kept.append(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']))",
}
INNER = """
import asyncio, gc, socket, subprocess, sys

kept = []

def test_before():
    pass

def test_leaks():
    cycle = [{leak}]
    cycle.append(cycle)

def test_after():
    gc.collect()

def test_keeps_what_it_needs_later():
    kept.append(socket.socket())

def test_closes_it():
    kept.pop().close()
    with subprocess.Popen([sys.executable, "-c", ""]):
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEAKS)
def test_the_test_that_leaks_is_the_one_that_fails_or_is_named_at_the_end_of_its_file(
    tmp_path: Path, kind: str
):
    (tmp_path / "conftest.py").write_text((ROOT / "test" / "conftest.py").read_text("utf-8"), "utf-8")
    (tmp_path / "test_inner.py").write_text(INNER.format(leak=LEAKS[kind]))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "test"), str(ROOT)))}
    words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-rA", str(tmp_path)]
    done = run_program(words, env=env, stdout=subprocess.PIPE, text=True)
    failed = [
        line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("ERROR ")
    ]
    assert failed == (["test_closes_it"] if kind == "process" else ["test_leaks"]), done.stdout
    assert kind != "process" or "processes were left: test_leaks started" in done.stdout
    assert "FAILED" not in done.stdout
    assert "5 passed, 1 error" in done.stdout
