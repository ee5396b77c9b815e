"""The files of one run: put there before it, fetched after it."""

from __future__ import annotations

import re
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.repl import ForkServerRepl, ReplResult
from torchrl_agentic.sandbox import ForkServerSandbox, Sandbox
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.bootstrap import PACKAGE
from torchrl_agentic.serve.access import BadRequest
from torchrl_agentic.serve.fusion_protocol import (
    PYTHON,
    CommandResult,
    Fetched,
    Json,
    Language,
    RunCodeRequest,
    code_answer,
    refusal,
)


async def put(sandbox: Sandbox, files: Mapping[str, bytes | None]) -> None:
    """Write files into a sandbox.

    Raises:
        BadRequest: they cannot all be written.
    """
    for path, data in files.items():
        if data is None:
            continue
        try:
            await sandbox.write_file(path, data)
        except InfrastructureError:
            raise
        except OSError as error:
            raise BadRequest(f"{path!r} cannot be written: {error}") from None


async def fetch(sandbox: Sandbox, paths: Sequence[str], max_bytes: int) -> Fetched:
    """Read the files that are there. max_bytes: of all together; those that do not fit are left out."""
    files: dict[str, bytes] = {}
    missing: list[str] = []
    room = max_bytes
    for path in dict.fromkeys(paths):
        try:
            data = await sandbox.read_file(path, room + 1)
        except InfrastructureError:
            raise
        except OSError as error:
            missing.append(f"{path!r} is not sent back: {error}")
            continue
        if len(data) > room:
            missing.append(f"{path!r} is not sent back: all together hold more than {max_bytes} bytes")
            continue
        files[path] = data
        room -= len(data)
    return Fetched(files, tuple(missing))


def unused(name: str, taken: Mapping[str, object]) -> str:
    """Give a name that no file has, this one if possible."""
    while name in taken:
        name = f"_{name}"
    return name


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


MIN_S = 0.001
"""A time of 0 is over at once, but sandboxes want one above it."""


async def run_code(
    request: RunCodeRequest,
    make_sandbox: Callable[[], Sandbox],
    languages: Mapping[str, Language],
    max_bytes: int,
) -> Json:
    """Compile and run a program, and give the answer for whoever sent it.

    max_bytes: of all files that are sent back.

    Raises:
        BadRequest: its files cannot be written.
    """
    language = languages.get(request.language)
    if language is None:
        said = f"{request.language} cannot be run here; {', '.join(sorted(languages))} can"
        return refusal(code_answer(None, None), said)
    try:
        sandbox = make_sandbox()
        if request.language == PYTHON and isinstance(sandbox, ForkServerSandbox):
            async with ForkServerRepl(sandbox) as repl:
                return await _run_forked(request, repl, language, max_bytes)
        async with sandbox:
            return await _run(request, sandbox, language, max_bytes)
    except InfrastructureError as error:
        return refusal(code_answer(None, None), str(error))


async def _run_forked(
    request: RunCodeRequest, repl: ForkServerRepl, language: Language, max_bytes: int
) -> Json:
    file = await _put(request, repl.sandbox, language)
    ran = await run_forked(
        repl,
        file,
        stdin=request.stdin,
        timeout=max(MIN_S, request.run_timeout),
        memory_bytes=_memory(request.memory_limit_MB, repl.sandbox, overhead_mb=0),
    )
    return code_answer(None, ran, await fetch(repl.sandbox, request.fetch_files, max_bytes))


async def _run(request: RunCodeRequest, sandbox: Sandbox, language: Language, max_bytes: int) -> Json:
    file = await _put(request, sandbox, language)
    compiled = None
    if language.compile:
        command = tuple(word.format(file=file) for word in language.compile)
        compiled = await _command(sandbox, command, request.compile_timeout)
        if not compiled.succeeded:
            return code_answer(compiled, None)
    memory_mb = request.memory_limit_MB if request.memory_limit_MB > 0 else None
    memory_bytes = None
    if language.memory_flag is None:
        memory_bytes = _memory(request.memory_limit_MB, sandbox, language.overhead_mb)
    command = language.command(file, memory_mb)
    ran = await _command(sandbox, command, request.run_timeout, request.stdin, memory_bytes)
    return code_answer(compiled, ran, await fetch(sandbox, request.fetch_files, max_bytes))


async def _put(request: RunCodeRequest, sandbox: Sandbox, language: Language) -> str:
    """Write all files, and the program under a name of its own; give that."""
    await put(sandbox, request.files)
    file = unused(language.file, request.files)
    await put(sandbox, {file: request.code.encode()})
    return file


async def _command(
    sandbox: Sandbox,
    argv: tuple[str, ...],
    timeout: float,
    stdin: str | None = None,
    memory_bytes: int | None = None,
) -> CommandResult:
    own = sandbox.limits
    limits = replace(
        own,
        wall_seconds=_least(max(MIN_S, timeout), own.wall_seconds),
        memory_bytes=_least(memory_bytes, own.memory_bytes),
    )
    data = None if stdin is None else stdin.encode()
    found = await sandbox.run(argv, stdin=data, limits=limits)
    if found.timed_out:
        return CommandResult("TimeLimitExceeded", found.wall_seconds, None, found.stdout, found.stderr)
    return CommandResult("Finished", found.wall_seconds, found.exit_code, found.stdout, found.stderr)


def _memory(limit_mb: int, sandbox: Sandbox, overhead_mb: int) -> int | None:
    """Give how many bytes a process may map: what was asked for, or all of the sandbox's, and libraries."""
    asked = limit_mb << 20 if limit_mb > 0 else sandbox.limits.memory_total_bytes
    return None if asked is None else asked + (overhead_mb << 20)


def _least(*numbers: float | None) -> float | int | None:
    return min((number for number in numbers if number is not None), default=None)
