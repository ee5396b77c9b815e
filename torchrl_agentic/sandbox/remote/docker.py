"""A Docker container per sandbox: its own processes, network and files, whatever image they come from.

Stops:
- reading or writing host files, other than the roots that were granted; writing to the image
- seeing or signalling host processes; the network, unless it was granted
- gaining rights: capabilities, setuid programs, the user root
- one process using more memory, processor time or file size than its limits
- all processes together using more memory, processes, processors or disk than the container has
- keeping processes alive after the command that started them, the sandbox or the trainer has ended
- output without end costing the trainer memory
Does not stop:
- learning under which paths of the host the image and granted folders lie: /proc/self/mountinfo
- bugs in the kernel or in Docker: for code of strangers, `runtime="runsc"` (gVisor) puts a kernel in between
- ptrace inside the container, and other system calls that Docker's own filter lets through
- the commands of one sandbox disturbing each other: they share a user and /work
- processes that fork faster than they can be ended: that costs the container, and the next command says so
- filling the host's disk through volumes that the image itself declares, if user 1000 may write to them
- with network="full": reaching other containers, and services of the host that listen beyond its loopback
- code learning about the machine: processor, kernel version, load
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.sandbox.base import WORK, Sandbox, SandboxResult, checked
from torchrl_agentic.sandbox.bubblewrap import TMPFS_BYTES
from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.process import Capture, Ended
from torchrl_agentic.sandbox.python_runtime import BASE_ENV
from torchrl_agentic.sandbox.remote.docker_calls import REQUEST_S, insist, reported
from torchrl_agentic.sandbox.remote.docker_container import KEEPER, USER, Container
from torchrl_agentic.sandbox.remote.docker_files import read, write
from torchrl_agentic.sandbox.remote.docker_process import ContainerProcess
from torchrl_agentic.sandbox.remote.docker_scripts import LIMITED
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.workspace import inside
from torchrl_agentic.sandbox.workspace_folder import result_of

if TYPE_CHECKING:
    from aiodocker import Docker

ENV = {name: value for name, value in BASE_ENV.items() if name != "PATH"}
"""The image knows best where its programs are."""
KEPT = 3
"""How many processes are not the command's own: Docker's init, its child, and the shell above the command."""
MAX_WORD = 1 << 17
"""How long Linux lets one word of a command be, with the null character at its end."""
MAX_WORDS = 1 << 20
NO_DAEMON = (
    "no Docker daemon answers ({}). Start one and see that `docker info` works for this user, or say where "
    "it is: DockerSandbox(url='unix:///run/user/1000/docker.sock'), or DOCKER_HOST"
)


class DockerSandbox(Sandbox):
    """Commands in a container without rights; files in memory, which they see as /work.

    image: must be on the daemon already, with `sh`, `head`, `cat` and `mkdir`; for a REPL also `python3`.
    runtime: another one than the daemon's default, e.g. "runsc". cpus: how many processors all processes
    together may keep busy; None: all. work_bytes: how large /work can get; it counts as memory.
    url: of the daemon; as `docker` finds it where not given.

    Of the limits, memory_bytes is that of each process and of the whole container, and max_processes,
    network and the roots are those of the container: one call cannot narrow them.
    """

    name: ClassVar[str] = "docker"
    cannot: ClassVar[frozenset[str]] = frozenset({"host_paths"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "full"})

    def __init__(
        self,
        limits: ResourceLimits | None = None,
        *,
        image: str = "python:3.12-slim",
        runtime: str | None = None,
        cpus: float | None = 1.0,
        work_bytes: int = 128 << 20,
        url: str | None = None,
    ) -> None:
        super().__init__(limits)
        try:
            importlib.import_module("aiodocker")
        except ImportError:
            raise MissingExtra("DockerSandbox", "aiodocker", "docker") from None
        for name, value in (("cpus", cpus), ("work_bytes", work_bytes)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0; got {value}")
        self.image, self.runtime, self.cpus, self.work_bytes, self.url = image, runtime, cpus, work_bytes, url
        self._container: Container | None = None
        self._processes: set[ContainerProcess] = set()
        self._changing = asyncio.Lock()

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Which limits hold here; the filter of system calls is Docker's, not ours to vouch for."""
        held = ("cpu_seconds", "memory_bytes", "memory_total", "max_processes", "disk_bytes", "disk_total")
        return dict.fromkeys((*held, "network"), True) | {"seccomp": False}

    def fresh(self) -> DockerSandbox:
        """Make another one with the same settings, not open yet."""
        return DockerSandbox(
            self.limits,
            image=self.image,
            runtime=self.runtime,
            cpus=self.cpus,
            work_bytes=self.work_bytes,
            url=self.url,
        )

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._container is not None and self._container.lost is None

    async def open(self) -> None:
        """Make a container and start it."""
        async with self._changing:
            if self.is_open:
                return
            await self._discard()
            client = await self._connect()
            name = f"torchrl_agentic-{secrets.token_hex(8)}"
            try:
                self._container = await Container.create(client, self._config(), name)
            except SandboxError as error:
                if "no such image" in str(error).lower():
                    raise SandboxError(f"{error}. To get the image: docker pull {self.image}") from error
                raise

    async def close(self) -> None:
        """Remove the container."""
        async with self._changing:
            await to_the_end(self._discard())

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end."""
        effective = self._effective(limits)
        words = _words(checked(argv), effective, cwd)
        out, err = Capture(effective.output_bytes), Capture(effective.output_bytes)
        began = time.monotonic()
        command = await self._opened().start(words, env=_env(effective), stdin=len(stdin or b""))
        code: int | None = None
        try:
            async with asyncio.timeout(effective.wall_seconds):
                await command.communicate(stdin, out.add, err.add)
                code = await command.code()
        except TimeoutError:
            await command.cut_short(out.add, err.add)
        except BaseException:
            await to_the_end(command.give_up())
            raise
        finally:
            await command.close()
        return result_of(Ended(code, out, err, time.monotonic() - began), code)

    async def spawn(self, argv: Sequence[str]) -> ContainerProcess:
        """Start a long-lived process; its processor time has no limit, since it serves many calls."""
        words = _words(checked(argv), replace(self.limits, cpu_seconds=None), None)
        command = await self._opened().start(words, env=_env(self.limits), stdin=None)
        process = ContainerProcess(command)
        self._processes = {other for other in self._processes if other.is_running} | {process}
        return process

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside."""
        await write(self._opened(), path, data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside."""
        return await read(self._opened(), path, max_bytes)

    def _opened(self) -> Container:
        if self._container is None:
            raise SandboxError("the sandbox is not open: use 'async with', or call open() first")
        return self._container

    def _effective(self, limits: ResourceLimits | None) -> ResourceLimits:
        """Narrow the limits for one call.

        Raises:
            ValueError: by something that a container has for all its commands.
        """
        effective = self.limits.narrow(limits)
        for name in ("network", "fs_read_roots", "fs_write_roots"):
            if limits is not None and getattr(limits, name) != getattr(self.limits, name):
                raise ValueError(
                    f"a container has one {name} for all commands, {getattr(self.limits, name)!r}, not "
                    f"{getattr(limits, name)!r} for one: dataclasses.replace(sandbox.limits, ...) keeps it"
                )
        return effective

    async def _connect(self) -> Docker:
        import aiodocker
        from aiodocker.exceptions import DockerError
        from aiohttp import ClientTimeout

        try:
            client = aiodocker.Docker(self.url, timeout=ClientTimeout(total=REQUEST_S))
        except (AssertionError, ValueError, OSError, ImportError, DockerError) as error:
            raise SandboxError(NO_DAEMON.format(str(error) or "none is known")) from error
        try:
            with reported("say its version"):
                await insist(client.version)
        except SandboxError as error:
            await client.close()
            raise SandboxError(NO_DAEMON.format(error)) from error
        except BaseException:
            await client.close()
            raise
        return client

    async def _discard(self) -> None:
        container, self._container = self._container, None
        processes, self._processes = self._processes, set()
        try:
            if container is not None:
                await container.remove()
        finally:
            for process in processes:
                await process.kill()

    def _config(self) -> dict[str, Any]:
        """Make the request for the container, as the Docker API has it."""
        limits = self.limits
        tmpfs = f"rw,exec,nosuid,nodev,uid={USER},gid={USER},mode=0755,size="
        mounts = [
            {"Type": "bind", "Source": os.path.abspath(root), "Target": os.path.abspath(root), **options}
            for roots, options in (
                # What is mounted below a folder would stay writable where Docker is older than 25.
                (limits.fs_read_roots, {"ReadOnly": True, "BindOptions": {"NonRecursive": True}}),
                (limits.fs_write_roots, {"ReadOnly": False}),
            )
            for root in roots
        ]
        host: dict[str, Any] = {
            "AutoRemove": True,
            "CapDrop": ["ALL"],
            "Init": True,  # or else processes that lost their parent stay as zombies and count
            "LogConfig": {"Type": "none"},
            "Mounts": mounts,
            "NetworkMode": "none" if limits.network == "none" else "bridge",
            "Privileged": False,
            "ReadonlyRootfs": True,
            "SecurityOpt": ["no-new-privileges"],
            "ShmSize": TMPFS_BYTES // 4,
            "Tmpfs": {WORK: f"{tmpfs}{self.work_bytes}", "/tmp": f"{tmpfs}{TMPFS_BYTES}"},
        }
        if limits.memory_bytes is not None:
            host |= {"Memory": limits.memory_bytes, "MemorySwap": limits.memory_bytes}
        if limits.max_processes is not None:
            host["PidsLimit"] = limits.max_processes + KEPT
        if self.cpus is not None:
            host["NanoCpus"] = int(self.cpus * 1_000_000_000)
        if self.runtime is not None:
            host["Runtime"] = self.runtime
        return {
            "Image": self.image,
            # It lives as long as we hold its stdin: Docker closes that when we are gone, killed or not.
            "Entrypoint": ["cat"],
            "Cmd": [],
            "OpenStdin": True,
            "StdinOnce": True,
            "User": f"{KEEPER}:{KEEPER}",
            "WorkingDir": "/",
            "Hostname": "sandbox",
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": {
                "torchrl_agentic": "sandbox",
                "torchrl_agentic.host": socket.gethostname(),
                "torchrl_agentic.pid": str(os.getpid()),
            },
            "HostConfig": host,
        }


def _words(argv: Sequence[str], limits: ResourceLimits, cwd: str | None) -> list[str]:
    """Put the shell that sets the limits in front of a command."""
    sizes = [len(word.encode()) + 1 for word in argv]
    if max(sizes) > MAX_WORD or sum(sizes) > MAX_WORDS:
        raise ValueError("the command is too long; put what is long into a file")
    numbers = [
        "" if limit is None else str(max(1, math.ceil(limit / unit)))
        for limit, unit in ((limits.cpu_seconds, 1), (limits.memory_bytes, 1024), (limits.disk_bytes, 512))
    ]
    return ["sh", "-c", LIMITED, "sh", "/".join((".", *inside(cwd or WORK))), *numbers, *argv]


def _env(limits: ResourceLimits) -> Mapping[str, str]:
    return ENV if limits.env is None else limits.env
