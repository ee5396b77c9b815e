"""`capped`: wraps Python code into a program that keeps its output short.

Sandbox Fusion reads the output of a program only after the program has ended. Beyond about 180 KiB the pipe
is full, the program blocks, and the service reports a time limit. So the code runs in a child process, whose
parent passes on the head and the tail of the output and counts the bytes between them.
"""

from __future__ import annotations

import base64
import functools
from importlib import resources

HEAD_BYTES, TAIL_BYTES = 48 << 10, 16 << 10
"""Bytes of stdout, and of stderr, that are passed on; their sum fits into the pipes of the service."""


def capped(code: str) -> str:
    """Return a Python program that does the same as another one, but cuts long output in the middle.

    Args:
        code: The program.
    """
    packed = base64.b64encode(code.encode("utf-8", "surrogatepass"))
    call = f"run_capped(base64.b64decode({packed!r}), {HEAD_BYTES}, {TAIL_BYTES})"
    return f"{_source()}\n\nimport base64\n\n{call}\n"


@functools.cache
def _source() -> str:
    return (
        resources.files("torchrl_agentic.tools.sandbox_fusion").joinpath("run_capped.py").read_text("utf-8")
    )
