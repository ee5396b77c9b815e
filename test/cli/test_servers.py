"""`serve`: commands that print their address, serve, and stop on a signal without leftovers."""

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
from helpers.limit import limit
from helpers.processes import family, runs, started
from typer.testing import CliRunner

from torchrl_agentic.cli import servers
from torchrl_agentic.cli.main import app
from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work

WAIT_S = limit(60)
TOKEN = "correct-horse-battery-staple"
works = pytest.mark.skipif(
    cannot_work() is not None, reason=f"the fork server does not work here: {cannot_work()}"
)


@contextmanager
def _started(*arguments: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Start the command; give it with the URL that it prints."""
    argv = [sys.executable, "-m", "torchrl_agentic.cli", "serve", *arguments]
    with started(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # what bounds it is the time limit of tests
            found = re.search(r"(http://\S+:\d+)/", line)
            assert found, line or process.communicate(timeout=WAIT_S)[1]
            yield process, found[1]
        finally:
            process.kill()


def _wait_until_gone(pids: set[int]) -> set[int]:
    """Give those that have not ended in time."""
    until = time.monotonic() + 10
    while pids and time.monotonic() < until:
        pids = {pid for pid in pids if runs(pid)}
        time.sleep(0.02)
    return pids


@works
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sandbox_server_serves_and_ends_cleanly(number: signal.Signals):
    with _started("sandbox", "--port", "0", "--max-concurrency", "2") as (process, url):
        assert httpx.get(f"{url}/v1/ping", trust_env=False).json() == "pong"
        body = {"code": "print(6 * 7)", "language": "python"}
        answer = httpx.post(f"{url}/run_code", json=body, trust_env=False, timeout=WAIT_S)
        assert answer.json()["run_result"]["stdout"] == "42\n"
        below = family(process.pid) - {process.pid}
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


def test_used_port_is_reported_in_one_sentence(tmp_path: Path):
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
        (["sandbox", "--max-concurrency", "0"], "max_concurrency must be at least 1"),
        (["sandbox", "--memory-mb", "0"], "memory_total_bytes must be above 0"),
        (["search", ".", "--host", "no.such.host.invalid"], "cannot listen"),
        (["search", ".", "--allowed-host", "a:80"], "'a:80' cannot be an allowed host"),
        (["search", ".", "--max-connections", "0"], "max_connections must be above 0"),
        (["sandbox", "--max-run-timeout", "0"], "max_run_timeout_s must be above 0"),
    ],
    ids=str,
)
def test_invalid_source_is_reported_in_one_sentence(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1, result.output
    assert expected in " ".join(result.output.split())


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n")
    return path


def _serve(folder: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Run the command up to where it would listen; return its exit code and output."""
    monkeypatch.setattr(servers, "_serve", lambda *_: 0)
    result = CliRunner().invoke(app, ["serve", "search", str(folder), *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_token(host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code, said = _serve(tmp_path, "--host", host, monkeypatch=monkeypatch)
    assert code == 0
    assert "without a token" not in said
    assert "holds no documents" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
@pytest.mark.parametrize("kind", ["search", "sandbox"])
def test_public_server_needs_a_token(host: str, kind: str, tmp_path: Path):
    path = [str(tmp_path)] if kind == "search" else []
    result = CliRunner().invoke(app, ["serve", kind, *path, "--host", host, "--port", "0"])
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "--token-file" in said
    assert "--insecure" in said


def test_insecure_public_server_prints_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code, said = _serve(tmp_path, "--host", "0.0.0.0", "--insecure", monkeypatch=monkeypatch)
    assert (code, "can read these documents without a token" in said) == (0, True)


def test_public_server_accepts_the_token(token_file: Path, tmp_path: Path):
    arguments = ("--host", "0.0.0.0", "--port", "0", "--token-file", str(token_file))
    with _started("search", str(tmp_path), *arguments) as (process, url):
        url = url.replace("0.0.0.0", "127.0.0.1")
        for headers, expected in (({}, 401), ({"Authorization": f"Bearer {TOKEN}"}, 200)):
            answer = httpx.post(f"{url}/retrieve", json={"queries": []}, headers=headers, trust_env=False)
            assert answer.status_code == expected
        process.send_signal(signal.SIGTERM)
        shown, said = process.communicate(timeout=WAIT_S)
    assert TOKEN not in shown + said


def test_hosts_are_allowed_by_name(tmp_path: Path):
    with _started("search", str(tmp_path), "--port", "0", "--allowed-host", "box.example") as (_, url):
        for host, expected in (("box.example", 200), ("evil.example", 403)):
            found = httpx.get(f"{url}/v1/ping", headers={"Host": host}, trust_env=False)
            assert found.status_code == expected


@pytest.mark.parametrize(
    ("mode", "content", "expected"),
    [
        (0o644, TOKEN, "chmod 600"),
        (0o602, TOKEN, "chmod 600"),
        (0o600, "", "0 characters"),
        (0o600, " \n", "0 characters"),
        (0o600, "short", "5 characters"),
        (0o600, f"{TOKEN}\n{TOKEN}", "characters"),
        (0o600, "ä" * 20, "characters"),
    ],
)
def test_a_token_file_that_keeps_no_secret_is_refused(
    mode: int, content: str, expected: str, token_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    token_file.write_text(content)
    token_file.chmod(mode)
    code, said = _serve(tmp_path, "--token-file", str(token_file), monkeypatch=monkeypatch)
    assert (code, expected in said, TOKEN in said) == (1, True, False)


def test_a_token_file_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code, said = _serve(tmp_path, "--token-file", str(tmp_path / "none"), monkeypatch=monkeypatch)
    assert code == 1
    assert "No such file" in said


def test_ipv6_address_is_printed_in_brackets(tmp_path: Path):
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
