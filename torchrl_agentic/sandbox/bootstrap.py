"""What the supervisors of all kinds of interpreters are told."""

from __future__ import annotations

import base64
import functools
import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

from torchrl_agentic.sandbox.resource_limits import ResourceLimits

FLOOD_BYTES = 64 << 20
"""A cell that prints more than this is stopped."""
GRACE_S = 1.0
"""How long interrupted code may take to react."""
IDLE_S = 1800.0
"""An interpreter that nobody used for so long forgets its state, and gives its memory back."""


def supervisor_settings(limits: ResourceLimits) -> dict[str, Any]:
    """Return the settings of an interpreter's supervisor that every kind of sandbox has."""
    return {
        "limits": {},
        "memory_total_bytes": limits.memory_total_bytes,
        "cpu_seconds": limits.cpu_seconds,
        "output_bytes": limits.output_bytes,
        "flood_bytes": FLOOD_BYTES,
        "grace_s": GRACE_S,
        "idle_s": IDLE_S,
        "scoped": False,
    }


OPEN_FILES = 256
"""How many files a process may have open; with those that it has sent, fewer than its user may."""


def ulimits(limits: ResourceLimits) -> list[str]:
    """Give the shell's commands that limit a process, without core files; a limit that is lower stays."""
    lines = ["ulimit -c 0", f"ulimit -n {OPEN_FILES}"]
    if limits.cpu_seconds is not None:
        lines.append(f"ulimit -t {math.ceil(limits.cpu_seconds)}")
    if limits.memory_bytes is not None:
        lines.append(f"ulimit -v {max(1, limits.memory_bytes // 1024)}")
    if limits.disk_bytes is not None:
        lines.append(f"ulimit -f {max(1, limits.disk_bytes // 512)}")
    return lines


def shim(limits: ResourceLimits) -> str:
    """The shell script that sets the limits inside and then becomes the command; 127 if there is none.

    It goes to the folder in its first argument; that there is none is the model's mistake, hence 126, and
    no failure of the sandbox's. The number of processes must be limited inside: outside, it would count all
    of that user's. dash says -p for it where bash says -u.
    """
    lines = ulimits(limits)
    if limits.max_processes is not None:
        lines.append(f"ulimit -u {limits.max_processes} || ulimit -p {limits.max_processes}")
    return "{ " + "; ".join(lines) + '; } 2>/dev/null; cd -- "$1" || exit 126; shift; exec "$@"'


PACKAGE = "torchrl_agentic.sandbox.inside"
_START = """\
import sys
package = sys.modules[{package!r}] = type(sys)({package!r})
for name, text in {modules!r}:
    module = sys.modules[package.__name__ + "." + name] = type(sys)(package.__name__ + "." + name)
    setattr(package, name, module)
    exec(compile(text, name, "exec"), module.__dict__)
"""


@functools.cache
def source_of(*names: str) -> str:
    """Make a text that defines these modules, each able to import those before it."""
    folder = resources.files(PACKAGE)
    texts = [(name, folder.joinpath(f"{name}.py").read_text("utf-8")) for name in names]
    return _START.format(package=PACKAGE, modules=texts)


def program(*names: str) -> str:
    """Make a program for `python -I -S -B -c`: these modules, of which the last one's `main` is run.

    -I matters: without it the folder that Python starts in, or a variable,
    could put a file of the model's in place of a module that trusted code imports.
    """
    return source_of(*names) + "module.main()\n"


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
        "text": source_of(*_MODULES[module]),
        "package": PACKAGE,
        "module": module,
        "function": function,
        "settings": dict(settings),
        "filter": base64.b64encode(program).decode("ascii"),
        "arguments": arguments,
    }
    body = json.dumps(start).encode("ascii")
    return b"%08x" % len(body) + body
