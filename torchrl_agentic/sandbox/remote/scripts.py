"""Shell scripts for the machine of a service: run a command under a supervisor, end it, read and write files.

The machine needs /bin/sh and the programs in `PROGRAMS`, which Debian, Fedora and Alpine have. Text of the
model is always a word of the argument list, never a part of a script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.bootstrap import shim
from torchrl_agentic.sandbox.process import signed_exit_code
from torchrl_agentic.sandbox.python_runtime import BASE_ENV
from torchrl_agentic.sandbox.resource_limits import ResourceLimits
from torchrl_agentic.sandbox.workspace import inside

NUMBERS = 3
"""Number of PIDs that `supervised` prints first."""
PROGRAMS = ("setsid", "env", "head", "cat")
_SH = "/bin/sh"
_MISSING, _FOLDER, _REFUSED = 66, 73, 77

# The command runs in the foreground of a pipeline, because only there it keeps its stdin and its handling of
# SIGINT. The other end of the pipeline receives its group and exit code over descriptor 4, and ends its
# leftovers.
_SUPERVISE = r"""group= code=
exec 3>&1 5>&2
printf '%s ' "$$"
{ setsid env -i "$@" >&3 3>&-; echo "code $?" >&4; } 4>&1 2>/dev/null | {
exec 3>&- 5>&-
while read -r what value; do case $what in group) group=$value ;; code) code=$value ;; esac; done
[ -z "$group" ] || kill -s KILL -- "-$group"
exit "${code:-126}"
} 2>/dev/null"""

# The shell that becomes the command redirects its stderr itself, because dash writes "Killed" to the stderr
# of the waiting shell. A command ["-c", …] is rejected, because bash would take "-c" for an option of exec.
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
shift
for tool in "$@"; do
command -v "$tool" >/dev/null || { echo "there is no $tool" >&2; exit 1; }
done
while read -r what value; do
[ "$what" != CapEff: ] || echo $(( (0x$value >> 24) & 1 ))
done </proc/self/status"""


def prepare(programs: Sequence[str] = PROGRAMS) -> list[str]:
    """Return the command that creates /work and checks for programs; it fails with the reason on stderr.

    It prints "0" if code inside cannot raise a limit that was set for it (CAP_SYS_RESOURCE).
    """
    return [_SH, "-c", _PREPARE, "sh", WORK, *programs]


def supervised(
    argv: Sequence[str], limits: ResourceLimits, *, cwd: str | None = None, stdin: bool | int = False
) -> list[str]:
    """Return the command that runs another within its limits, in a process group that ends with it.

    It first prints a line of `NUMBERS` PIDs, for `kill`. The exit code is that of the command, 128 + n for
    signal n, 127 if there is no such command, 126 if there is no such folder.

    Args:
        argv: The command and its arguments.
        limits: Limits of its processes, and its environment.
        cwd: Working folder, a path below /work.
        stdin: True for a stdin without end, or the number of bytes that will be sent, because not every
            service can close a stdin.

    Raises:
        PermissionError: If `cwd` lies outside /work.
        ValueError: If the environment in the limits is invalid.
    """
    become = _BECOME + shim(limits)
    if not stdin:
        become = _BECOME + "exec </dev/null; " + shim(limits)
    elif stdin is not True:
        # The shell waits here, and would write "Killed" to the stderr of the command.
        become = _BECOME + f"exec 6>&2 2>/dev/null; head -c {stdin} | {{ exec 2>&6 6>&-; {shim(limits)}; }}"
    start_in = "/".join((WORK, *inside(cwd or WORK)))
    # Without an environment in the limits, PATH is that of the image, whose programs may be anywhere.
    path = ' PATH="$PATH"' if limits.env is None else ""
    supervise = _SUPERVISE.replace("env -i", "env -i" + path)
    return [_SH, "-c", supervise, "sh", *_env(limits.env), _SH, "-c", become, "sh", start_in, *argv]


def kill(numbers: Sequence[int]) -> list[str]:
    """Return the command that ends another one and its supervisors, which the other may have stopped."""
    *supervisors, group = map(str, numbers)
    return [_SH, "-c", _KILL, "sh", group, *supervisors]


def read(path: str, max_bytes: int) -> list[str]:
    """Return the command that prints the start of a file; see `refusal`.

    Args:
        path: Path inside.
        max_bytes: Maximum number of bytes.
    """
    return [_SH, "-c", _READ, str(max_bytes), WORK, *_steps(path)]


def write(path: str) -> list[str]:
    """Return the command that writes stdin to a file and creates its folders; see `refusal`."""
    return [_SH, "-c", _WRITE, "sh", WORK, *_steps(path)]


def refusal(code: int, path: str, stderr: str) -> OSError | None:
    """Return the error that an exit code of `read` or `write` means; None if it is not about the file.

    Args:
        code: The exit code.
        path: Path of the file, for the message.
        stderr: Error output of the command.
    """
    if code == _MISSING:
        return FileNotFoundError(f"no such file: {path}")
    if code == _FOLDER:
        return IsADirectoryError(f"{path} is a folder")
    if code == _REFUSED:
        return PermissionError(
            f"{path} is not a regular file, or goes through a link; links are not followed"
        )
    if 0 < signed_exit_code(code) < 126:
        return OSError(f"{path}: {stderr.strip() or f'exit code {code}'}")
    return None


def _steps(path: str) -> tuple[str, ...]:
    steps = inside(path)
    if not steps:
        raise IsADirectoryError(f"{path} is a folder")
    return steps


def _env(env: Mapping[str, str] | None) -> list[str]:
    if env is None:
        env = {name: value for name, value in BASE_ENV.items() if name != "PATH"}
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"invalid environment variable {name!r}: its name or its value is not allowed")
    return [f"{name}={value}" for name, value in env.items()]
