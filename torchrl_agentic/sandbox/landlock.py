"""A sandbox for where no namespaces can be made: Landlock, seccomp, limits, and a process that cleans up.

Stops:
- reading or writing host files, other than /usr and the roots that were granted, as root too
- moving, linking or mounting its way out of its folder
- signalling, tracing or reading any process but its own; changing their limits or priorities
- keeping processes alive after the command or the sandbox has ended
- the network, unless it was granted: TCP, UDP, abstract and netlink sockets, sockets by path
- shared memory, semaphores and message queues that outlive it or that others use; watching folders
- gaining rights: capabilities, setuid programs, new namespaces, mounts, ptrace, keyrings, bpf, io_uring
- typing into the trainer's terminal; reading the trainer's environment, arguments or open files
- one process using more memory, processor time or file size than its limits; more processes than its limit
- output without end costing the trainer memory
Does not stop:
- learning of any path whether it exists, its size and its owner; of any process, that it exists
- what a cell leaves running taking processor time as long as its interpreter lives
- changing rights, times and attributes of files by their path, where the user is the trainer's: not as root
- with the network "full": the host's loopback, its abstract sockets with Landlock before version 6, its
  sockets by path
- many processes together using max_processes × memory_bytes where no control group can be made
- many files together filling the host's disk
- locks on files below /usr, which others who lock them notice
- bugs in the kernel: for code of strangers, put a virtual machine around it
- code learning about the machine: processor, kernel version, load
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import math
import os
import platform
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox import cgroups, seccomp
from torchrl_agentic.sandbox.base import SandboxResult, checked
from torchrl_agentic.sandbox.bootstrap import OPEN_FILES, program
from torchrl_agentic.sandbox.cancellation import off_loop
from torchrl_agentic.sandbox.cgroups import MemoryGroup
from torchrl_agentic.sandbox.process import AskedCommand, AskedServed, as_nobody, serve, start
from torchrl_agentic.sandbox.python_runtime import env_on_host, find_packages, find_python, python_inside
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.roots import check_roots
from torchrl_agentic.sandbox.workspace import inside
from torchrl_agentic.sandbox.workspace_folder import FolderSandbox, result_of

if TYPE_CHECKING:
    from torchrl_agentic.sandbox.inside.confine import Order

INSTALL = (
    "Landlock needs Linux 5.13 or later on x86-64 or aarch64, with 'landlock' in /sys/kernel/security/lsm; "
    "in a container its system calls and seccomp(2) must be allowed, as Docker 23 and later do"
)

_READ = (
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/dev/zero",
    "/dev/random", "/dev/urandom",
)  # fmt: skip
_READ_FOR_NAMES = (
    "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf",
    "/etc/services", "/etc/ssl", "/etc/pki", "/etc/ca-certificates",
)  # fmt: skip


class LandlockSandbox(FolderSandbox):
    """Commands that reach nothing but a private folder, which they see under its path on the host.

    Where we are root they run as nobody. They have no /tmp, no /dev/shm and no /proc; HOME and TMPDIR are the
    folder. network in the limits: "none", or "full" (the host's, its loopback too).

    Raises:
        ValueError: If code inside could not use a folder that the limits grant; see `check_roots`.
    """

    name: ClassVar[str] = "landlock"
    cannot: ClassVar[frozenset[str]] = frozenset(
        {"file_locks", "host_metadata", "host_paths", "leftover_cpu"}
    )
    network: ClassVar[frozenset[Network]] = frozenset({"none", "full"})
    _version = 0

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        super().__init__(limits)
        check_roots(self.limits)

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Which limits hold here."""
        return {
            "cpu_seconds": True,
            "memory_bytes": True,
            "memory_total": cgroups.why_not() is None,
            "max_processes": True,
            "disk_bytes": True,
            "disk_total": False,
            "network": True,
            "seccomp": True,
        }

    def fresh(self) -> LandlockSandbox:
        """Make another one with the same settings, not open yet."""
        return LandlockSandbox(self.limits)

    async def open(self) -> None:
        """Make ready."""
        if self._workspace is not None:
            return
        reason = await off_loop(why_not)
        if reason:
            raise SandboxError(reason)
        self._version = _landlock_version()
        self._make_place()

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end."""
        effective = self.limits.narrow(limits)
        status_fd, status_end = os.pipe()
        try:
            os.set_blocking(status_fd, False)
            order = self._order(checked(argv), effective, cwd=cwd, status_fd=status_end)
            with _starting(order, self._group) as (command, fds):
                child = await start(
                    command,
                    env={},
                    cwd="/",
                    stdin=stdin,
                    pass_fds=(*fds, status_end),
                    drop_root=True,
                )
        except BaseException:
            os.close(status_fd)
            raise
        finally:
            os.close(status_end)
        try:
            ended = await self._run_to_end(AskedCommand(child), effective)
        finally:
            with os.fdopen(status_fd, "rb") as status:
                completed = bool(status.read(1))
        if ended.code is not None and not completed:
            raise SandboxError(f"the sandbox failed: {ended.stderr.text().strip() or 'no reason given'}")
        return result_of(ended, ended.code)

    async def spawn(self, argv: Sequence[str]) -> AskedServed:
        """Start a long-lived process; its processor time has no limit, since it serves many calls."""
        limits = replace(self.limits, cpu_seconds=None)
        with _starting(self._order(checked(argv), limits), self._group) as (command, fds):
            served = await serve(command, env={}, cwd="/", pass_fds=fds, drop_root=True)
        return self._keep(AskedServed(served))

    @property
    def python_argv(self) -> tuple[str, ...]:
        """The command that starts Python inside.

        Raises:
            SandboxError: there is none that whoever runs inside may read.
        """
        return (python_inside(),)

    def _order(
        self,
        argv: Sequence[str],
        limits: ResourceLimits,
        *,
        cwd: str | None = None,
        status_fd: int | None = None,
    ) -> Order:
        folder = self._opened().path
        return _order(
            argv,
            limits,
            env=env_on_host(limits, folder),
            cwd=os.path.join(folder, *inside(cwd or ".")),
            write=(folder, *limits.fs_write_roots),
            version=self._version,
            status_fd=status_fd,
        )


def _order(
    argv: Sequence[str],
    limits: ResourceLimits,
    *,
    env: Mapping[str, str],
    cwd: str,
    write: Sequence[str],
    version: int,
    status_fd: int | None,
) -> Order:
    found = find_python()
    read = [*filter(os.path.exists, _READ), *map(os.path.abspath, limits.fs_read_roots)]
    if found is not None and found[1] is not None:
        read.append(found[1])
    read += find_packages()
    # A call may narrow it to a loopback, which would be the host's: then there is none.
    online = limits.network == "full"
    if online:
        read += filter(os.path.exists, _READ_FOR_NAMES)
    families = seccomp.NETWORK if online else ()
    filter_ = seccomp.program(families=families, landlock=version, has_namespaces=False)
    assert filter_ is not None, "why_not() has looked at the processor"
    gate, starts = seccomp.gate(landlock=version)
    return {
        "argv": [word.encode() for word in argv],
        "env": {name.encode(): value.encode() for name, value in env.items()},
        "cwd": os.fsencode(cwd),
        "read": read,
        "write": [os.path.abspath(path) for path in write],
        "devices": [os.devnull],
        "tcp": online,
        "version": version,
        "filter": filter_,
        "gate": gate,
        "starts": starts,
        "entrance": None,
        "max_processes": limits.max_processes,
        "limits": {
            "cpu_seconds": None if limits.cpu_seconds is None else math.ceil(limits.cpu_seconds),
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.disk_bytes,
            "open_files": OPEN_FILES,
        },
        "parent": os.getpid(),
        "status_fd": status_fd,
    }


@contextlib.contextmanager
def _starting(order: Order, group: MemoryGroup | None) -> Generator[tuple[list[str], list[int]]]:
    """Make the command that carries an order out, and the descriptors that it needs.

    Nothing of the order stands in the command, where every user of the machine could read it. group: what the
    command of the order enters; the process that looks after it stays outside.
    """
    fds = [os.memfd_create("order")]
    try:
        with contextlib.ExitStack() as files:
            if group is not None:
                order["entrance"], _ = files.enter_context(group.opened())
                fds.append(order["entrance"])
            with os.fdopen(fds[0], "wb", closefd=False) as file:
                marshal.dump(order, file, 2)  # pyright: ignore[reportArgumentType]  a TypedDict is a dict
            os.lseek(fds[0], 0, os.SEEK_SET)
            text = program("rights", "orphans", "gate", "confine")
            yield [python_inside(), "-I", "-S", "-B", "-c", text, str(fds[0])], fds
    except OSError as error:
        raise SandboxError(f"the sandbox cannot be started: {error}") from error
    finally:
        os.close(fds[0])


def _landlock_version() -> int:
    from torchrl_agentic.sandbox.inside.rights import landlock_version  # is there on Linux only

    return landlock_version()


_run: Any = subprocess.run  # its overloads know nothing of `user=` in a dict


@functools.cache
def why_not() -> str | None:
    """Say why this does not work here; None if it does. Tries it, once per process."""
    if sys.platform != "linux" or seccomp.program() is None:
        return (
            "the Landlock sandbox works on Linux on x86-64 and aarch64 only, not on "
            f"{sys.platform}, {platform.machine()}"
        )
    if not _landlock_version():
        return f"this kernel has no Landlock, or it is not switched on. {INSTALL}"
    secret = "/etc/passwd"
    prefix, identity = as_nobody()
    try:
        order = _order(
            ["/bin/sh", "-c", f"! /bin/cat {secret} 2>/dev/null"],
            ResourceLimits(),
            env={},
            cwd="/",
            write=(),
            version=_landlock_version(),
            status_fd=None,
        )
        with _starting(order, None) as (command, fds):
            done = _run(
                [*prefix, *command], env={}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True,
                timeout=30, check=False, pass_fds=fds, **identity,
            )  # fmt: skip
    except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip() or f"{secret} could be read inside"
        return f"the Landlock sandbox does not work here: {reason}. {INSTALL}"
    return None
