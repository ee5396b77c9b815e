"""The examples run as programs, as the README says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_gsm8k_with_a_sandbox_service(tmp_path: Path):
    """A real model, and a real service over HTTP; whoever answers right has called it."""
    words = [
        sys.executable,
        str(ROOT / "examples/gsm8k_sandbox.py"),
        "--questions",
        "8",
        "--out",
        "turns.jsonl",
    ]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stderr
    assert "replayed 2 turns of GSM8K; 0 results differ" in found.stdout
    solved = re.search(r"(\d+) of 8 problems solved", found.stdout)
    assert solved is not None, found.stdout
    assert int(solved[1]) >= 6
    assert len((tmp_path / "turns.jsonl").read_text().splitlines()) == 9
