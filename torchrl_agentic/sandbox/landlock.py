"""`LandlockSandbox`: Landlock, seccomp and limits, for machines where namespaces cannot be created.

Stops:
- reading or writing host files, other than /usr and granted folders, even if the trainer is root
- moving, linking or mounting its way out of its folder
- signalling, tracing or reading any process but its own; changing their limits or priorities
- keeping processes alive after the command or the sandbox has ended
- using a network that was not granted: TCP, UDP, abstract and netlink sockets, sockets by path
- shared memory, semaphores and message queues that outlive it or that others use; watching folders
- gaining rights: capabilities, setuid programs, new namespaces, mounts, ptrace, keyrings, bpf, io_uring
- typing into the trainer's terminal; reading the trainer's environment, arguments or open files
- one process using more memory, processor time or file size than its limits; more processes than its limit
- unlimited output using memory of the trainer
Does not stop:
- learning whether any path exists, its size and its owner; learning which processes exist
- processes that a cell leaves running using processor time as long as its interpreter lives
- changing rights, times and attributes of files by their path, if the trainer is not root
- with the network "full": using the loopback of the host, its sockets by path and, with Landlock before
  version 6, its abstract sockets
- many processes together using max_processes × memory_bytes where no control group can be created
- many files together filling the disk of the host
- locks on files below /usr, which other programs that lock them notice
- bugs in the kernel: for code of strangers, put a virtual machine around it
- learning about the machine: processor, kernel version, load
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
from torchrl_agentic.sandbox.base import SandboxResult, check_argv, enforced
from torchrl_agentic.sandbox.bootstrap import OPEN_FILES, program
from torchrl_agentic.sandbox.cancellation import run_in_thread
from torchrl_agentic.sandbox.cgroups import MemoryGroup
from torchrl_agentic.sandbox.process import (
    GracefulCommand,
    GracefulServer,
    as_nobody,
    start_command,
    start_server,
)
from torchrl_agentic.sandbox.python_runtime import env_on_host, find_packages, python_inside, python_roots
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.roots import check_roots
from torchrl_agentic.sandbox.workspace import inside
from torchrl_agentic.sandbox.workspace_folder import FolderSandbox, result_of

if TYPE_CHECKING:
    from torchrl_agentic.sandbox.inside.confine import Order

INSTALL = (
    "Landlock needs Linux 5.13 or later on x86-64 or aarch64, and 'landlock' in /sys/kernel/security/lsm; "
    "in a container its system calls and seccomp(2) must be allowed, as by Docker 23 and later"
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
    """Run commands that can reach only a private folder, which they see under its path on the host.

    If the trainer is root, they run as nobody. They have no /tmp, no /dev/shm and no /proc; HOME and TMPDIR
    are the private folder.

    Args:
        limits: Limits of the sandbox. The network is "none" or "full" (that of the host, its loopback
            included).

    Raises:
        ValueError: If code inside could not use a folder that the limits grant; see `check_roots`.
    """

    name: ClassVar[str] = "landlock"
    not_stopped: ClassVar[frozenset[str]] = frozenset(
        {"file_locks", "host_metadata", "host_paths", "leftover_cpu"}
    )
    network: ClassVar[frozenset[Network]] = frozenset({"none", "full"})
    _version = 0

    def __init__(self, limits: ResourceLimits | None = None) -> None:
        super().__init__(limits)
        check_roots(self.limits)

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced here."""
        names = ("cpu_seconds", "memory_bytes", "max_processes", "disk_bytes", "network", "seccomp")
        return enforced(*names, memory_total=cgroups.why_not() is None)

    def fresh(self) -> LandlockSandbox:
        """Return a new, unopened sandbox with the same settings."""
        return LandlockSandbox(self.limits)

    async def open(self) -> None:
        """Create the private folder and check that Landlock works."""
        if self._workspace is not None:
            return
        reason = await run_in_thread(why_not)
        if reason:
            raise SandboxError(reason)
        self._version = _landlock_version()
        self._make_place()

    async def _run(
        self, argv: Sequence[str], limits: ResourceLimits, stdin: bytes | None, cwd: str | None
    ) -> SandboxResult:
        status_fd, status_end = os.pipe()
        try:
            os.set_blocking(status_fd, False)
            order = self._order(argv, limits, cwd=cwd, status_fd=status_end)
            with _starting(order, self._group) as (command, fds):
                child = await start_command(
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
            ended = await self._communicate(GracefulCommand(child), limits)
        finally:
            with os.fdopen(status_fd, "rb") as status:
                completed = bool(status.read(1))
        if ended.code is not None and not completed:
            raise SandboxError(f"the sandbox failed: {ended.stderr.text().strip() or 'no reason given'}")
        return result_of(ended, ended.code)

    async def spawn(self, argv: Sequence[str]) -> GracefulServer:
        """Start a long-lived process. Its processor time is unlimited, because it serves many calls."""
        limits = replace(self.limits, cpu_seconds=None)
        with _starting(self._order(check_argv(argv), limits), self._group) as (command, fds):
            server = await start_server(command, env={}, cwd="/", pass_fds=fds, drop_root=True)
        return self._keep(GracefulServer(server))

    @property
    def python_argv(self) -> tuple[str, ...]:
        """Return the command that starts Python inside.

        Raises:
            SandboxError: If the user that code runs as can read no interpreter.
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
    read = [*filter(os.path.exists, _READ), *map(os.path.abspath, limits.fs_read_roots)]
    read += [*python_roots(), *find_packages()]
    # A call may narrow "full" to "loopback". That would be the loopback of the host, so there is no network.
    online = limits.network == "full"
    if online:
        read += filter(os.path.exists, _READ_FOR_NAMES)
    families = seccomp.NETWORK if online else ()
    filter_ = seccomp.program(families=families, landlock=version, has_namespaces=False)
    assert filter_ is not None, "why_not() checks the processor"
    notify, starts = seccomp.notify_program(landlock=version)
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
        "notify": notify,
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
    """Yield the command that carries out an order, and the descriptors that it needs.

    The order is in a file and not in the command, which every user of the machine can read. The command of
    the order enters `group`; its supervisor stays outside.
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
            text = program("rights", "orphans", "seccomp_notify", "confine")
            yield [python_inside(), "-I", "-S", "-B", "-c", text, str(fds[0])], fds
    except OSError as error:
        raise SandboxError(f"the sandbox cannot be started: {error}") from error
    finally:
        os.close(fds[0])


def _landlock_version() -> int:
    from torchrl_agentic.sandbox.inside.rights import landlock_version  # works on Linux only

    return landlock_version()


_run: Any = subprocess.run  # its overloads do not accept `user=` from a dict


@functools.cache
def why_not() -> str | None:
    """Return why this sandbox does not work here, or None if it does. Test it once per process."""
    if sys.platform != "linux" or seccomp.program() is None:
        return (
            "the Landlock sandbox works on Linux on x86-64 and aarch64 only; this is "
            f"{sys.platform} on {platform.machine()}"
        )
    if not _landlock_version():
        return f"this kernel has no Landlock, or it is disabled. {INSTALL}"
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
