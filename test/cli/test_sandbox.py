"""`check` about sandboxes: what works here and why the rest does not, and cases whose failures fail it."""

import os
import sys
import sysconfig
import venv
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.limit import limit
from helpers.processes import run_program
from typer.testing import CliRunner, Result

from torchrl_agentic.cli.main import app
from torchrl_agentic.sandbox import SandboxError, UnsafeSubprocessSandbox
from torchrl_agentic.sandbox.bubblewrap import why_not
from torchrl_agentic.sandbox.tiers import tiers

works = pytest.mark.skipif(why_not() is not None, reason=f"bubblewrap does not work here: {why_not()}")
pytestmark = pytest.mark.filterwarnings("ignore:UnsafeSubprocessSandbox")


def _check(*arguments: str) -> tuple[Result, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    return result, " ".join(result.output.split())


@works
def test_all_tiers_are_listed_and_the_first_that_works_is_used():
    result, said = _check()
    assert result.exit_code == 0, said
    for kind, reason in tiers():
        assert kind.name in said
        assert reason is None or reason.split()[0] in said
    used = next(kind for kind, reason in tiers() if reason is None)
    assert f"torchrl-agentic check sandbox {used.name}" in said
    assert said.count("used") == 1
    assert "disk_total is not enforced: the files are in a folder of the host, which has no quota" in said


def test_a_tier_that_does_not_work_says_why(monkeypatch: pytest.MonkeyPatch):
    one = [(UnsafeSubprocessSandbox, "no kernel"), (UnsafeSubprocessSandbox, None)]
    monkeypatch.setattr("torchrl_agentic.sandbox.tiers.tiers", lambda: tuple(one))
    result, said = _check()
    assert result.exit_code == 0, said
    assert "no kernel" in said
    monkeypatch.setattr("torchrl_agentic.sandbox.tiers.tiers", lambda: tuple(one[:1]))
    result, said = _check()
    assert result.exit_code == 1
    assert "No sandbox works here" in said


def test_cases_that_pass_are_listed_with_those_that_are_declared():
    result, said = _check("sandbox", "unsafe", "--only", "commands")
    assert result.exit_code == 0, said
    assert "passed commands run at the same time" in said
    assert "declared memory of all commands together is bounded" in said
    assert "unsafe does not stop this threat: memory" in said
    assert "3 declared as not enforced" in said or "2 declared as not enforced" in said


class Boasting(UnsafeSubprocessSandbox):
    """The unsafe one, as if it could stop everything."""

    name: ClassVar[str] = "boasting"
    not_stopped: ClassVar[frozenset[str]] = frozenset()


class Broken(UnsafeSubprocessSandbox):
    """One that never works."""

    name: ClassVar[str] = "broken"

    async def open(self) -> None:
        raise SandboxError("the kernel is missing")


def test_undeclared_broken_promise_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchrl_agentic.sandbox.Boasting", Boasting, raising=False)
    monkeypatch.setattr("torchrl_agentic.sandbox.__all__", ["Sandbox", "Boasting"])
    result, said = _check("sandbox", "boasting", "--only", "files of the host cannot be read")
    assert result.exit_code == 1
    assert "FAILED files of the host cannot be read got through:" in said
    assert "1 FAILED of 1 cases" in said


def test_a_sandbox_that_does_not_work_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torchrl_agentic.sandbox.Broken", Broken, raising=False)
    monkeypatch.setattr("torchrl_agentic.sandbox.__all__", ["Broken"])
    result, said = _check("sandbox", "broken")
    assert result.exit_code == 1
    assert "broken does not work here: the kernel is missing" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bubblewarp"], "no sandbox is named 'bubblewarp'; available: bubblewrap, "),
        (["unsafe", "--only", "nothing like it"], "no case has 'nothing like it'"),
        (["no.such.module:Sandbox"], "no.such.module"),
        ([], "Missing argument"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], words: str):
    result, said = _check("sandbox", *arguments)
    assert result.exit_code == 2
    assert words in said


def test_sandbox_can_be_named_by_module():
    name = "torchrl_agentic.sandbox.unsafe:UnsafeSubprocessSandbox"
    result, said = _check("sandbox", name, "--only", "output and exit code come back")
    assert result.exit_code == 0, said
    assert "unsafe: 1 passed of 1 cases" in said


@works
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's environments can be closed to the code inside")
def test_an_environment_that_only_root_may_read_is_no_failure(tmp_path: Path):
    tmp_path.chmod(0o700)
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")})
    Path(site, "ours.pth").write_text("\n".join(filter(None, sys.path)))
    words = [str(tmp_path / "env/bin/python"), "-m", "torchrl_agentic.cli", "check", "sandbox", "forkserver"]
    done = run_program(
        [*words, "--only", "a trainer that"], capture_output=True, text=True, timeout=limit(120)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed of 2 cases" in done.stdout
