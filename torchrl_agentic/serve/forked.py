"""Runs Python programs in copies of an interpreter that is live already: a start costs 4 ms instead of 15."""

from __future__ import annotations

import re
import secrets
import signal
import time

from torchrl_agentic.repl import ForkServerRepl, ReplResult
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.program import PACKAGE
from torchrl_agentic.serve.wire import CommandResult

_ENDED = re.compile(
    r"\((?:exit code (?P<code>\d+)|killed by (?P<signal>SIG\w+)|killed by signal (?P<number>\d+))\)"
)
_KILLED = -9
_IMPORT = f"from {PACKAGE}.script import run_script"


async def run_forked(
    repl: ForkServerRepl, file: str, *, stdin: str | None, timeout: float, memory_bytes: int | None
) -> CommandResult:
    """Run a file below /work as `python3 FILE` would. The interpreter ends with it.

    Raises:
        SandboxError: it could not be started, or the sandbox is lost.
    """
    reading = None
    if stdin is not None:
        reading = f"{WORK}/.stdin-{secrets.token_hex(8)}"
        await repl.sandbox.write_file(reading, stdin.encode())
    call = f"run_script({f'{WORK}/{file}'!r}, {reading!r}, {timeout!r}, {memory_bytes!r})"
    began = time.perf_counter()
    found = await repl.execute(f"{_IMPORT}\n{call}", timeout=timeout)
    return _result(found, time.perf_counter() - began)


def _result(found: ReplResult, seconds: float) -> CommandResult:
    """Read off how the interpreter ended how the program did."""
    if found.timed_out:
        return CommandResult("TimeLimitExceeded", seconds, None, found.stdout, found.stderr)
    ended = _ENDED.search(found.message) if found.status == "died" else None
    if ended is not None:
        return CommandResult("Finished", seconds, _code(ended), found.stdout, found.stderr)
    # What follows is not the sandbox's fault: a program that has never begun ends with an exit code, too.
    said = found.message.partition(";")[0] or "the program answered in the place of what looks after it"
    return CommandResult("Finished", seconds, _KILLED, found.stdout, f"{found.stderr}\n[stopped: {said}]")


def _code(ended: re.Match[str]) -> int:
    if ended["code"] is not None:
        return int(ended["code"])
    return -(int(ended["number"]) if ended["signal"] is None else signal.Signals[ended["signal"]])
