"""`run_jupyter`: runs cells one after another in a new interpreter."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.repl import Repl, ReplDisplay, ReplResult
from torchrl_agentic.repl.duck_typed_repl import repl_in
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.serve.fusion_protocol import (
    CommandResult,
    Json,
    RunJupyterRequest,
    jupyter_answer,
    refusal,
)
from torchrl_agentic.serve.run_code import fetch, put

KERNEL = "python3"
_NAMES = {"timeout": "CellTimeoutError", "died": "DeadKernelError", "limit": "ResourceLimitError"}
_LIMIT = """\
import resource
with open("/proc/self/statm") as _file:
    _most = int(_file.read().split()[0]) * resource.getpagesize() + {bytes}
_hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (_most if _hard < 0 else min(_most, _hard),) * 2)
del _file, _most, _hard, resource"""


async def run_jupyter(
    request: RunJupyterRequest, make_sandbox: Callable[[], Sandbox], max_bytes: int
) -> Json:
    """Run cells and return the response. Later cells run after an error.

    Args:
        request: The request.
        make_sandbox: Creates an unopened sandbox.
        max_bytes: Maximum bytes of the output of all cells, except that the last one is whole; and again of
            all files that are returned.

    Raises:
        BadRequest: If the files cannot be written.
    """
    if request.kernel != KERNEL:
        return refusal(
            jupyter_answer(None, []), f"unknown kernel {request.kernel!r}; the only kernel is {KERNEL!r}"
        )
    try:
        async with repl_in(make_sandbox()) as repl:
            await put(repl.sandbox, request.files)
            driver, cells = await _run(request, repl, max_bytes)
            return jupyter_answer(driver, cells, await fetch(repl.sandbox, request.fetch_files, max_bytes))
    except InfrastructureError as error:
        return refusal(jupyter_answer(None, []), str(error))


async def _run(request: RunJupyterRequest, repl: Repl, max_bytes: int) -> tuple[CommandResult, list[Json]]:
    """Run the cells until they have ended, their time is over, or their output is too large."""
    began = time.perf_counter()
    cells: list[Json] = []
    limited = False
    shown = 0
    for code in request.cells:
        if request.memory_limit_MB > 0 and not limited:
            await repl.execute(_LIMIT.format(bytes=request.memory_limit_MB << 20), timeout=None)
            limited = True
        left = request.total_timeout - (time.perf_counter() - began)
        if left <= 0 or shown > max_bytes:
            break
        found = await repl.execute(code, timeout=min(left, request.cell_timeout or left))
        cells.append(_cell(found))
        shown += len(json.dumps(cells[-1]))
        if found.state_lost:
            limited = False  # a new interpreter runs the following cells
    seconds = time.perf_counter() - began
    count = f"{len(cells)} of {len(request.cells)}"
    if seconds >= request.total_timeout:
        said = f"the cells took more than {request.total_timeout:g} s; {count} were run"
        return CommandResult("TimeLimitExceeded", seconds, None, "", said), cells
    if len(cells) < len(request.cells):
        said = f"the output of the cells has more than {max_bytes} bytes; {count} were run"
        return CommandResult("Finished", seconds, 1, "", said), cells
    return CommandResult("Finished", seconds, 0, "", ""), cells


def _cell(found: ReplResult) -> Json:
    shown = [_display(each) for each in found.display]
    if found.value is not None:
        shown.append({"text/plain": found.value})
    return {
        "stdout": found.background + found.stdout,
        "stderr": found.stderr,
        "display": shown,
        "error": _errors(found),
    }


def _display(shown: ReplDisplay) -> Json:
    data = shown.data
    return {shown.media_type: base64.b64encode(data).decode("ascii") if isinstance(data, bytes) else data}


def _errors(found: ReplResult) -> list[Json]:
    error = found.error
    if error is not None:
        return [
            {"ename": error.ename, "evalue": error.evalue, "traceback": error.traceback.splitlines()},
        ]
    if found.status in _NAMES:
        return [{"ename": _NAMES[found.status], "evalue": found.message, "traceback": [found.message]}]
    return []
