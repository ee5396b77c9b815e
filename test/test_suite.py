"""How tests are spread over processes."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ALONE = re.compile(r"^(import|from) ray\b|ray\.init\(|import.*\bcgroups\b|RLIMIT_NPROC, \(", re.MULTILINE)
ELSEWHERE = {
    "test_suite.py",
    "test_migration.py",
    "rollout/test_vllm.py",
}  # `make test-legacy`, `make test-vllm`


def _needing(folder: Path, pattern: str) -> set[str]:
    """Return the files below a folder that start Ray or change quotas."""
    found = (path for path in folder.rglob(pattern) if ALONE.search(path.read_text("utf-8")))
    return {path.relative_to(folder).as_posix() for path in found}


def test_tests_that_start_ray_or_change_quotas_run_one_after_the_other(request: pytest.FixtureRequest):
    listed = request.config.pluginmanager.get_plugin(str(HERE / "conftest.py")).MACHINE
    assert _needing(HERE, "test_*.py") - ELSEWHERE <= {entry.partition("::")[0] for entry in listed}
    tutorials = [name.removesuffix(".py") for name in _needing(HERE.parent / "tutorials", "*.py")]
    assert {f"test_tutorials.py::test_a_tutorial_runs[{name}]" for name in tutorials} <= set(listed)
