"""The local sandboxes pass `SandboxContract`, for any user that trains."""

import os
import re
import shutil
import stat
import sys
import warnings
from pathlib import Path

import pytest
from helpers.limit import limit
from helpers.processes import run_program

from torchrl_agentic.sandbox import (
    BubblewrapSandbox,
    ForkServerSandbox,
    LandlockSandbox,
    ResourceLimits,
    Sandbox,
    UnsafeSubprocessSandbox,
)
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.sandbox.conformance import CASES
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.sandbox.landlock import why_not as no_landlock
from torchrl_agentic.sandbox.python_runtime import find_python
from torchrl_agentic.testing import SandboxContract


@pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
class TestBubblewrap(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return BubblewrapSandbox(limits)


@pytest.mark.skipif(cannot_work() is not None, reason=f"the fork server does not work here: {cannot_work()}")
class TestForkServer(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return ForkServerSandbox(limits)


@pytest.mark.skipif(no_landlock() is not None, reason=f"Landlock does not work here: {no_landlock()}")
class TestLandlock(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return LandlockSandbox(limits)


@pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")
class TestUnsafe(SandboxContract):
    def make(self, limits: ResourceLimits | None = None) -> Sandbox:
        return UnsafeSubprocessSandbox(limits)


async def test_the_unsafe_one_warns_each_time_it_opens():
    sandbox = UnsafeSubprocessSandbox()
    for _ in range(2):
        with pytest.warns(UserWarning, match="all your rights"):
            await sandbox.open()
        await sandbox.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UnsafeSubprocessSandbox()


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
