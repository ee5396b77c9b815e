"""`check load` reports throughput, queue times and errors of any tool."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchrl_agentic.cli.check import run_load_test
from torchrl_agentic.cli.main import app
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.limits import RateLimiter
from torchrl_agentic.messages import Status


@pytest.fixture(autouse=True)
def _own_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRL_AGENTIC_LIMITS", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def _run(*words: str):
    return CliRunner().invoke(app, ["check", "load", *words])


@pytest.mark.parametrize("tool", ["sandbox_fusion", "search"])
def test_a_tool_without_a_service_gets_one(tool: str):
    found = _run("--tool", tool, "--calls", "12", "--concurrency", "4")
    assert found.exit_code == 0, found.output
    assert "against a server started here" in found.output
    assert "12 ok" in found.output
    assert re.search(r"\d+\.\d calls/s", found.output)
    assert re.search(r"queue +[\d.,]+ +[\d.,]+ +[\d.,]+", found.output)


def test_failures_are_counted_by_their_status_and_shown():
    found = _run("--tool", "sandbox_fusion", "--calls", "3", "--args", '{"code": "1 / 0"}')
    assert found.exit_code == 1
    assert "3 error" in found.output
    assert "ZeroDivisionError" in found.output


def test_a_function_of_ones_own(tmp_path: Path):
    told = '"""Double it.\n\n    Args:\n        x: What.\n    """'
    code = f"def double(x: int) -> int:\n    {told}\n    return 2 * x"
    (tmp_path / "mine.py").write_text(code)
    found = _run("--tool", "mine.py:double", "--args", '{"x": 4}', "--calls", "50")
    assert found.exit_code == 0, found.output
    assert "50 calls of double" in found.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tool", "nothing"], "no tool 'nothing'"),
        (["--options", "{"], "Expecting"),
        (["--options", "[]"], "JSON objects"),
        (["--options", '{"sandbox_fusion_url": "x"}'], "http://"),
        (["--calls", "0"], "calls"),
    ],
)
def test_invalid_options_are_reported_in_one_sentence(words: list[str], says: str):
    found = _run(*words)
    assert found.exit_code == 2
    assert says in found.output


async def test_no_more_trajectories_call_at_once_than_asked_for():
    inside = most = 0

    async def work() -> str:
        """Work."""
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        import asyncio

        await asyncio.sleep(0)
        inside -= 1
        return "done"

    dispatcher = Dispatcher([work], rate_limits={"work": RateLimiter(max_concurrent=2)})
    found = await run_load_test(dispatcher, "work", {}, calls=40, concurrency=5)
    await dispatcher.close()
    assert found.statuses == {Status.OK: 40}
    assert len(found.queue_s) == len(found.run_s) == 40
    assert most <= 2
    assert found.per_second > 0


@pytest.mark.parametrize("numbers", [{"calls": 0, "concurrency": 1}, {"calls": 1, "concurrency": 0}])
async def test_invalid_numbers_are_rejected(numbers: dict[str, int]):
    with pytest.raises(ValueError, match="1 or more"):
        await run_load_test(Dispatcher(), "x", {}, **numbers)
