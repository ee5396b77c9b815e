"""Programs that are forks of a process with torch."""

import subprocess
import sys

import pytest
from helpers.forked import run_forked


def test_a_program_prints_and_exits_as_one_of_its_own(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys\nprint(sys.argv[1:], 'torch' in sys.modules)\nsys.exit('wrong')"
    )
    found = run_forked("program.py", "a", "b", cwd=tmp_path)
    assert (found.returncode, found.stdout) == (1, "['a', 'b'] True\n")
    assert found.stderr == "wrong\n"


def test_a_program_that_hangs_is_killed_with_what_it_has_started(tmp_path):
    started = [sys.executable, "-c", "import time; time.sleep(600)"]
    (tmp_path / "program.py").write_text(
        f"import subprocess, time\nsubprocess.Popen({started})\nprint('begun', flush=True)\ntime.sleep(600)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked("program.py", timeout=2, cwd=tmp_path)
