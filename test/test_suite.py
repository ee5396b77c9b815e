"""How tests are spread over processes."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ALONE = re.compile(r"^(import|from) ray\b|ray\.init\(|import.*\bcgroups\b|RLIMIT_NPROC, \(", re.MULTILINE)


def test_tests_that_start_ray_or_change_quotas_run_one_after_the_other(request: pytest.FixtureRequest):
    conftest = request.config.pluginmanager.get_plugin(str(HERE / "conftest.py"))
    listed = {entry.partition("::")[0] for entry in conftest.MACHINE}
    found = {path for path in HERE.rglob("test_*.py") if ALONE.search(path.read_text("utf-8"))}
    needing = {path.relative_to(HERE).as_posix() for path in found - {Path(__file__)}}
    assert needing - {"test_migration.py"} <= listed, (
        "add them to MACHINE"
    )  # that one runs in `make test-legacy`
    tutorials = [
        path.stem
        for path in (HERE.parent / "tutorials").glob("*.py")
        if "ray.init(" in path.read_text("utf-8")
    ]
    assert [
        name
        for name in tutorials
        if f"test_tutorials.py::test_a_tutorial_runs[{name}]" not in conftest.MACHINE
    ] == []
