"""`BubblewrapSandbox`: Linux namespaces for each command, created by bubblewrap, with one folder for files.

Stops:
- reading or writing host files, other than /usr and granted folders, even if the trainer is root
- seeing or signalling host processes; keeping processes alive after the command or the sandbox has ended
- using a network that was not granted: TCP, UDP, abstract and netlink sockets, sockets by path
- gaining rights: capabilities, setuid programs, new namespaces, mounts, ptrace, keyrings, bpf, io_uring
- typing into the trainer's terminal; reading the trainer's environment, arguments or open files
- one process using more memory, processor time or file size than its limits; more processes than its limit
- unlimited output using memory of the trainer
Does not stop:
- a cell and its threads using the processor up to its deadline; many short processes one after another
- many processes together using max_processes × memory_bytes where no control group can be created
- many files together filling the disk of the host
- locks on files below /usr, which other programs that lock them notice; using up the timers of its user
- learning the paths on the host of folders that it is shown, such as packages: /proc/self/mountinfo
- bugs in the kernel: for code of strangers, put a virtual machine around it
- learning about the machine: processor, kernel version, load
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import cgroups, seccomp
from torchrl_agentic.sandbox.base import WORK, SandboxResult, check_argv, enforced
from torchrl_agentic.sandbox.bootstrap import shim
from torchrl_agentic.sandbox.cancellation import run_in_thread
from torchrl_agentic.sandbox.process import (
    ServerProcess,
    as_nobody,
    memory_file,
    signed_exit_code,
    start_command,
    start_server,
)
from torchrl_agentic.sandbox.python_runtime import env_inside, find_packages, python_inside, python_roots
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.roots import OWN_FOLDERS, check_roots
from torchrl_agentic.sandbox.workspace import inside
from torchrl_agentic.sandbox.workspace_folder import FolderSandbox, result_of

BWRAP = "bwrap"
TMPFS_BYTES = 64 << 20
INSTALL = (
    "Install bubblewrap (the program 'bwrap'): apt install bubblewrap (Debian, Ubuntu), dnf install "
    "bubblewrap (Fedora). In a container it needs user namespaces: docker run "
    "--security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined"
)

NAMESPACES = (
    "--die-with-parent", "--new-session", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup-try", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox",
)  # fmt: skip
ROOT = (
    "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
    "--symlink", "usr/lib64", "/lib64", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
    "--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--proc", "/proc", "--dev", "/dev",
    "--size", str(TMPFS_BYTES), "--tmpfs", "/tmp", "--size", str(TMPFS_BYTES // 4), "--tmpfs", "/dev/shm",
    "--remount-ro", "/dev",
)  # fmt: skip
_SH = "/bin/sh"
_GREETING = b"\0"
_GREET = r"printf '\0' >&2 || exit 125; "
"""Shell commands that tell the trainer that bubblewrap works, and end the shell if the trainer has ended.

`--die-with-parent` holds from when bwrap asks for it. On a busy machine, the trainer may end between the fork
and that, and then nothing else would end the command. These commands run later, and the trainer has the only
reading end of their stderr. (The threads of a killed trainer end one by one, and until the last one has, the
check sees nothing.)
"""


class BubblewrapSandbox(FolderSandbox):
    """Run commands in new Linux namespaces. Their files are in a private folder, which they see as /work.

    Args:
        limits: Limits of the sandbox. The network is "none", "loopback" (an interface of its own), or "full"
            (that of the host, its loopback included).
        bwrap_path: The bubblewrap program: a path, or a name that is looked up in PATH when the sandbox
            opens.

    Raises:
        ValueError: If code inside could not use a folder that the limits grant; see `check_roots`.
    """

    name: ClassVar[str] = "bubblewrap"
    not_stopped: ClassVar[frozenset[str]] = frozenset({"file_locks", "host_paths"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "loopback", "full"})

    def __init__(
        self, limits: ResourceLimits | None = None, *, bwrap_path: str | os.PathLike[str] = BWRAP
    ) -> None:
        super().__init__(limits)
        check_roots(self.limits, OWN_FOLDERS)
        self.bwrap_path = os.fspath(bwrap_path)
        self._kills_before = 0

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced here."""
        names = ("cpu_seconds", "memory_bytes", "max_processes", "disk_bytes", "network")
        has_groups, has_filter = cgroups.why_not() is None, seccomp.program() is not None
        return enforced(*names, memory_total=has_groups, seccomp=has_filter)

    def fresh(self) -> BubblewrapSandbox:
        """Return a new, unopened sandbox with the same settings."""
        return BubblewrapSandbox(self.limits, bwrap_path=self.bwrap_path)

    async def open(self) -> None:
        """Create the private folder and check that bubblewrap works."""
        if self._workspace is not None:
            return
        reason = await run_in_thread(why_not, self.bwrap_path)
        if reason:
            raise SandboxError(reason)
        self._make_place()

    async def _run(
        self, argv: Sequence[str], limits: ResourceLimits, stdin: bytes | None, cwd: str | None
    ) -> SandboxResult:
        kills_before = self._kills
        with self._command(argv, limits, cwd=cwd) as (command, fds):
            child = await start_command(
                command,
                env=env_inside(limits),
                stdin=stdin,
                pass_fds=fds,
                drop_root=True,
                group=self._group,
                greeting=_GREETING,
            )
        ended = await self._communicate(child, limits)
        if ended.code is None:
            return result_of(ended, None)
        if ended.is_greeted and ended.code >= 0:  # then the program inside ran, and bwrap has its exit code
            return result_of(ended, signed_exit_code(ended.code))
        if self._kills > kills_before:
            return result_of(ended, -9)  # bwrap is in that group
        raise SandboxError(f"bubblewrap failed: {ended.stderr.text().strip() or 'no reason given'}")

    async def spawn(self, argv: Sequence[str]) -> ServerProcess:
        """Start a long-lived process. Its processor time is unlimited, because it serves many calls.

        It is process 1 of its PID namespace: its children cannot signal it, and end with it.
        """
        limits = replace(self.limits, cpu_seconds=None)
        self._kills_before = self._kills
        with self._command(check_argv(argv), limits, options=["--as-pid-1"]) as (command, fds):
            server = await start_server(
                command,
                env=env_inside(limits),
                pass_fds=fds,
                drop_root=True,
                group=self._group,
                greeting=_GREETING,
            )
        return self._keep(server)

    async def was_ended_outside(self, ended: str) -> bool:
        """Return whether a signal killed bubblewrap, which runs outside, and not for lack of memory."""
        return ended.startswith("killed by") and self._kills == self._kills_before

    @property
    def _kills(self) -> int:
        """Processes of the control group that the kernel killed because of the memory limit."""
        return 0 if self._group is None else self._group.killed

    @property
    def python_argv(self) -> tuple[str, ...]:
        """Return the command that starts Python inside.

        Raises:
            SandboxError: If the user that code runs as can read no interpreter.
        """
        return (python_inside(),)

    def _options(self, limits: ResourceLimits) -> list[str]:
        work = ("--bind", self._opened().path, WORK, "--chdir", "/")
        return [*NAMESPACES, "--disable-userns", *ROOT, *work, *granted(limits)]

    @contextmanager
    def _command(
        self,
        argv: Sequence[str],
        limits: ResourceLimits,
        *,
        options: Sequence[str] = (),
        cwd: str | None = None,
    ) -> Generator[tuple[list[str], Sequence[int]]]:
        """Yield the command that runs another command inside, and the file descriptors that it needs."""
        start_in = "/".join((WORK, *inside(cwd or WORK)))
        first = (_SH, "-c", _GREET + shim(limits), "sh", start_in)
        with memory_file(seccomp.program(families=families(limits))) as fds:
            confined = [word for fd in fds for word in ("--seccomp", str(fd))]
            # Everything from the model follows "--", so that nothing in it is an option of bwrap.
            command = [bwrap(self.bwrap_path), *self._options(limits), *options, *confined]
            command += ["--remount-ro", "/", "--"]
            try:
                yield [*command, *first, *argv], fds
            except OSError as error:
                if error.errno == errno.E2BIG:
                    raise ValueError("the command is too long; write long arguments to a file") from None
                raise SandboxError(f"bubblewrap cannot be started: {error}") from error


def granted(limits: ResourceLimits) -> list[str]:
    """Return the options for what the limits grant: folders, Python and its packages, the network.

    Args:
        limits: Limits of the sandbox.
    """
    options: list[str] = []
    for option, roots in (("--ro-bind", limits.fs_read_roots), ("--bind", limits.fs_write_roots)):
        for root in roots:
            options += [option, os.path.abspath(root), os.path.abspath(root)]
    shown = {root: root for root in python_roots()} | dict(find_packages())
    for folder, path in shown.items():
        options += ["--ro-bind", folder, path]
    if limits.network != "full":
        options.append("--unshare-net")
    return options


def families(limits: ResourceLimits) -> tuple[int, ...]:
    """Return the address families of the sockets that may be opened; a loopback belongs to the sandbox alone.

    Args:
        limits: Limits of the sandbox.
    """
    return () if limits.network == "none" else seccomp.NETWORK


@functools.cache
def bwrap(path: str = BWRAP) -> str:
    """Return the absolute path of bubblewrap.

    Args:
        path: A path, or a name to look up in PATH.

    Raises:
        SandboxError: If it is not installed, or `path` is not a program.
    """
    found = shutil.which(path)
    if found is None:
        named = "" if path == BWRAP else f"bwrap_path={path!r} is not a program that can be run here. "
        raise SandboxError(named + INSTALL)
    return found


_run: Any = subprocess.run  # its overloads do not accept `user=` from a dict


@functools.cache
def why_not(path: str = BWRAP) -> str | None:
    """Return why bubblewrap does not work here, or None if it does. Test each path once per process.

    Args:
        path: The bubblewrap program.
    """
    if sys.platform != "linux":
        return "bubblewrap works on Linux only"
    prefix, identity = as_nobody()
    try:
        options = (*NAMESPACES, "--disable-userns", *ROOT, "--unshare-net", "--remount-ro", "/")
        done = _run(
            [*prefix, bwrap(path), *options, "--", "/bin/true"], env={}, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=30, check=False,
            **identity,
        )  # fmt: skip
    except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return f"bubblewrap does not work here: {done.stderr.decode('utf-8', 'replace').strip()}. {INSTALL}"
    return None
