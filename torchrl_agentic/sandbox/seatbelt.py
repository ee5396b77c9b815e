"""`SeatbeltSandbox`: for macOS: `sandbox-exec` with a profile that denies everything that it does not allow.

Tested only as far as possible on other systems: the profile, the command, the error messages. It has not run
on macOS. `sandbox-exec` is deprecated there, but has no successor for programs that are not apps.

Stops:
- reading or writing host files, other than those of the system and granted folders
- using a network that was not granted: any socket, also by path
- signalling processes outside its process group; reading arguments, environment or memory of any other
  process
- having other programs act for it: Mach services except a few by name, Apple events, jobs of launchd
- shared memory and semaphores by name; devices; terminals; setuid programs
- one process using more processor time or file size than its limits
- unlimited output using memory of the trainer
Does not stop:
- processes that leave their process group staying alive after the command has ended
- processes that a cell leaves running using processor time as long as its interpreter lives
- using more memory or more processes than the limits: macOS counts all processes of the user
- learning whether any path exists, its size and its owner
- many files together filling the disk of the host
- bugs in the kernel: for code of strangers, put a virtual machine around it
- learning about the machine: processor, memory, release of the system, names of users
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import SandboxResult, check_argv, enforced
from torchrl_agentic.sandbox.bootstrap import ulimits
from torchrl_agentic.sandbox.process import ServerProcess, start_command, start_server
from torchrl_agentic.sandbox.python_runtime import env_on_host, find_python, python_roots
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.workspace import Workspace, inside
from torchrl_agentic.sandbox.workspace_folder import FolderSandbox, result_of

_EXEC = "/usr/bin/sandbox-exec"

_SOFTWARE = tuple(
    f"{prefix}/{folder}"
    for prefix in ("/usr/local", "/opt/homebrew")
    for folder in ("bin", "lib", "opt", "share", "Cellar", "Frameworks")
)
READ = (
    "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/libexec", "/usr/share", "/bin", "/sbin", "/System/Library",
    "/System/Cryptexes/OS", "/System/Volumes/Preboot/Cryptexes/OS", "/Library/Apple",
    "/Library/Developer/CommandLineTools", "/private/var/db/dyld", "/private/var/db/timezone",
    "/private/var/select", *_SOFTWARE,
)  # fmt: skip
READ_FOR_NAMES = (
    "/private/etc/hosts", "/private/etc/resolv.conf", "/private/var/run/resolv.conf", "/private/etc/services",
    "/private/etc/protocols", "/private/etc/ssl",
)  # fmt: skip
SERVICES = ("com.apple.system.logger", "com.apple.system.opendirectoryd.libinfo")
SERVICES_FOR_NAMES = (
    "com.apple.SystemConfiguration.configd", "com.apple.SystemConfiguration.DNSConfiguration",
    "com.apple.trustd", "com.apple.trustd.agent",
)  # fmt: skip
_SYSCTLS = (
    "kern.argmax", "kern.hostname", "kern.maxfilesperproc", "kern.maxproc", "kern.ngroups",
    "kern.osproductversion", "kern.osrelease", "kern.ostype", "kern.osvariant_status", "kern.osversion",
    "kern.secure_kernel", "kern.usrstack64", "kern.version", "sysctl.proc_cputype", "vm.loadavg",
)  # fmt: skip
_SYSCTL_PREFIXES = ("hw.", "machdep.cpu.")


class SeatbeltSandbox(FolderSandbox):
    """Run commands under a Seatbelt profile, in a private folder that they see under its path on the host.

    HOME and TMPDIR are that folder; there is no /tmp.

    Args:
        limits: Limits of the sandbox. The network is "none" or "full" (that of the host).
    """

    name: ClassVar[str] = "seatbelt"
    not_stopped: ClassVar[frozenset[str]] = frozenset(
        {"daemons", "file_locks", "host_metadata", "host_paths", "leftover_cpu", "memory", "processes"}
    )
    network: ClassVar[frozenset[Network]] = frozenset({"none", "full"})

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced here."""
        return enforced("cpu_seconds", "disk_bytes", "network")

    def fresh(self) -> SeatbeltSandbox:
        """Return a new, unopened sandbox with the same settings."""
        return SeatbeltSandbox(self.limits)

    async def open(self) -> None:
        """Create the private folder and check that the system accepts the profile."""
        if self._workspace is not None:
            return
        if sys.platform != "darwin":
            raise SandboxError(
                f"Seatbelt works on macOS only; this is {sys.platform}. On Linux use BubblewrapSandbox, "
                "or LandlockSandbox where namespaces cannot be created"
            )
        self._workspace = Workspace(self.limits)
        try:
            tried = await self.run(["/usr/bin/true"])
            if tried.exit_code != 0:
                raise SandboxError(f"Seatbelt does not work here: {tried.stderr.strip() or tried.exit_code}")
        except BaseException:
            await self.close()
            raise

    async def _run(
        self, argv: Sequence[str], limits: ResourceLimits, stdin: bytes | None, cwd: str | None
    ) -> SandboxResult:
        folder = self._folder()
        words = command(argv, folder=folder, cwd=os.path.join(folder, *inside(cwd or ".")), limits=limits)
        env = env_on_host(limits, folder)
        try:
            child = await start_command(words, env=env, cwd="/", stdin=stdin, drop_root=True)
        except OSError as error:
            raise SandboxError(f"{_EXEC} cannot be started: {error}") from error
        ended = await self._communicate(child, limits)
        return result_of(ended, ended.code)

    async def spawn(self, argv: Sequence[str]) -> ServerProcess:
        """Start a long-lived process. Its processor time is unlimited, because it serves many calls."""
        limits = replace(self.limits, cpu_seconds=None)
        folder = self._folder()
        words = command(check_argv(argv), folder=folder, cwd=folder, limits=limits)
        try:
            server = await start_server(words, env=env_on_host(limits, folder), cwd="/", drop_root=True)
        except OSError as error:
            raise SandboxError(f"{_EXEC} cannot be started: {error}") from error
        return self._keep(server)

    @property
    def python_argv(self) -> tuple[str, ...]:
        """Return the command that starts Python inside."""
        found = find_python()
        return super().python_argv if found is None else (found[0],)

    def _folder(self) -> str:
        """Return the real path of the private folder: Seatbelt compares real paths, and /var is a link."""
        return os.path.realpath(self._opened().path)


def command(argv: Sequence[str], *, folder: str, cwd: str, limits: ResourceLimits) -> list[str]:
    """Return the command that runs another one under the profile.

    Paths are parameters of the profile and not part of its text, where a quote or a parenthesis could add a
    rule. Words of the model follow the shell script, where none is taken for an option.

    Args:
        argv: The other command and its arguments.
        folder: The private folder.
        cwd: Working folder of the command.
        limits: Limits of the command.
    """
    read = [*READ, *map(os.path.realpath, limits.fs_read_roots), *python_roots()]
    services = SERVICES
    if limits.network == "full":
        read += READ_FOR_NAMES
        services += SERVICES_FOR_NAMES
    write = [folder, *map(os.path.realpath, limits.fs_write_roots)]
    text = profile(read=len(read), write=len(write), services=services, network=limits.network == "full")
    words = [_EXEC, "-p", text]
    for kind, paths in (("READ", read), ("WRITE", write)):
        for number, path in enumerate(paths):
            words += ["-D", f"{kind}_{number}={path}"]
    return [*words, "/bin/sh", "-c", _shim(limits), "sh", cwd, *argv]


def profile(*, read: int, write: int, services: Sequence[str], network: bool) -> str:
    """Return a profile in Seatbelt's language. Of the rules that match, the last one applies.

    Args:
        read: Number of folders that can be read: the parameters READ_0, READ_1, …
        write: Number of folders that can be written: the parameters WRITE_0, WRITE_1, …
        services: Mach services that can be looked up.
        network: Allow the network.
    """
    writable = [f'(subpath (param "WRITE_{number}"))' for number in range(write)]
    readable = [f'(subpath (param "READ_{number}"))' for number in range(read)]
    devices = [f'(literal "/dev/{name}")' for name in ("null", "zero", "random", "urandom")]
    sysctls = [f'(sysctl-name "{name}")' for name in _SYSCTLS]
    sysctls += [f'(sysctl-name-prefix "{prefix}")' for prefix in _SYSCTL_PREFIXES]
    rules: list[tuple[str, list[str]]] = [
        ("allow process-fork", []),
        ("allow process-exec*", []),
        ("deny process-exec*", ["(file-mode #o4000)", "(file-mode #o2000)"]),
        ("allow process-info*", ["(target self)"]),
        ("allow signal", ["(target pgrp)"]),
        ("allow sysctl-read", sysctls),
        ("allow mach-lookup", [f'(global-name "{name}")' for name in services]),
        ("allow file-read-metadata", []),
        ("allow file-read*", ['(literal "/")', *devices, '(subpath "/dev/fd")', *readable, *writable]),
        ("allow file-map-executable", [*readable, *writable]),
        ("allow file-write*", writable),
        ("allow file-write-data", ['(literal "/dev/null")', '(subpath "/dev/fd")']),
    ]
    if network:
        rules.append(("allow network*", []))
    lines = ["(version 1)", "(deny default)"]
    for operation, filters in rules:
        lines.append("(" + "\n    ".join([operation, *filters]) + ")")
    return "\n".join(lines) + "\n"


def _shim(limits: ResourceLimits) -> str:
    """Return the shell script that sets the limits and then becomes the command; 127 if there is none.

    It rejects commands that begin with a dash, because bash would take them for an option of exec, and dash
    has no syntax to prevent that.
    """
    lines = [*ulimits(replace(limits, memory_bytes=None)), 'cd -- "$1"', "shift"]
    missing = 'case $1 in -*) echo "$1: not found" >&2; exit 127;; esac'
    return " && ".join(lines) + f' || exit 126; {missing}; exec "$@"'
