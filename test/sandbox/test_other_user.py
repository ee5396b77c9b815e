"""The local sandboxes pass `SandboxContract` for a trainer that is not root."""

import os
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.processes import run_program

from torchrl_agentic.sandbox.conformance import CASES
from torchrl_agentic.sandbox.python_runtime import find_python


def _for_others(root: Path, copy: Path) -> Path:
    """Return the folder of this package if other users may read it, otherwise a copy that they may read."""
    if all(path.stat().st_mode & stat.S_IXOTH for path in (root, *root.parents)):
        return root
    copy.mkdir(mode=0o755)
    for name in ("torchrl_agentic", "test/sandbox"):
        shutil.copytree(root / name, copy / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, copy)
    run_program(["chmod", "-R", "a+rX", str(copy)], check=True)
    return copy


@pytest.mark.slow
@pytest.mark.timeout(limit(500))
@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root runs all of this as somebody else anyway")
def test_all_of_it_holds_for_a_trainer_that_is_not_root():
    folder = Path("/tmp") / f"torchrl_agentic-others-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o1777)
    try:
        root = _for_others(Path(__file__).parents[2], folder / "copy")
        python = find_python()
        assert python is not None
        env = {
            **os.environ, "HOME": str(folder), "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
        }  # fmt: skip
        done = run_program(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python[0], "-m", "pytest",
             "-p", "no:cacheprovider", "-rfs", "--tb=line", "test/sandbox/test_contract.py"],
            cwd=root, env=env, capture_output=True, text=True, timeout=480, check=False,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 2 * len(CASES), done.stdout[-2000:]
