"""Programs and settings that start trusted code inside sandboxes: supervisors, shells with limits, Python."""

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
"""A cell that prints more bytes than this is stopped."""
GRACE_S = 1.0
"""Seconds that interrupted code may take to react."""
IDLE_S = 1800.0
"""An interpreter that is unused for this many seconds forgets its state and releases its memory."""


def supervisor_settings(limits: ResourceLimits) -> dict[str, Any]:
    """Return the settings that the supervisor of an interpreter has in every kind of sandbox.

    Args:
        limits: Limits of the sandbox.
    """
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
"""Maximum number of open files of a process. With files in flight over sockets, less than its user may have.
"""


def ulimits(limits: ResourceLimits) -> list[str]:
    """Return shell commands that limit a process and disable core files. A limit that is already lower stays.

    Args:
        limits: Limits to set.
    """
    lines = ["ulimit -c 0", f"ulimit -n {OPEN_FILES}"]
    if limits.cpu_seconds is not None:
        lines.append(f"ulimit -t {math.ceil(limits.cpu_seconds)}")
    if limits.memory_bytes is not None:
        lines.append(f"ulimit -v {max(1, limits.memory_bytes // 1024)}")
    if limits.disk_bytes is not None:
        lines.append(f"ulimit -f {max(1, limits.disk_bytes // 512)}")
    return lines


def shim(limits: ResourceLimits) -> str:
    """Return the shell script that sets the limits inside and then becomes the command.

    The first argument of the script is the folder to run in, the others are the command. The script exits
    with 126 if there is no such folder, because that is a mistake of the model and not a failure of the
    sandbox, and with 127 if there is no such command. The number of processes is limited inside, because
    outside the limit would count all processes of the user. The option for it is -u in bash and -p in dash.

    Args:
        limits: Limits to set.
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
    """Return a program text that defines modules of `inside`. Each can import those before it.

    Args:
        names: Names of the modules, in the order of their imports.
    """
    folder = resources.files(PACKAGE)
    texts = [(name, folder.joinpath(f"{name}.py").read_text("utf-8")) for name in names]
    return _START.format(package=PACKAGE, modules=texts)


def program(*names: str) -> str:
    """Return a program for `python -I -S -B -c` that runs `main` of a module of `inside`.

    Without -I, the current folder or an environment variable could replace a module that trusted code imports
    by a file of the model.

    Args:
        names: Modules that the program defines, in the order of their imports; `main` is that of the last
            one.
    """
    return source_of(*names) + "module.main()\n"


_ALONE = (
    "rights", "namespaces", "wire", "capture", "files", "mounts", "reactor", "pipes", "processes", "worker",
    "interpreter", "commands", "cloning", "supervisor",
)  # fmt: skip
_MODULES = {"supervisor": _ALONE, "zygote": (*_ALONE, "script", "zygote")}
"""Modules that a program needs, each after those that it imports."""

SAFE_PATH = """
import sys
sys.path[:] = [path for path in sys.path if path]
"""
"""Removes the current folder from the import path, because the model may have written modules there."""
BOOT = (
    SAFE_PATH
    + """
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
            sys.exit("the host closed the connection")
        data += piece
    return data
start = json.loads(read(int(read(8), 16)))
exec(start["text"])
function = getattr(sys.modules[start["package"] + "." + start["module"]], start["function"])
function(start["settings"], base64.b64decode(start["filter"]), *start["arguments"])
"""
)
"""The program that Python is started with inside; it reads everything else from stdin.

If it is allowed to, it restarts itself without address randomization, on which the order of sets of objects
depends.
"""


def start_message(
    module: str, function: str, settings: Mapping[str, Any], program: bytes = b"", *arguments: int
) -> bytes:
    """Return the message that `BOOT` reads: the modules to define and the function to call.

    Args:
        module: Module of `inside` whose function is called.
        function: Name of the function.
        settings: First argument of the function, as JSON.
        program: A seccomp filter, the second argument of the function; b"" for no filter.
        arguments: Further arguments of the function.
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
