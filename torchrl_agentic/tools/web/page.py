"""Web pages as readable text, made by the `inscriptis` library in a process of its own.

A page of a few hundred kilobytes can be written so that its layout takes gigabytes (a wide table of many
rows), and its parser is C code that reads what strangers wrote. The process has limits on memory and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys

from torchrl_agentic.errors import MissingExtra

MAX_MEMORY_BYTES = 1 << 29
MAX_SECONDS = 4
"""Of a page: processor time, and about the same by the clock."""
AT_ONCE = 4

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
from inscriptis import get_text
text = get_text(sys.stdin.buffer.read().decode("utf-8", "replace"))
sys.stdout.buffer.write(text[: int(sys.argv[1])].encode("utf-8", "replace"))
"""


def require() -> None:
    """Make sure that pages can be converted.

    Raises:
        MissingExtra: the library is not installed.
    """
    if importlib.util.find_spec("inscriptis") is None:
        raise MissingExtra("HttpTool(html=...)", "inscriptis", "html")


class PageReader:
    """Converts pages, a few at a time. Belongs to one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)

    async def text_of(self, html: str, limit: int) -> str | None:
        """Give the first `limit` characters of a page's text; None where it cannot be had within bounds."""
        async with self._places:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-c", _CHILD, str(limit),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL, env={"LANG": "C.UTF-8"},
            )  # fmt: skip
            try:
                async with asyncio.timeout(MAX_SECONDS + 1):
                    out, _ = await process.communicate(html.encode("utf-8", "replace"))
            except (TimeoutError, ConnectionError):
                return None
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await asyncio.shield(process.wait())
        return out.decode("utf-8", "replace") if process.returncode == 0 else None
