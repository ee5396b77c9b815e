"""Runs one program, in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.repl import ForkServerRepl
from torchrl_agentic.sandbox import ForkServerSandbox, Sandbox
from torchrl_agentic.serve.forked import run_forked
from torchrl_agentic.serve.languages import PYTHON, Language
from torchrl_agentic.serve.wire import CommandResult, Json, RunCode, code_answer, refusal
from torchrl_agentic.serve.workspace import fetch, put, unused

MIN_S = 0.001
"""A time of 0 is over at once, but sandboxes want one above it."""


async def run_code(
    request: RunCode, make_sandbox: Callable[[], Sandbox], languages: Mapping[str, Language], max_bytes: int
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


async def _run_forked(request: RunCode, repl: ForkServerRepl, language: Language, max_bytes: int) -> Json:
    file = await _put(request, repl.sandbox, language)
    ran = await run_forked(
        repl,
        file,
        stdin=request.stdin,
        timeout=max(MIN_S, request.run_timeout),
        memory_bytes=_memory(request.memory_limit_MB, repl.sandbox, overhead_mb=0),
    )
    return code_answer(None, ran, await fetch(repl.sandbox, request.fetch_files, max_bytes))


async def _run(request: RunCode, sandbox: Sandbox, language: Language, max_bytes: int) -> Json:
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


async def _put(request: RunCode, sandbox: Sandbox, language: Language) -> str:
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
