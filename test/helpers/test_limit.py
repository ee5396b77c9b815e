"""Limits grow with the work of the machine, and never shrink or grow without end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.limit import MOST, SLACK, SLOWNESS, WORK_S, limit, slowness
from helpers.processes import run_program
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
TIMES = st.floats(1e-6, 1e3)
LOADS = st.floats(0, 1e4)


@given(processes=st.integers(1, 99), work_s=TIMES, load=LOADS, more=LOADS, cores=st.integers(1, 99))
def test_more_load_and_a_slower_core_never_lower_it(processes, work_s, load, more, cores):
    found = slowness(processes, work_s=work_s, load=load, cores=cores)
    assert 1 <= found <= MOST
    assert found <= slowness(processes, work_s=work_s, load=load + more, cores=cores)
    assert found <= slowness(processes, work_s=2 * work_s, load=load, cores=cores)
    assert found <= slowness(2 * processes, work_s=work_s, load=load, cores=cores)


def test_an_idle_machine_is_not_slow_and_one_with_two_tests_per_core_is_twice_as_slow():
    assert slowness(1, work_s=WORK_S, load=0.5, cores=2) == 1
    assert slowness(4, work_s=WORK_S, load=0, cores=2) == 2


def test_limits_of_a_slow_machine_are_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(SLOWNESS, "2.5")
    assert limit(10) == 25 * SLACK


INNER = """
import os
import pytest
from helpers.limit import limit

@pytest.mark.parametrize("number", range(2))
def test_it(request, number):
    assert request.config.option.timeout == limit(120)
    with open(os.environ["NOTES"], "a") as file:
        print(os.environ["TORCHRL_AGENTIC_TEST_SLOWNESS"], file=file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_measured_once_per_run_and_bounds_every_test(tmp_path: Path, workers: int):
    (tmp_path / "conftest.py").write_text((ROOT / "test" / "conftest.py").read_text("utf-8"), "utf-8")
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(INNER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "test"), str(ROOT))), SLOWNESS: "0"}
    env["NOTES"] = str(tmp_path / "notes")
    words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-n", str(workers)]
    done = run_program([*words, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    measured = (tmp_path / "notes").read_text().split()
    assert len(measured) == 4
    assert len(set(measured)) == 1
    assert float(measured[0]) >= 1
