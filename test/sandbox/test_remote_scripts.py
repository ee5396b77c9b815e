"""The scripts for the shells of other machines do the same in each shell that this one has."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helpers.processes import run_program

from torchrl_agentic.sandbox import ResourceLimits
from torchrl_agentic.sandbox.remote import scripts

SHELLS = [path for name in ("dash", "bash", "ksh", "busybox") if (path := shutil.which(name))]


def _run(
    shell: str, words: list[str], folder: Path, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a script for a machine with this shell as its /bin/sh and this folder as its /work."""
    (folder / "sh").unlink(missing_ok=True)
    (folder / "sh").symlink_to(shell)
    places = {"/bin/sh": str(folder / "sh"), "/work": str(folder)}
    words = [places.get(word, word) for word in words]
    return run_program(words, input=stdin, capture_output=True, check=False, timeout=20)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_passes_through_unchanged(shell, tmp_path):
    for argv, stdin, expected in (
        (["sh", "-c", "cat; echo e >&2; exit 3"], b"\0\xff", (3, b"\0\xff", b"e\n")),
        (["sh", "-c", "kill -9 $$"], b"", (137, b"", b"")),
        (["-c", "id"], b"", (127, b"", b"-c: not found\n")),
        (["printf", "%s|", "a b", "$(id)", "\n;"], b"", (0, b"a b|$(id)|\n;|", b"")),
    ):
        for given in (True, len(stdin)):
            done = _run(shell, scripts.supervised(argv, ResourceLimits(), stdin=given), tmp_path, stdin)
            numbers, _, stdout = done.stdout.partition(b"\n")
            assert (done.returncode, stdout, done.stderr) == expected
            assert len(numbers.split()) == scripts.NUMBERS


@pytest.mark.parametrize("shell", SHELLS)
def test_a_command_gets_as_much_input_as_was_announced(shell, tmp_path):
    """Also if more follows, and if it reads less; it is its own end that counts."""
    for argv, expected in (
        (["cat"], (0, b"\0\xff", b"")),
        (["true"], (0, b"", b"")),
        (["sh", "-c", "cat; kill -9 $$"], (137, b"\0\xff", b"")),
        (["exit", "0"], (127, b"", None)),
    ):
        done = _run(shell, scripts.supervised(argv, ResourceLimits(), stdin=2), tmp_path, b"\0\xffmore")
        assert (done.returncode, done.stdout.partition(b"\n")[2]) == expected[:2]
        assert expected[2] in (None, done.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_leftover_processes_end_with_their_command(shell, tmp_path):
    code = "sleep 60 >/dev/null 2>&1 & echo $!"
    done = _run(shell, scripts.supervised(["sh", "-c", code], ResourceLimits()), tmp_path)
    left = done.stdout.split()[-1].decode()
    ends = time.monotonic() + 5
    while os.path.exists(f"/proc/{left}") and "Z" not in Path(f"/proc/{left}/stat").read_text().split()[2]:
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize("shell", SHELLS)
def test_files_are_written_read_and_refused(shell, tmp_path):
    assert _run(shell, scripts.write("a b/-c"), tmp_path, b"\0data").returncode == 0
    assert _run(shell, scripts.read("a b/-c", 3), tmp_path).stdout == b"\0da"
    (tmp_path / "link").symlink_to("/etc")
    for path, expected in (
        ("link/passwd", PermissionError),
        ("a b", IsADirectoryError),
        ("no", FileNotFoundError),
    ):
        code = _run(shell, scripts.read(path, 10), tmp_path).returncode
        assert isinstance(scripts.refusal(code, path, ""), expected)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_machine_is_made_ready(shell, tmp_path):
    done = _run(shell, scripts.prepare(), tmp_path)
    assert (done.returncode, done.stdout in (b"0\n", b"1\n")) == (0, True)
