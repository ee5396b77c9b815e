"""What a shell does before it becomes a command: it sets limits, and goes to a folder."""

from __future__ import annotations

import math

from torchrl_agentic.sandbox.limits import ResourceLimits

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
