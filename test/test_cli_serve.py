"""`serve`: commands that say where they listen, serve, and end when they are told to, leaving nothing."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from torchrl_agentic import cli_serve
from torchrl_agentic.cli import app
from torchrl_agentic.sandbox.forkserver import cannot_work

WAIT_S = 60
works = pytest.mark.skipif(
    cannot_work() is not None, reason=f"the fork server does not work here: {cannot_work()}"
)


@contextmanager
def _started(*arguments: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Start the command; give it with the URL that it prints."""
    argv = [sys.executable, "-m", "torchrl_agentic.cli", "serve", *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # what bounds it is the time limit of tests
            found = re.search(r"(http://\S+:\d+)/", line)
            assert found, line or process.communicate(timeout=WAIT_S)[1]
            yield process, found[1]
        finally:
            process.kill()


def _below(pid: int) -> set[int]:
    """Give all processes that stem from this one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found and child not in found}:
        found |= more
    return found - {pid}


def _wait_until_gone(pids: set[int]) -> set[int]:
    """Give those that have not ended in time."""
    until = time.monotonic() + 10
    while pids and time.monotonic() < until:
        pids = {pid for pid in pids if _runs(pid)}
        time.sleep(0.02)
    return pids


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@works
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sandbox_server_serves_and_ends_cleanly(number: signal.Signals):
    with _started("sandbox", "--port", "0", "--max-concurrency", "2") as (process, url):
        assert httpx.get(f"{url}/v1/ping", trust_env=False).json() == "pong"
        body = {"code": "print(6 * 7)", "language": "python"}
        answer = httpx.post(f"{url}/run_code", json=body, trust_env=False, timeout=WAIT_S)
        assert answer.json()["run_result"]["stdout"] == "42\n"
        below = _below(process.pid)
        assert below
        process.send_signal(number)
        _, said = process.communicate(timeout=WAIT_S)
        assert (process.returncode, said) == (0, "")
        assert _wait_until_gone(below) == set()


def test_a_search_server_serves_and_ends_cleanly(tmp_path: Path):
    (tmp_path / "a.txt").write_text("Cats\nThey sleep.")
    with _started("search", str(tmp_path), "--port", "0") as (process, url):
        body = {"queries": ["cats"], "return_scores": True}
        answer = httpx.post(f"{url}/retrieve", json=body, trust_env=False, timeout=WAIT_S)
        assert answer.json()["result"][0][0]["document"]["contents"] == "Cats\nThey sleep."
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=WAIT_S)
        assert (process.returncode, said) == (0, "")


def test_a_port_that_is_taken_is_said_in_one_sentence(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "search", str(tmp_path), "--port", str(port)])
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert f"cannot listen at 127.0.0.1, port {port}: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["search", "missing.jsonl"], "missing.jsonl"),
        (["search", ".", "--topk", "0"], "topk must be"),
        (["sandbox", "--max-concurrency", "0"], "max_concurrency is 1 or more"),
        (["sandbox", "--memory-mb", "0"], "memory_total_bytes must be above 0"),
        (["search", ".", "--host", "no.such.host.invalid"], "cannot listen"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_said_in_one_sentence(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1, result.output
    assert expected in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("host", "warned"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_listening_for_others_is_warned_of(
    host: str,
    warned: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.setattr(cli_serve, "_serve", lambda *_: 0)
    assert cli_serve.serve_search(tmp_path, host, 1, topk=3) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert ("without a password" in said) == warned
    assert "holds no documents" in said


def test_the_address_of_version_6_stands_in_brackets(tmp_path: Path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    with _started("search", str(tmp_path), "--port", "0", "--host", "::1") as (_, url):
        assert url.startswith("http://[::1]:")
        assert httpx.get(f"{url}/v1/ping", trust_env=False).status_code == 200


def test_serve_is_in_the_help():
    said = CliRunner().invoke(app, ["--help"], env={**os.environ, "COLUMNS": "200"}).output
    assert "serve" in said


@pytest.mark.parametrize("arguments", [["serve"], ["serve", "--help"]])
def test_serve_alone_shows_which_servers_there_are(arguments: list[str]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == (0 if "--help" in arguments else 2)
    for word in ("Usage", "sandbox", "search"):
        assert word in result.output


def test_a_server_that_does_not_exist_is_refused():
    result = CliRunner().invoke(app, ["serve", "sandbx"])
    assert result.exit_code == 2
    assert "No such command 'sandbx'" in result.output
