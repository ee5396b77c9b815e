"""`DockerSandbox`: a Docker container for each sandbox, with its own processes, network and files.

Stops:
- reading or writing host files, other than granted folders; writing to the image
- seeing or signalling host processes; using a network that was not granted
- gaining rights: capabilities, setuid programs, the user root
- one process using more memory, processor time or file size than its limits
- all processes together using more memory, processes, processors or disk than the container has
- the process group of a command outliving it; anything outliving the sandbox or the trainer
- unlimited output using memory of the trainer
Does not stop:
- a process that leaves the process group of its command from outliving it: it ends with the container, and if
  it keeps the output of the command open, the command continues until its wall limit
- learning the paths on the host of the image and of granted folders: /proc/self/mountinfo
- bugs in the kernel or in Docker: for code of strangers, `runtime="runsc"` (gVisor) adds a second kernel
- ptrace inside the container, and other system calls that Docker's own filter allows
- the commands of one sandbox disturbing each other: they share a user and /work
- processes that fork faster than they can be ended: that ends the container, and the next command reports it
- filling the disk of the host through volumes that the image itself declares, if user 1000 may write to them
- with network="full": reaching other containers, and services of the host that listen beyond its loopback
- learning about the machine: processor, kernel version, load
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.bubblewrap import TMPFS_BYTES
from torchrl_agentic.sandbox.remote.remote_process import Execution
from torchrl_agentic.sandbox.remote.remote_sandbox import RemoteCommand, RemoteSandbox
from torchrl_agentic.sandbox.remote.sdk_requests import request_with_retries, sdk_errors
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer
    from aiodocker.execs import Exec
    from aiodocker.stream import Stream

USER, KEEPER = 1000, 1001
"""User of commands, and user of the first process of the container, which commands cannot signal."""
KEPT = 7
"""Number of processes that are not the command's own: Docker's init, its child, and those of `scripts`."""
MAX_WORD, MAX_WORDS = 1 << 17, 1 << 20
"""Maximum bytes of one word and of all words of a command on Linux."""
REQUEST_S = 60.0
STUCK_S = 0.2
"""Seconds without progress of its input after which a command is checked to be running."""
REST_S = 1.0
"""Maximum seconds to wait for the rest of the output of a command that has ended."""
PAUSES_S = (0.0, 0.02, 0.1, 0.3, 0.6)
NO_DAEMON = (
    "no Docker daemon answers ({}). Start one and check that `docker info` works for this user, or pass its "
    "URL: DockerSandbox(url='unix:///run/user/1000/docker.sock'), or set DOCKER_HOST"
)


@dataclass(frozen=True, slots=True)
class Container:
    """A container and the connection to its stdin. When that is closed, the container ends and is removed."""

    client: Docker
    remote: DockerContainer
    lifeline: Stream


class DockerSandbox(RemoteSandbox[Container]):
    """Run commands in a container without rights; files are in memory, in /work.

    The limit `memory_bytes` applies to each process and to the whole container. `max_processes`, `network`
    and the roots belong to the container, so that one call cannot narrow them.

    Args:
        limits: Limits of the sandbox.
        image: An image that the daemon has, with sh, setsid, env, head and cat; for a REPL also python3.
        runtime: A runtime other than the default of the daemon, such as "runsc".
        cpus: Number of processors that all processes together may use; None for all.
        work_bytes: Size of /work; it counts as memory.
        url: URL of the daemon; None to find it as `docker` does.

    Raises:
        ValueError: If a number is not above 0, or the network is not supported.
    """

    name: ClassVar[str] = "docker"
    package: ClassVar[str] = "aiodocker"
    not_stopped: ClassVar[frozenset[str]] = frozenset({"daemons", "host_paths"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "full"})
    unenforced: ClassVar[Mapping[str, str]] = {"seccomp": "the filter is that of Docker"}
    shows_folders: ClassVar[bool] = True

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
        for name, value in (("cpus", cpus), ("work_bytes", work_bytes)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0; got {value}")
        self.image, self.runtime, self.cpus, self.work_bytes, self.url = image, runtime, cpus, work_bytes, url

    def _reset(self) -> None:
        super()._reset()
        self._created: Container | None = None

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced; "seccomp" is False, because that filter is Docker's."""
        held = ("cpu_seconds", "memory_bytes", "memory_total", "max_processes", "disk_bytes", "disk_total")
        return dict.fromkeys((*held, "network"), True) | {"seccomp": False}

    async def _create(self, mark: str) -> Container:
        client, name = await self._connect(), f"torchrl_agentic-{mark}"
        remote = client.containers.container(name)  # pyright: ignore[reportUnknownMemberType]  untyped options
        container = self._created = Container(client, remote, remote.attach(stdin=True))
        try:
            with sdk_errors("Docker could not create the container"):
                await client.containers.create(self._config(), name=name)
                await container.lifeline.__aenter__()
                await remote.start()  # pyright: ignore[reportUnknownMemberType]  untyped options
        except SandboxError as error:
            if "no such image" in str(error).lower():
                raise SandboxError(f"{error}. Download the image with: docker pull {self.image}") from error
            raise
        return container

    async def _connect(self) -> Docker:
        import aiodocker
        from aiohttp import ClientTimeout

        client: Docker | None = None
        try:
            client = aiodocker.Docker(self.url, timeout=ClientTimeout(total=REQUEST_S))
            await request_with_retries("Docker could not report its version", client.version)
        except BaseException as error:
            if client is not None:
                await client.close()
            if isinstance(error, Exception):  # aiodocker raises AssertionError, among others
                raise SandboxError(NO_DAEMON.format(str(error) or "no URL is known")) from error
            raise
        return client

    async def _end(self, machine: Container) -> None:
        if machine.client.session.closed:
            return  # its stdin is closed, see below
        try:
            await request_with_retries(
                "Docker could not remove the container", lambda: _delete(machine.remote)
            )
        finally:
            # When its stdin is closed, `cat` ends, and with it the container, which Docker then removes.
            await _close(machine.lifeline)
            await machine.client.close()

    async def _end_lost(self, mark: str) -> None:
        if self._created is not None:
            await self._end(self._created)

    async def _execute(self, machine: Container, command: RemoteCommand) -> DockerExecution:
        from aiodocker.exceptions import DockerError

        sizes = [len(word.encode()) + 1 for word in command.words]
        if max(sizes) > MAX_WORD or sum(sizes) > MAX_WORDS:
            raise ValueError("the command is too long; write long arguments to a file")
        with sdk_errors("Docker could not start a command", (DockerError,)):
            remote = await machine.remote.exec(
                command.words, stdin=command.has_stdin, user=f"{USER}:{USER}", workdir=WORK
            )
            stream = remote.start()
            await stream.__aenter__()
        return DockerExecution(machine.remote, remote, stream, command)

    def _config(self) -> dict[str, Any]:
        """Return the container request of the Docker API."""
        limits = self.limits
        tmpfs = f"rw,exec,nosuid,nodev,uid={USER},gid={USER},mode=0755,size="
        mounts = [
            {"Type": "bind", "Source": os.path.abspath(root), "Target": os.path.abspath(root), **options}
            for roots, options in (
                # In Docker before 25, mounts below the folder would stay writable.
                (limits.fs_read_roots, {"ReadOnly": True, "BindOptions": {"NonRecursive": True}}),
                (limits.fs_write_roots, {"ReadOnly": False}),
            )
            for root in roots
        ]
        host: dict[str, Any] = {
            "AutoRemove": True,
            "CapDrop": ["ALL"],
            "Init": True,  # without an init, orphans stay as zombies and count
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
            # It runs while its stdin is open, which Docker closes when this process ends, also if killed.
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


class DockerExecution(Execution):
    """A command that Docker runs in a container.

    Args:
        container: The container.
        remote: The command at the Docker API.
        stream: Connection to its stdin, stdout and stderr.
        command: The command.
    """

    def __init__(
        self, container: DockerContainer, remote: Exec, stream: Stream, command: RemoteCommand
    ) -> None:
        self._container, self._remote, self._stream = container, remote, stream
        self._takes = {1: command.stdout, 2: command.stderr}
        self._reading = asyncio.ensure_future(self._read())

    async def wait(self) -> int:
        """Deliver the output to its end. Return the exit code, 128 + n for signal n."""
        try:
            await asyncio.wait([self._reading])
        finally:
            self._reading.cancel()
        if not self._reading.cancelled():
            self._reading.result()
        for pause_s in PAUSES_S:  # Docker may report the end with a delay
            await asyncio.sleep(pause_s)
            state = await request_with_retries(
                "Docker could not report how a command ended", self._remote.inspect
            )
            if not state["Running"] and state["ExitCode"] is not None:
                break
        else:
            raise SandboxError("the connection to a command in the container was lost")
        code = int(state["ExitCode"])
        if code > 128 and await self._has_container_ended():
            raise SandboxError("the container has ended, and a command with it")
        return code

    async def _has_container_ended(self) -> bool:
        """Return whether the container has ended, which ends its commands first.

        Docker reports the end of a container after that of its commands. It is certain to run if it still
        starts a command; if it does not, it may also have too many processes.
        """
        with sdk_errors("Docker could not report the state of the container"):
            for pause_s in PAUSES_S:
                await asyncio.sleep(pause_s)
                shown = await self._container.show()  # pyright: ignore[reportUnknownMemberType]  untyped options
                if not shown["State"]["Running"]:
                    return True
                if await self._can_start_command():
                    return False
        return False

    async def _can_start_command(self) -> bool:
        from aiodocker.exceptions import DockerError

        try:
            remote = await self._container.exec(["sh", "-c", ":"], user=f"{USER}:{USER}")
            async with remote.start() as stream:
                while await stream.read_out() is not None:
                    pass
            return (await remote.inspect())["ExitCode"] == 0
        except DockerError:  # the container is not running
            return False

    async def _read(self) -> None:
        with sdk_errors("Docker could not deliver the output of a command"):
            while (message := await self._stream.read_out()) is not None:
                await self._takes[message.stream](message.data)

    async def write(self, data: bytes) -> None:
        """Write to stdin. Raise EOFError if the command has closed it."""
        writing = asyncio.ensure_future(self._stream.write_in(data))
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        with sdk_errors("Docker could not report whether a command takes input"):
            while not (await asyncio.wait([writing], timeout=STUCK_S))[0]:
                # Docker accepts no input for a command that has ended, and asyncio reports the end of output
                # only after all input is sent.
                if not (await self._remote.inspect())["Running"]:
                    asyncio.get_running_loop().call_later(REST_S, self._reading.cancel)
                    raise EOFError("the process has closed its stdin")
        try:
            writing.result()
        except (AssertionError, RuntimeError, OSError) as error:  # aiodocker raises AssertionError
            raise EOFError("the process has closed its stdin") from error

    async def detach(self) -> None:
        """Close the connection."""
        await _close(self._stream)


async def _close(stream: Stream) -> None:
    with contextlib.suppress(AssertionError, OSError):  # raised if the connection is closed
        await stream.close()


async def _delete(container: DockerContainer) -> None:
    from aiodocker.exceptions import DockerError

    try:
        await container.delete(force=True, v=True)
    except DockerError as error:
        if error.status not in (404, 409):  # it has been removed; it is being removed
            raise
