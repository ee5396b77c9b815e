"""Commands for the shell of a machine that is not ours: one under a supervisor, its end, files without links.

The machine needs /bin/sh, env and setsid, which Debian, Fedora and Alpine have. What comes from the model is
a word of the argument list, never a part of a script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.bootstrap import shim
from torchrl_agentic.sandbox.process import exit_or_signal
from torchrl_agentic.sandbox.python_runtime import BASE_ENV
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.workspace import inside

NUMBERS = 3
_SH = "/bin/sh"
_MISSING, _FOLDER, _REFUSED = 66, 73, 77

# The command runs in the foreground of a pipeline: only there it keeps its stdin and its handling of SIGINT.
# The other end of the pipeline learns of its group and exit code over descriptor 4, and ends what it left
# behind.
_SUPERVISE = r"""group= code=
exec 3>&1 5>&2
printf '%s ' "$$"
{ setsid env -i "$@" >&3 3>&-; echo "code $?" >&4; } 4>&1 2>/dev/null | {
exec 3>&- 5>&-
while read -r what value; do case $what in group) group=$value ;; code) code=$value ;; esac; done
[ -z "$group" ] || kill -s KILL -- "-$group"
exit "${code:-126}"
} 2>/dev/null"""

# The shell that becomes the command redirects its stderr itself: dash writes "Killed" to wherever the waiting
# shell had sent it. And bash would take the "-c" of a command ["-c", …] for an option of its exec.
_BECOME = r"""echo "group $$" >&4; echo "$PPID $$"; exec 2>&5 4>&- 5>&-
case $2 in -*) echo "$2: not found" >&2; exit 127 ;; esac
"""

_KILL = 'group=$1; shift; kill -s KILL -- "-$group"; kill -s KILL "$@"'

_WALK = r"""here=$1; cd "$1" || exit 126; shift
while [ $# -gt 1 ]; do
[ ! -h "./$1" ] || exit 77
[ -d "./$1" ] || { [ ! -e "./$1" ] || exit 77; @MISSING@; }
cd -P "./$1" || exit 77
here=$here/$1; shift
done
[ "$(pwd -P)" = "$here" ] && [ ! -h "./$1" ] || exit 77
[ ! -d "./$1" ] || exit 73
[ -f "./$1" ] || [ ! -e "./$1" ] || exit 77
"""
_READ = _WALK.replace("@MISSING@", "exit 66") + '[ -e "./$1" ] || exit 66; exec head -c "$0" "./$1"'
_WRITE = _WALK.replace("@MISSING@", 'mkdir "./$1" || exit 1') + 'exec cat > "./$1"'

_PREPARE = r"""mkdir -p "$1" && cd "$1" || exit 1
for tool in setsid env head cat; do
command -v "$tool" >/dev/null || { echo "there is no $tool" >&2; exit 1; }
done
while read -r what value; do
[ "$what" != CapEff: ] || echo $(( (0x$value >> 24) & 1 ))
done </proc/self/status"""


def prepare() -> list[str]:
    """Make the words that make /work and look for what we need; it fails with the reason on stderr.

    It prints "0" where code inside cannot raise a limit that was set for it (CAP_SYS_RESOURCE).
    """
    return [_SH, "-c", _PREPARE, "sh", WORK]


def supervised(
    argv: Sequence[str], limits: ResourceLimits, *, cwd: str | None = None, stdin: bool = False
) -> list[str]:
    """Make the words that run a command within its limits, in a process group that ends with it.

    What it prints first is a line of `NUMBERS` numbers, for `kill`. The exit code is the command's, 128 + n
    for signal n, 127 where there is no such command, 126 where there is no such folder.
    """
    # The number of processes is not limited: it would not hold for root, and count all of another user's.
    become = _BECOME + ("" if stdin else "exec </dev/null; ") + shim(replace(limits, max_processes=None))
    start_in = "/".join((WORK, *inside(cwd or WORK)))
    # Where the caller says nothing of it, PATH is the image's: its programs may lie anywhere.
    path = ' PATH="$PATH"' if limits.env is None else ""
    supervise = _SUPERVISE.replace("env -i", "env -i" + path)
    return [_SH, "-c", supervise, "sh", *_env(limits.env), _SH, "-c", become, "sh", start_in, *argv]


def kill(numbers: Sequence[int]) -> list[str]:
    """Make the words that end a command, and its supervisors, which the command might have stopped."""
    *supervisors, group = map(str, numbers)
    return [_SH, "-c", _KILL, "sh", group, *supervisors]


def read(path: str, max_bytes: int) -> list[str]:
    """Make the words that print a file, or its first `max_bytes`; see `refusal`."""
    return [_SH, "-c", _READ, str(max_bytes), WORK, *_steps(path)]


def write(path: str) -> list[str]:
    """Make the words that write stdin to a file, making its folders; see `refusal`."""
    return [_SH, "-c", _WRITE, "sh", WORK, *_steps(path)]


def refusal(code: int, path: str, stderr: str) -> OSError | None:
    """Read the exit code of `read` or `write`, as a command's; None where it says nothing of the file."""
    if code == _MISSING:
        return FileNotFoundError(f"no such file: {path}")
    if code == _FOLDER:
        return IsADirectoryError(f"{path} is a folder")
    if code == _REFUSED:
        return PermissionError(f"{path} is no regular file, or goes through a link; links are not followed")
    if 0 < exit_or_signal(code) < 126:
        return OSError(f"{path}: {stderr.strip() or f'exit code {code}'}")
    return None


def _steps(path: str) -> tuple[str, ...]:
    steps = inside(path)
    if not steps:
        raise IsADirectoryError(f"{path} is a folder")
    return steps


def _env(env: Mapping[str, str] | None) -> list[str]:
    clean = {name: value for name, value in BASE_ENV.items() if name != "PATH"}
    return [f"{name}={value}" for name, value in (clean if env is None else env).items()]
