"""Processes of this machine and what they have started, from /proc; programs that end with their test."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.limit import limit

GROUP = "TORCHRL_AGENTIC_TEST_GROUP"
"""Environment variable that everything has which `started` or one of its descendants started."""


def children(pid: int) -> list[int]:
    """Return the children of a process; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    return {pid}.union(*map(family, children(pid)))


def command(pid: int) -> str | None:
    """Return the name of a process; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


def runs(pid: int) -> bool:
    """Return whether a process runs, zombies excluded."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def with_variable(name: str, value: str) -> list[int]:
    """Return the processes that were started with a value of an environment variable, zombies excluded."""
    entry = f"{name}={value}".encode()
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if entry in path.read_bytes().split(b"\0") and runs(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def kill_with_variable(name: str, value: str) -> list[int]:
    """Kill all processes of `with_variable` until there are none, and return them.

    A process group would not do: the workers of torchrun and of Ray lead groups of their own. A process that
    is ending has no environment any more, and runs a moment longer.
    """
    killed: list[int] = []
    while (found := with_variable(name, value)) or any(map(runs, killed)):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed += found
        time.sleep(0.01)
    return killed


@contextlib.contextmanager
def started(
    argv: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **options: Any
) -> Generator["subprocess.Popen[Any]"]:
    """Start a program in a session of its own. At the end, kill it and all that it has started.

    Args:
        argv: The program and its arguments.
        env: Its environment; None for that of this process.
        options: Other options of `subprocess.Popen`.
    """
    group = uuid.uuid4().hex
    env = {**(os.environ if env is None else env), GROUP: group}
    with subprocess.Popen(argv, env=env, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            kill_with_variable(GROUP, group)


def run_program(
    argv: Sequence[str | os.PathLike[str]],
    *,
    input: Any = None,
    timeout: float = 100,
    check: bool = False,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Run a program as `subprocess.run` does, and end all that it has started.

    Args:
        argv: The program and its arguments.
        input: Its stdin.
        timeout: Generous seconds for an idle machine, after which it counts as hung; see `limit`.
        check: Raise if it fails.
        options: Other options of `subprocess.Popen`, and `capture_output`.

    Raises:
        subprocess.CalledProcessError: If `check` is set and its exit code is not 0.
        subprocess.TimeoutExpired: If it hangs.
    """
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with started(argv, **options) as process:
        out, errors = process.communicate(input, timeout=limit(timeout))
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv, out, errors)
    return subprocess.CompletedProcess(argv, process.returncode, out, errors)
