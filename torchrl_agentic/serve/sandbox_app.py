"""`sandbox_app`: a server that runs code in sandboxes of this machine, by Sandbox Fusion's protocol."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchrl_agentic.sandbox import ResourceLimits, Sandbox, default_sandbox
from torchrl_agentic.serve.access import Access, BadRequest, RequestQueue
from torchrl_agentic.serve.fusion_protocol import (
    Json,
    Language,
    RunCodeRequest,
    RunJupyterRequest,
    languages_in,
)
from torchrl_agentic.serve.notebook import run_jupyter
from torchrl_agentic.serve.run_code import run_code

if TYPE_CHECKING:
    from starlette.applications import Starlette

MAX_QUEUE = 256
MAX_BODY_BYTES = 32 << 20
MAX_TOTAL_BODY_BYTES = 128 << 20
BODY_TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 32 << 20
MAX_RUN_TIMEOUT_S = 300.0
MEMORY_BYTES = 1 << 30
"""Maximum memory of all processes of a run together."""
MAX_PROCESSES = 64
"""Maximum number of processes of a run; a runtime such as Node's starts a dozen threads, which count."""


def run_limits(memory_bytes: int = MEMORY_BYTES) -> ResourceLimits:
    """Return the limits of the sandbox of a run. A request sets its time, and the memory of a process.

    Args:
        memory_bytes: Maximum memory of all its processes together.
    """
    return ResourceLimits(
        cpu_seconds=None,
        wall_seconds=None,
        memory_bytes=None,
        memory_total_bytes=memory_bytes,
        max_processes=MAX_PROCESSES,
    )


def default_concurrency() -> int:
    """Return how many runs this machine has processors for, plus one that starts meanwhile."""
    return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def sandbox_app(
    *,
    make_sandbox: Callable[[], Sandbox] | None = None,
    access: Access | None = None,
    max_concurrency: int | None = None,
    max_queue: int = MAX_QUEUE,
    max_run_timeout_s: float = MAX_RUN_TIMEOUT_S,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_total_body_bytes: int = MAX_TOTAL_BODY_BYTES,
    body_timeout_s: float = BODY_TIMEOUT_S,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> Starlette:
    """Return the server: `POST /run_code`, `POST /run_jupyter`, `GET /v1/ping`.

    Each request gets a sandbox of its own, which ends with the response, or when the client disconnects. If
    all places are taken, `max_queue` requests wait; others get status 429 with a header Retry-After.

    Args:
        make_sandbox: Returns a new, unopened sandbox; None for the strongest of this machine, with
            `run_limits()`.
        access: Who may use it; None for programs that use a loopback name, without a token.
        max_concurrency: Number of concurrent runs; None for one more than there are processors. Time in the
            queue does not count as time of the run.
        max_queue: Number of requests that wait or send their bodies.
        max_run_timeout_s: Maximum seconds that a request may ask for, for its compilation, its run or its
            cells; a request for more gets status 422.
        max_body_bytes: Maximum bytes of a request; a longer one gets status 413.
        max_total_body_bytes: Maximum bytes of all current requests together; others get status 429.
        body_timeout_s: Maximum seconds to receive a body; a slower one gets status 408.
        max_answer_bytes: Maximum bytes of all returned files together, and of the output of cells; further
            files are left out, and further cells not run. The output of a program has the limit of its
            sandbox.

    Raises:
        SandboxError: If no sandbox works on this machine.
        MissingExtra: If Starlette is not installed.
        ValueError: If a number is invalid.
    """
    from torchrl_agentic.serve.http_app import BodyLimits, PostRoute, json_app

    for name, number in (("max_run_timeout_s", max_run_timeout_s), ("max_answer_bytes", max_answer_bytes)):
        if not number > 0:
            raise ValueError(f"{name} must be above 0; got {number}")
    limits = BodyLimits(max_body_bytes, max_total_body_bytes, body_timeout_s)
    concurrency = default_concurrency() if max_concurrency is None else max_concurrency
    admission = RequestQueue(max_concurrency=concurrency, max_queue=max_queue)
    runs = _Runs(make_sandbox or (lambda: default_sandbox(run_limits())), max_run_timeout_s, max_answer_bytes)
    return json_app(
        {
            "/run_code": PostRoute(RunCodeRequest, runs.code),
            "/run_jupyter": PostRoute(RunJupyterRequest, runs.jupyter),
        },
        access=access or Access(),
        admission=admission,
        limits=limits,
        start=runs.languages,
    )


class _Runs:
    """Carries out requests."""

    def __init__(self, make_sandbox: Callable[[], Sandbox], max_timeout_s: float, max_bytes: int) -> None:
        make_sandbox()  # raises here if no sandbox works on this machine
        self._make_sandbox = make_sandbox
        self._max_timeout_s, self._max_bytes = max_timeout_s, max_bytes
        self._languages: Mapping[str, Language] | None = None
        self._looking = asyncio.Lock()

    async def languages(self) -> Mapping[str, Language]:
        """Return the languages of programs; determined once.

        Raises:
            SandboxError: If a sandbox cannot be opened.
        """
        async with self._looking:
            if self._languages is None:
                async with self._make_sandbox() as sandbox:
                    self._languages = await languages_in(sandbox)
        return self._languages

    async def code(self, request: RunCodeRequest) -> Json:
        """Run a program."""
        self._bound(request, "run_timeout", "compile_timeout")
        return await run_code(request, self._make_sandbox, await self.languages(), self._max_bytes)

    async def jupyter(self, request: RunJupyterRequest) -> Json:
        """Run cells."""
        self._bound(request, "total_timeout", "cell_timeout")
        return await run_jupyter(request, self._make_sandbox, self._max_bytes)

    def _bound(self, request: RunCodeRequest | RunJupyterRequest, *names: str) -> None:
        """Refuse timeouts that are too long; shorten defaults."""
        for name in names:
            asked = getattr(request, name)
            if asked <= self._max_timeout_s:
                continue
            if name in request.model_fields_set:
                most = f"the maximum here is {self._max_timeout_s:g} s (--max-run-timeout)"
                raise BadRequest(f"{name} is {asked:g} s; {most}")
            setattr(request, name, self._max_timeout_s)
