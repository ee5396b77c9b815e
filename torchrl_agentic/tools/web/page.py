"""Web pages as readable text, made by the `inscriptis` library in a sandbox, where this machine has one.

A page of a few hundred kilobytes can be written so that its layout takes gigabytes (a wide table of many
rows), and its parser is C code that reads what strangers wrote. So each page is read in a sandbox of its own:
without a network, without files of the host but Python and its packages, with limits on memory and time.
Where no sandbox works, a process with these limits reads it, with the rights of the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import sys
import threading
from typing import TYPE_CHECKING

from torchrl_agentic.errors import MissingExtra, SandboxError

if TYPE_CHECKING:
    from torchrl_agentic.sandbox import Sandbox

logger = logging.getLogger(__name__)

MAX_MEMORY_BYTES = 1 << 29
MAX_SECONDS = 4
"""Of a page: processor time, and about the same by the clock."""
AT_ONCE = 4

CONVERT = "from inscriptis import get_text\ntext = get_text(html)\n"
"""Python code that makes the string `text` of the string `html`."""
_INSIDE = """\
with open("page.html", "rb") as file:
    html = file.read().decode("utf-8", "replace")
{convert}
with open("page.txt", "wb") as file:
    file.write(text[:{limit}].encode("utf-8", "replace"))
"""
_CHILD = f"""\
import sys
try:
    import resource
    for limit, value in ((resource.RLIMIT_AS, {MAX_MEMORY_BYTES}), (resource.RLIMIT_CPU, {MAX_SECONDS})):
        try:
            resource.setrlimit(limit, (value, value))
        except (ValueError, OSError):
            pass
except ImportError:
    pass
html = sys.stdin.buffer.read().decode("utf-8", "replace")
{{convert}}
sys.stdout.buffer.write(text[:{{limit}}].encode("utf-8", "replace"))
"""
_choosing = threading.Lock()


def require() -> None:
    """Make sure that pages can be converted.

    Raises:
        MissingExtra: the library is not installed.
    """
    if importlib.util.find_spec("inscriptis") is None:
        raise MissingExtra("HttpTool(html=...)", "inscriptis", "html")


class PageReader:
    """Converts pages, a few at a time. Belongs to one event loop.

    Each page is read in a sandbox of its own, of the strongest kind that works on this machine, so a page
    that takes over its parser learns nothing of another page, nor of the host. Where none works, a warning
    says so once, and processes that have limits, but all rights of this one, read them.

    Args:
        convert: Python code that makes `text` of `html`.
    """

    def __init__(self, convert: str = CONVERT) -> None:
        self._convert = convert
        self._places = asyncio.Semaphore(AT_ONCE)

    async def text_of(self, html: str, limit: int) -> str | None:
        """Return the first `limit` characters of a page's text; None where it cannot be had within bounds."""
        data = html.encode("utf-8", "replace")
        async with self._places:
            sandbox = await asyncio.to_thread(_template)
            if sandbox is None:
                text = await _in_process(_CHILD.format(convert=self._convert, limit=limit), data)
            else:
                program = _INSIDE.format(convert=self._convert, limit=limit)
                text = await _in_sandbox(sandbox.fresh(), program, data, 4 * limit)
        return None if text is None else text.decode("utf-8", "replace")


def _template() -> Sandbox | None:
    """Return what sandboxes for pages are made from; None where none works."""
    with _choosing:
        return _found()


@functools.cache
def _found() -> Sandbox | None:
    from torchrl_agentic.sandbox import ForkServerSandbox, ResourceLimits, default_sandbox

    limits = ResourceLimits(
        cpu_seconds=MAX_SECONDS, wall_seconds=MAX_SECONDS + 1, memory_bytes=MAX_MEMORY_BYTES, max_processes=4
    )
    try:
        sandbox = default_sandbox(limits)
    except SandboxError as error:
        logger.warning("web pages are read with limits, but without a sandbox: %s", error)
        return None
    if isinstance(sandbox, ForkServerSandbox):
        return ForkServerSandbox(limits, preload=("inscriptis",))
    return sandbox


async def _in_sandbox(sandbox: Sandbox, program: str, html: bytes, max_bytes: int) -> bytes | None:
    from torchrl_agentic.repl import ForkServerRepl
    from torchrl_agentic.sandbox import ForkServerSandbox

    try:
        async with sandbox:
            await sandbox.write_file("page.html", html)
            if isinstance(sandbox, ForkServerSandbox):  # an interpreter is there, with the library loaded
                async with ForkServerRepl(sandbox) as repl:
                    done = (await repl.execute(program, timeout=MAX_SECONDS + 1)).status == "ok"
            else:
                done = (await sandbox.run((*sandbox.python_argv, "-c", program))).exit_code == 0
            return await sandbox.read_file("page.txt", max_bytes) if done else None
    except SandboxError as error:
        logger.warning("a web page could not be read in a sandbox: %s", error)
    except OSError:
        pass  # the page, or its text, is more than the sandbox takes
    return None


async def _in_process(program: str, html: bytes) -> bytes | None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", program,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, env={"LANG": "C.UTF-8"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(MAX_SECONDS + 1):
            out, _ = await process.communicate(html)
    except (TimeoutError, ConnectionError):
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    return out if process.returncode == 0 else None
