"""The examples run as programs, as in the README, and imports of examples and benchmarks exist."""

import ast
import importlib
import re
from pathlib import Path

import pytest
from helpers.forked import run_forked

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_name_that_a_program_imports_from_the_package_exists(path: Path):
    """Most of these programs take too long to be run by tests."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchrl_agentic"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


def test_gsm8k_with_a_sandbox_service(tmp_path: Path):
    """With a model and a service over HTTP; only a trajectory with a tool call can have the right answer."""
    words = [str(ROOT / "examples/gsm8k_sandbox.py"), "--questions", "8", "--out", "turns.jsonl"]
    found = run_forked(*words, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "replayed 2 turns of GSM8K; 0 results differ" in found.stdout
    solved = re.search(r"(\d+) of 8 problems solved", found.stdout)
    assert solved is not None, found.stdout
    assert int(solved[1]) >= 6
    assert len((tmp_path / "turns.jsonl").read_text().splitlines()) == 9
