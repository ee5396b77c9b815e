"""One test case in a Sandbox Fusion service, in the form of verl's `_process_single_case`."""

from __future__ import annotations

import asyncio
from typing import Any

from torchrl_agentic.tools.sandbox_fusion.fusion_client import Outcome, RunResult, SandboxFusionClient
from torchrl_agentic.tools.service import ServiceError

_RUN_STATUS = {
    Outcome.SUCCESS: ("Finished", "success", True),
    Outcome.RUN_FAILED: ("Finished", "runtime_error", -2),
    Outcome.RUN_TIMEOUT: ("TimeLimitExceeded", "timeout", -3),
    Outcome.COMPILE_FAILED: (None, "compile_error", -4),
    Outcome.COMPILE_TIMEOUT: (None, "compile_timeout", -4),
}
"""Outcome → verl's `run_status`, `status` and result."""


def process_single_case(
    case_index: int,
    stdin_data: Any,
    expected_output: Any,
    sandbox_fusion_url: str,
    generation: str,
    timeout: float,
    memory_limit_mb: int | str = 1024,
    language: str = "python",
    token_file: str | None = None,
) -> tuple[bool | int, dict[str, Any]]:
    """Run a program on one test case. The function blocks, so call it on a thread.

    Args:
        case_index: Number of the test case; copied into the metadata.
        stdin_data: Standard input of the program, or None.
        expected_output: Output to compare with; None: no comparison.
        sandbox_fusion_url: URL of the service.
        generation: Source of the program.
        timeout: Seconds for compiling, and as many for running.
        memory_limit_mb: Memory limit in MiB; early releases of verl pass the language in this position.
        language: One of the languages of the service.
        token_file: File with the token of the service.

    Returns:
        The result (True: right; False: wrong output; -1: the service failed; -2: the program failed; -3:
        timeout; -4: it does not compile) and the metadata, which has the keys "run_status", "stdout",
        "stderr", "exit_code" and "status" among others.
    """
    if isinstance(memory_limit_mb, str):
        memory_limit_mb, language = 1024, memory_limit_mb
    known: dict[str, Any] = {
        "case_index": case_index,
        "input": stdin_data,
        "expected_output": expected_output,
        "api_request_error": None,
        "status": "api_error",
        **dict.fromkeys(("run_status", "stdout", "stderr", "exit_code", "duration", "compile_stderr")),
    }

    async def run() -> RunResult:
        async with SandboxFusionClient(sandbox_fusion_url, token_file=token_file) as client:
            return await client.run_code(
                generation,
                language=language,
                run_timeout=timeout,
                memory_limit_mb=memory_limit_mb,
                stdin=None if stdin_data is None else str(stdin_data),
            )

    try:
        found = asyncio.run(run())
    except ServiceError as error:
        return -1, {**known, "api_request_error": str(error)}
    run_status, status, result = _RUN_STATUS[found.outcome]
    if result is True and expected_output is not None:
        result = found.stdout.strip() == str(expected_output).strip()
        status = "success" if result else "wrong_answer"
    metadata = {
        "run_status": run_status,
        "status": status,
        "stdout": found.stdout,
        "stderr": found.stderr,
        "exit_code": found.exit_code,
        "duration": found.seconds,
        "compile_stderr": found.compile_output or None,
    }
    return result, {**known, **metadata}
