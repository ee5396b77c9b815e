"""`run_code`: compiles and runs a program in a new sandbox, with its files."""

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

    Args:
        sandbox: The sandbox.
        files: Contents by path.

    Raises:
        BadRequest: If one cannot be written.
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
    """Read files that exist.

    Args:
        sandbox: The sandbox.
        paths: Their paths.
        max_bytes: Maximum bytes of all files together; files beyond it are left out.
    """
    files: dict[str, bytes] = {}
    missing: list[str] = []
    room = max_bytes
    for path in dict.fromkeys(paths):
        try:
            data = await sandbox.read_file(path, room + 1)
        except InfrastructureError:
            raise
        except OSError as error:
            missing.append(f"{path!r} is not returned: {error}")
            continue
        if len(data) > room:
            missing.append(f"{path!r} is not returned: all files together have more than {max_bytes} bytes")
            continue
        files[path] = data
        room -= len(data)
    return Fetched(files, tuple(missing))


def unused(name: str, taken: Mapping[str, object]) -> str:
    """Return a name that is not taken, `name` if possible.

    Args:
        name: The preferred name.
        taken: Names that are taken.
    """
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
    """Run a file below /work as `python3 FILE` would, in a running interpreter, which ends with it.

    Args:
        repl: The interpreter.
        file: Path of the file below /work.
        stdin: Standard input; None for empty input.
        timeout: Maximum seconds.
        memory_bytes: Bytes that it may map besides those that are mapped now; None for no limit.

    Raises:
        SandboxError: If it could not be started, or the sandbox is lost.
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
    """Derive how the program ended from how the interpreter ended."""
    if found.timed_out:
        return CommandResult("TimeLimitExceeded", seconds, None, found.stdout, found.stderr)
    ended = _ENDED.search(found.message) if found.status == "died" else None
    if ended is not None:
        return CommandResult("Finished", seconds, _code(ended), found.stdout, found.stderr)
    # From here on it is not the sandbox's fault: a program that has not started also has an exit code.
    said = found.message.partition(";")[0] or "the program answered in place of its supervisor"
    return CommandResult("Finished", seconds, _KILLED, found.stdout, f"{found.stderr}\n[stopped: {said}]")


def _code(ended: re.Match[str]) -> int:
    if ended["code"] is not None:
        return int(ended["code"])
    return -(int(ended["number"]) if ended["signal"] is None else signal.Signals[ended["signal"]])


MIN_S = 0.001
"""Minimum timeout: the protocol allows 0, but sandboxes need a positive number."""


async def run_code(
    request: RunCodeRequest,
    make_sandbox: Callable[[], Sandbox],
    languages: Mapping[str, Language],
    max_bytes: int,
) -> Json:
    """Compile and run a program, and return the response.

    Args:
        request: The request.
        make_sandbox: Creates an unopened sandbox.
        languages: Languages that the sandbox has, by name.
        max_bytes: Maximum bytes of all files that are returned.

    Raises:
        BadRequest: If its files cannot be written.
    """
    language = languages.get(request.language)
    if language is None:
        said = f"{request.language} cannot be run here; available: {', '.join(sorted(languages))}"
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
    """Write all files and the program, under an unused name. Return that name."""
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
    """Return how many bytes a process may map: the requested ones, or all of the sandbox's, and libraries."""
    asked = limit_mb << 20 if limit_mb > 0 else sandbox.limits.memory_total_bytes
    return None if asked is None else asked + (overhead_mb << 20)


def _least(*numbers: float | None) -> float | int | None:
    return min((number for number in numbers if number is not None), default=None)
