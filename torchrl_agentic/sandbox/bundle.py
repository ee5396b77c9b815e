"""Starts the programs of `inside` in a Python inside, where this package is not installed."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from torchrl_agentic.sandbox.program import PACKAGE
from torchrl_agentic.sandbox.program import modules as text_of

_ALONE = (
    "rights", "namespaces", "wire", "capture", "files", "mounts", "reactor", "pipes", "processes", "worker",
    "interpreter", "commands", "cloning", "supervisor",
)  # fmt: skip
_MODULES = {"supervisor": _ALONE, "zygote": (*_ALONE, "script", "zygote")}
"""What a program needs, in an order in which each comes behind those that it imports."""

BOOT = """
import sys
sys.path[:] = [path for path in sys.path if path]
import base64, ctypes, json, os
if sys.platform == "linux" and hasattr(sys, "orig_argv"):
    libc, fixed = ctypes.CDLL(None), 0x0040000
    persona = libc.personality(0xFFFFFFFF)
    if persona != -1 and not persona & fixed and libc.personality(persona | fixed) != -1:
        os.execv(sys.executable, sys.orig_argv)
stdin = open(0, "rb", buffering=0, closefd=False)
def read(size):
    data = b""
    while len(data) < size:
        piece = stdin.read(size - len(data))
        if not piece:
            sys.exit("the host hung up")
        data += piece
    return data
start = json.loads(read(int(read(8), 16)))
exec(start["text"])
function = getattr(sys.modules[start["package"] + "." + start["module"]], start["function"])
function(start["settings"], base64.b64decode(start["filter"]), *start["arguments"])
"""
"""What Python inside is started with: it reads the rest from stdin.

First of all it forgets the folder that it starts in, where the model may have put modules. Where it may, it
then starts itself anew without randomized addresses, on which the order of sets of objects depends.
"""


def start_message(
    module: str, function: str, settings: Mapping[str, Any], program: bytes = b"", *arguments: int
) -> bytes:
    """Make what `BOOT` reads: the programs, and which of their functions to call.

    program: a seccomp filter, empty for none.
    """
    start = {
        "text": text_of(*_MODULES[module]),
        "package": PACKAGE,
        "module": module,
        "function": function,
        "settings": dict(settings),
        "filter": base64.b64encode(program).decode("ascii"),
        "arguments": arguments,
    }
    body = json.dumps(start).encode("ascii")
    return b"%08x" % len(body) + body
