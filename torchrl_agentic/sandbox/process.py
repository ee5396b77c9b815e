"""Starting a process, keeping what it prints within bounds, and ending all of it whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.sandbox.capture import Capture, Drain
from torchrl_agentic.sandbox.workspace import NOBODY

END_S = 1.0
"""How long the processes behind a killed one may take to be gone."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. code: as Popen's, None where it was stopped at its time."""

    code: int | None
    stdout: Capture
    stderr: Capture
    wall_s: float


class Child:
    """A running process with pipes on stdout and stderr. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, stdout_fd: int, stderr_fd: int) -> None:
        self.process = process
        self.stdout_fd = stdout_fd
        self.stderr_fd = stderr_fd

    async def kill(self) -> None:
        """Kill it and its process group, and reap it. Not given up when the caller is cancelled."""
        await asyncio.shield(self._kill())

    async def _kill(self) -> None:
        # Also after it has ended: what it left in the background is of its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def wait(self) -> str:
        """Wait until it has ended, and say how."""
        return how(await self.process.wait())


def how(code: int) -> str:
    """Say how a process ended, from its exit code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"
    return f"exit code {code}"


def exit_or_signal(code: int) -> int:
    """Read an exit code as shells and bubblewrap give it, 128 + n for signal n; negative for a signal."""
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code


@functools.cache
def as_nobody() -> tuple[tuple[str, ...], dict[str, Any]]:
    """Say how to give up being root: a command to put in front, or arguments for Popen.

    With arguments, Popen has to copy the page tables of a trainer that may hold gigabytes: 12 ms for a small
    one, during which the event loop stands still, against 0.2 ms with setpriv.
    """
    if os.geteuid() != 0:
        return (), {}
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return (), {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"), {}


async def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stdin: bytes | None = None,
    pass_fds: Sequence[int] = (),
    drop_root: bool = False,
) -> Child:
    """Start a process in a session of its own, with exactly this environment and these files open.

    drop_root: where we are root, give that up before the program starts.

    Raises:
        OSError: the program cannot be started.
    """
    prefix, identity = as_nobody() if drop_root else ((), {})
    stdout_fd, stdout_end = os.pipe()
    stderr_fd, stderr_end = os.pipe()
    stdin_fd = None
    try:
        if stdin is not None:
            stdin_fd = os.memfd_create("stdin")
            os.write(stdin_fd, stdin)
            os.lseek(stdin_fd, 0, os.SEEK_SET)
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *argv,
            env=dict(env),
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL if stdin_fd is None else stdin_fd,
            stdout=stdout_end,
            stderr=stderr_end,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            **identity,
        )
    except BaseException:
        os.close(stdout_fd)
        os.close(stderr_fd)
        raise
    finally:
        os.close(stdout_end)
        os.close(stderr_end)
        if stdin_fd is not None:
            os.close(stdin_fd)
    return Child(process, stdout_fd, stderr_fd)


async def run_to_end(child: Child, *, timeout: float | None, output_bytes: int) -> Ended:
    """Wait for a process and keep its output; kill it at its time, and when the caller is cancelled."""
    began = time.monotonic()
    out, err = Capture(output_bytes), Capture(output_bytes)
    drains = (Drain(child.stdout_fd, out), Drain(child.stderr_fd, err))
    code: int | None = None
    try:
        async with asyncio.timeout(timeout):
            code = await child.process.wait()
    except TimeoutError:
        pass
    finally:
        await child.kill()
        # The pipes end when the last process that holds them is gone; one that hides outside our reach may
        # keep them.
        await asyncio.wait([asyncio.ensure_future(drain.ended.wait()) for drain in drains], timeout=END_S)
        for drain in drains:
            drain.pull()
            drain.stop()
    return Ended(code, out, err, time.monotonic() - began)
