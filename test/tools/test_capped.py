"""A Python program that is wrapped to bound its output behaves as before."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import run_program

from torchrl_agentic.tools.sandbox_fusion.capped import HEAD_BYTES, TAIL_BYTES, capped

TEXT = (Path(__file__).parents[1] / "serve" / "programs.txt").read_text("utf-8")
SECTIONS = re.split(r"^### (.*)\n", TEXT, flags=re.M)
PROGRAMS = dict(zip(SECTIONS[1::2], SECTIONS[2::2], strict=True))
del PROGRAMS["depth"]  # it counts how deep it may recurse, which is four calls less
PROGRAMS["streams"] = PROGRAMS["streams"].replace(" s.line_buffering,", "")  # stdout is flushed at each line


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    (folder / "main.py").write_text(code, newline="")
    (folder / "helper.py").write_text("x = 5")
    return run_program(
        [sys.executable, "main.py"],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        input=b"first\nsecond\nlast",
        capture_output=True,
        timeout=30,
    )


def _plain(output: bytes) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", output.decode("utf-8", "replace"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_wrapped_program_behaves_as_before(name: str, tmp_path: Path):
    expected, found = _run(PROGRAMS[name], tmp_path), _run(capped(PROGRAMS[name]), tmp_path)
    assert _plain(found.stdout) == _plain(expected.stdout)
    assert found.returncode == expected.returncode
    assert _plain(found.stderr) == _plain(expected.stderr)


def test_head_and_tail_of_long_output_are_kept_and_the_rest_counted(tmp_path: Path):
    found = _run(capped("import sys\nfor n in range(100000): print(n)\nsys.exit(3)"), tmp_path)
    whole = "".join(f"{n}\n" for n in range(100000)).encode()
    left_out = len(whole) - HEAD_BYTES - TAIL_BYTES
    assert (
        found.stdout
        == whole[:HEAD_BYTES] + b"\n[... %d bytes left out ...]\n" % left_out + whole[-TAIL_BYTES:]
    )
    assert found.returncode == 3


@pytest.mark.parametrize("size", [HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, HEAD_BYTES + TAIL_BYTES])
def test_short_text_is_kept_unchanged(size: int, tmp_path: Path):
    found = _run(capped(f"import sys\nsys.stdout.write('x' * {size})"), tmp_path)
    assert found.stdout == b"x" * size


def test_surrogates_in_code_are_accepted(tmp_path: Path):
    found = _run(capped("print(ascii('\ud800'))"), tmp_path)
    assert found.returncode in (0, 1)
