"""A program in a running interpreter behaves as with `python3 main.py`: the same output, the same end."""

import base64
import re
from pathlib import Path

import pytest
from helpers.processes import run_program

from torchrl_agentic.sandbox.python_runtime import clean_env, python_inside

from .conftest import Run

pytestmark = pytest.mark.embedded
SECTIONS = re.split(r"^### (.*)\n", Path(__file__).with_name("programs.txt").read_text("utf-8"), flags=re.M)
PROGRAMS = {
    "nothing": "",
    "line ends of another system": "print(1)\r\nprint(2)\r\n",
    **dict(zip(SECTIONS[1::2], SECTIONS[2::2], strict=True)),
}
STDIN = "first\r\nsecond\nlast é"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_by_python(run: Run, tmp_path: Path, name: str):
    code = PROGRAMS[name]
    (tmp_path / "main.py").write_text(code, newline="")
    (tmp_path / "helper.py").write_text("x = 5")
    argv = [python_inside(), "main.py"]
    expected = run_program(
        argv, cwd=tmp_path, env=clean_env(), input=STDIN.encode(), capture_output=True, timeout=30
    )
    files = {"helper.py": base64.b64encode(b"x = 5").decode()}
    found = run(code, stdin=STDIN, files=files, run_timeout=30)["run_result"]
    assert found["status"] == "Finished"
    assert found["stdout"] == _in_work(expected.stdout, tmp_path)
    assert _plain(found["stderr"]) == _plain(_in_work(expected.stderr, tmp_path))
    assert found["return_code"] == expected.returncode


def _in_work(output: bytes, folder: Path) -> str:
    return output.decode("utf-8", "replace").replace(str(folder), "/work")


def _plain(text: str) -> str:
    """Remove what differs from process to process: addresses and thread numbers."""
    return re.sub(r"0x[0-9a-f]+", "0x", text)


@pytest.mark.parametrize("name", ["random", "numpy.random"])
def test_two_runs_see_other_random_numbers(run: Run, name: str):
    pytest.importorskip(name)
    code = f"import {name} as r; print(r.random())"
    assert run(code)["run_result"]["stdout"] != run(code)["run_result"]["stdout"]


def test_nothing_of_ours_is_among_the_modules_of_a_program(run: Run):
    code = "import sys; print([name for name in sys.modules if 'torchrl' in name])"
    assert run(code)["run_result"]["stdout"] == "[]\n"


def test_a_program_that_closes_all_files_ends_as_a_failure_and_is_not_run_again(run: Run):
    """The connection to its supervisor is among them: SandboxError would suggest a retry."""
    answer = run("import os, time\nprint('on', flush=True)\nos.closerange(3, 250)\ntime.sleep(60)")
    assert answer["status"] == "Failed"
    assert answer["run_result"]["stdout"] == "on\n"
    assert "closed its connection" in answer["run_result"]["stderr"]


def test_a_program_cannot_pass_itself_off_as_a_success(run: Run):
    """It finds the connection to its supervisor, and answers in place of the worker."""
    code = (
        "import os, time\nfrom struct import pack\n"
        "def fields(*parts): return b''.join(pack('>I', len(p)) + p for p in parts)\n"
        "for fd in range(3, 256):\n"
        "    try: os.write(fd, b'\\0' * 64)\n"
        "    except OSError: pass\n"
        "time.sleep(5)\nos._exit(3)"
    )
    answer = run(code)
    assert answer["status"] == "Failed"
    assert answer["run_result"]["return_code"] != 0
