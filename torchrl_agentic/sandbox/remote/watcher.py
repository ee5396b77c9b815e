"""What a command is wrapped in, on a machine where nothing but a shell is there to watch it."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_agentic.sandbox.bootstrap import shim
from torchrl_agentic.sandbox.resource_limits import ResourceLimits

_WATCH = r"""
sweep() {
    passes=0 found=1
    while [ -n "$found" ] && [ "$passes" -lt 50 ]; do
        passes=$((passes + 1)) found=
        for stat in /proc/[0-9]*/stat; do
            { read -r line <"$stat"; } 2>/dev/null || continue
            set -- ${line##*) }
            case $1:$4 in
                [ZX]:*) ;;
                *:"$job") kill -9 "${line%% *}" && found=1 ;;
            esac
        done
    done
}
trap 'job=$!; [ -n "$job" ] && { kill -9 "$job"; sweep; }; exit 143' TERM
exec 3<&0
(trap - INT QUIT; exec setsid "$@" <&3 3<&-) &
exec </dev/null >/dev/null 2>&1 3<&-
job=$!
wait "$job"
code=$?
sweep
exit "$code"
"""


def supervised(args: Sequence[str]) -> list[str]:
    """Make the command that runs another in a session of its own, and ends as that does.

    What is left of the session then is ended too, and on SIGTERM at once all of it. That takes no new
    process: a command may have used up what its user may have. It is for bash: other shells leave SIGINT
    ignored in what they start in the background.
    """
    return ["/bin/bash", "-c", _WATCH, "bash", *args]


def limited(argv: Sequence[str], folder: str, limits: ResourceLimits) -> list[str]:
    """Make the command that runs another in a folder, within its limits, without a way to more rights.

    The exit code is 126 if there is no such folder, 127 if there is no such command.

    Raises:
        ValueError: the limits hold an environment that cannot be one.
    """
    environment = [] if limits.env is None else ["env", "-i", "--"]
    for name, value in (limits.env or {}).items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"an environment cannot hold {name!r}, or not with that value")
        environment.append(f"{name}={value}")
    shell = [*environment, "/bin/sh", "-c", shim(limits), "sh", folder]
    return [*shell, "setpriv", "--no-new-privs", "--", *argv]
