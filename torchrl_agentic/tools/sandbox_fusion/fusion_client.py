"""`SandboxFusionClient`: runs code in a Sandbox Fusion service and distinguishes all ways a run can end."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, cast

from torchrl_agentic.limits import Limiter
from torchrl_agentic.messages import JSON, Fields, fields_of
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.sandbox_fusion.capped import capped
from torchrl_agentic.tools.service import (
    Patience,
    ServiceClient,
    ServiceError,
    ServiceResponse,
    bearer,
    seconds_left,
)

ENDPOINT = "SANDBOX_FUSION_ENDPOINT"
"""Environment variable with the URL of the service, used if no URL is given."""
LANGUAGES = (
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust",
    "cuda", "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest",
    "verilog", "python_gpu", "lean", "swift", "racket",
)  # fmt: skip
MARGIN_S = 10.0
"""Seconds to wait for the response beyond the time of the run."""
RESPONSE_S, RESPONSE_SHARE = 2.0, 0.1
"""A run ends this many seconds, or this share of the remaining time, before the end of its call."""
FAIR_SHARE = 0.9
"""A run that was stopped before this share of its time is the service's fault, whose queue took the rest."""


class Outcome(StrEnum):
    """How a run ended; the values are those of the service's own SDK."""

    SUCCESS = "Success"
    COMPILE_FAILED = "CompileFailed"
    COMPILE_TIMEOUT = "CompileTimeout"
    RUN_FAILED = "RunFailed"
    RUN_TIMEOUT = "RunTimeout"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        outcome: How the run ended.
        stdout: Standard output.
        stderr: Standard error.
        exit_code: Exit code; negative for a signal, None if the run was stopped.
        seconds: Run time that the service measured, in seconds.
        compile_seconds: Compile time that the service measured, in seconds.
        compile_output: Output of the compiler.
        files: Contents of the requested files, by path.
        display: Displayed objects of cells, each as a mapping from MIME types to data.
        errors: Exceptions of cells, each with "ename", "evalue" and "traceback".
        pod: Name of the machine that ran the code.
        queue_s: Seconds spent waiting for the limiter and between tries.
        run_s: Seconds of the last try.
        tries: Number of tries.
        timeout_s: Seconds that the run was allowed to take.
    """

    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float | None = None
    compile_seconds: float | None = None
    compile_output: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    display: tuple[Mapping[str, JSON], ...] = ()
    errors: tuple[Mapping[str, JSON], ...] = ()
    pod: str | None = None
    queue_s: float = 0.0
    run_s: float = 0.0
    tries: int = 1
    timeout_s: float | None = None

    @property
    def undecodable(self) -> bool:
        """True if the output was not UTF-8."""
        return any(text.startswith("[DecodeError]") for text in (self.stdout, self.stderr))


class SandboxFusionClient:
    """Runs code in a Sandbox Fusion service; rewards and tools may share one client.

    Failures of the service raise `ServiceError`; failures of the code are results.

    Args:
        url: URL of the service, or of its `/run_code`; None: the one in SANDBOX_FUSION_ENDPOINT.
        limiter: Limiter of the requests; see `ServiceClient`.
        max_connections: Most connections of this process.
        patience: How long to go on trying.
        headers: Headers of each request.
        token_file: File with the token of the service, as of `torchrl-agentic serve sandbox --token-file`.

    Raises:
        ValueError: If there is no valid URL, the file has no token, or all users can read the file.
        OSError: If the token cannot be read.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        limiter: Limiter | None = None,
        max_connections: int = 10,
        patience: Patience | None = None,
        headers: Mapping[str, str] | None = None,
        token_file: str | Path | None = None,
    ) -> None:
        self.url = service_url(url)
        self.service = ServiceClient(
            "the sandbox service",
            limiter,
            max_connections=max_connections,
            patience=patience,
            headers={**(headers or {}), **bearer(token_file)},
        )

    async def run_code(
        self,
        code: str,
        *,
        language: str = "python",
        run_timeout: float = 30.0,
        compile_timeout: float | None = None,
        memory_limit_mb: int = 1024,
        stdin: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        cap_output: bool = True,
        ctx: ToolContext | None = None,
    ) -> RunResult:
        """Run a program.

        Args:
            code: Source of the program.
            language: One of `LANGUAGES`.
            run_timeout: Seconds that it may run; fewer if its call ends before.
            compile_timeout: Seconds that compiling may take, fewer likewise; None: the same as the run.
            memory_limit_mb: Memory limit in MiB; -1: no limit.
            stdin: Standard input of the program.
            files: Contents of files that are written before the run, by path.
            fetch_files: Paths of files that are read after the run.
            cap_output: For Python, shorten long output, which would block the service; see `capped`.
            ctx: Context of the tool call that the run belongs to; its deadline bounds everything.

        Raises:
            ServiceError: If the service failed, or its queue took time that the program should have had.
            ValueError: If the language is unknown.
        """
        if language not in LANGUAGES:
            raise ValueError(f"unknown language {language!r}; known: {', '.join(LANGUAGES)}")
        compile_s = run_timeout if compile_timeout is None else compile_timeout
        payload = {
            "code": capped(code) if cap_output and language == "python" else code,
            "language": language,
            "memory_limit_MB": memory_limit_mb,
            "stdin": stdin,
            "files": _packed(files),
            "fetch_files": list(fetch_files),
        }
        times = _RunTimes({"run_timeout": run_timeout, "compile_timeout": compile_s}, ctx)
        if language != "python":  # compiling and running take their times one after the other
            times.share_s = run_timeout + compile_s
        response = await self._post("/run_code", payload, times, run_timeout + compile_s + MARGIN_S, ctx)
        return times.checked(_code_result(response), "run_timeout")

    async def run_jupyter(
        self,
        cells: Sequence[str],
        *,
        total_timeout: float = 45.0,
        cell_timeout: float = 0.0,
        memory_limit_mb: int = -1,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        ctx: ToolContext | None = None,
    ) -> RunResult:
        """Run cells one after the other in a new kernel, also after an error.

        Args:
            cells: Source of each cell.
            total_timeout: Seconds that all cells together may take; fewer if the call ends before.
            cell_timeout: Seconds that each cell may take; 0: no bound.
            memory_limit_mb: Memory limit in MiB; -1: no limit.
            files: Contents of files that are written before the run, by path.
            fetch_files: Paths of files that are read after the run.
            ctx: Context of the tool call that the run belongs to; its deadline bounds everything.

        Raises:
            ServiceError: If the service failed, or its queue took time that the cells should have had.
        """
        payload = {
            "cells": list(cells),
            "cell_timeout": cell_timeout,
            "memory_limit_MB": memory_limit_mb,
            "kernel": "python3",
            "files": _packed(files),
            "fetch_files": list(fetch_files),
        }
        times = _RunTimes({"total_timeout": total_timeout}, ctx)
        response = await self._post("/run_jupyter", payload, times, total_timeout + 2 * MARGIN_S, ctx)
        return times.checked(_jupyter_result(response), "total_timeout")

    async def _post(
        self, path: str, payload: Fields, times: _RunTimes, timeout: float, ctx: ToolContext | None
    ) -> ServiceResponse:
        def at_this_try(left_s: float | None) -> JSON:
            return {**payload, **times.within(left_s)}

        response = await self.service.post(
            self.url + path, at_this_try, timeout=timeout, check=_check, ctx=ctx
        )
        if response.status >= 400:
            raise ServiceError(
                f"the sandbox service refused the request ({response.status}): {str(response.data)[:500]}",
                "refused",
                status=response.status,
            )
        if fields_of(response.data) is None:
            raise _unexpected(response.data)
        return response

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self.service.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _RunTimes:
    """Time limits of a request, reduced so that its response comes before the call ends.

    Args:
        wanted: Seconds, by their names in the request.
        ctx: Context of the call.
    """

    def __init__(self, wanted: Mapping[str, float], ctx: ToolContext | None) -> None:
        self._wanted = wanted
        self.share_s = max(wanted.values())  # the longest time that all of them take together
        self._fair = self.within(seconds_left(ctx))
        self._last = self._fair

    def within(self, left_s: float | None) -> Mapping[str, float]:
        """Return the limits for a try that has to end in `left_s` seconds."""
        self._last = self._wanted
        if left_s is not None:
            part = min(1.0, (left_s - min(RESPONSE_S, RESPONSE_SHARE * left_s)) / self.share_s)
            self._last = {name: max(0.01, seconds * part) for name, seconds in self._wanted.items()}
        return self._last

    def checked(self, result: RunResult, name: str) -> RunResult:
        """Return the result with the time that the run was allowed.

        Raises:
            ServiceError: If the program was stopped in less time than it has in a call that does not wait.
        """
        allowed, fair = self._last[name], self._fair[name]
        stopped = result.outcome in (Outcome.RUN_TIMEOUT, Outcome.COMPILE_TIMEOUT)
        if stopped and allowed < FAIR_SHARE * fair:
            text = f"the sandbox service was busy and gave the program only {allowed:.1f} of its {fair:.1f} s"
            raise ServiceError(text, "deadline")
        return replace(result, timeout_s=allowed)


def service_url(url: str | None) -> str:
    """Return the base URL of a service, without `/run_code` and `/run_jupyter`.

    Args:
        url: The URL; None: the one in SANDBOX_FUSION_ENDPOINT.

    Raises:
        ValueError: If it is not a URL.
    """
    found = (url if url is not None else os.environ.get(ENDPOINT, "")).strip().rstrip("/")
    for path in ("/run_code", "/run_jupyter"):
        found = found.removesuffix(path)
    if not found.startswith(("http://", "https://")):
        raise ValueError(
            f"expected sandbox_fusion_url as the URL of a service, e.g. http://localhost:8080; "
            f"got {url!r}. To start one on this machine: torchrl-agentic serve sandbox"
        )
    return found


def _packed(files: Mapping[str, bytes] | None) -> dict[str, str]:
    return {path: base64.b64encode(data).decode() for path, data in (files or {}).items()}


def _check(data: JSON) -> None:
    """Raise ServiceError for a response without a result, which the service sends with the status 200."""
    fields = fields_of(data)
    if fields is None:
        return  # `_post` reports it
    if fields.get("status") == "SandboxError":
        message = str(fields.get("message") or "no reason given")[:500]
        raise ServiceError(f"the sandbox service failed: {message}", "sandbox_error", is_transient=True)
    if "detail" not in fields and fields.get("status") not in ("Success", "Failed"):
        raise _unexpected(fields)


def _unexpected(data: JSON) -> ServiceError:
    return ServiceError(f"expected a result from the sandbox service; got {str(data)[:300]}", "garbage")


def _code_result(response: ServiceResponse) -> RunResult:
    data: Fields = response.data
    compiled, run = fields_of(data.get("compile_result")), fields_of(data.get("run_result"))
    more = _common(response)
    if compiled is not None:
        more |= {"compile_seconds": compiled.get("execution_time"), "compile_output": _both(compiled)}
    failed_compile = compiled is not None and (
        compiled.get("status") != "Finished" or compiled.get("return_code") not in (0, None)
    )
    if failed_compile and run is None:
        stopped = compiled is not None and compiled.get("status") == "TimeLimitExceeded"
        return RunResult(Outcome.COMPILE_TIMEOUT if stopped else Outcome.COMPILE_FAILED, **more)
    if run is None:
        raise _unexpected(data)
    return _ended(run, **more)


def _jupyter_result(response: ServiceResponse) -> RunResult:
    data: Fields = response.data
    driver = fields_of(data.get("driver")) or {}
    cells = [fields_of(cell) or {} for cell in _list(data.get("cells"))]
    errors = [fields_of(error) or {} for cell in cells for error in _list(cell.get("error"))]
    shown = [fields_of(item) or {} for cell in cells for item in _list(cell.get("display"))]
    more = _common(response) | {"display": tuple(shown), "errors": tuple(errors)}
    ran: dict[str, JSON] = {
        "status": driver.get("status", "Finished"),
        "return_code": driver.get("return_code"),
        "execution_time": driver.get("execution_time"),
        "stdout": "".join(str(cell.get("stdout") or "") for cell in cells),
        "stderr": "".join(str(cell.get("stderr") or "") for cell in cells),
    }
    if errors and ran["status"] == "Finished":
        ran["return_code"] = ran["return_code"] or 1
    return _ended(ran, **more)


def _ended(run: Fields, **more: Any) -> RunResult:
    code = run.get("return_code")
    if run.get("status") == "TimeLimitExceeded":
        outcome = Outcome.RUN_TIMEOUT
    elif run.get("status") == "Finished" and code in (0, None):
        outcome = Outcome.SUCCESS
    else:
        outcome = Outcome.RUN_FAILED
    return RunResult(
        outcome,
        str(run.get("stdout") or ""),
        str(run.get("stderr") or ""),
        exit_code=code if isinstance(code, int) else None,
        seconds=run.get("execution_time"),
        **more,
    )


def _common(response: ServiceResponse) -> dict[str, Any]:
    data: Fields = response.data
    files: dict[str, bytes] = {}
    for path, content in (fields_of(data.get("files")) or {}).items():
        if content is None:
            continue
        try:
            files[path] = base64.b64decode(str(content), validate=True)
        except ValueError:
            raise ServiceError("the sandbox service sent a file in invalid base64", "garbage") from None
    return {
        "files": files,
        "pod": data.get("executor_pod_name"),
        "queue_s": response.queue_s,
        "run_s": response.run_s,
        "tries": response.tries,
    }


def _both(ran: Fields) -> str:
    return "\n".join(text for text in (ran.get("stdout"), ran.get("stderr")) if text)


def _list(value: JSON) -> list[JSON]:
    return cast("list[JSON]", value) if isinstance(value, list) else []
