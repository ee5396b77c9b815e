"""A sandbox in the cloud of Modal: a container of its own, under gVisor or in a virtual machine.

Modal's part of this is tested as far as the request that asks for it.

Stops:
- reaching the trainer's files, processes, environment and terminal: Modal runs the code on other machines
- the network, unless it was granted (asked of Modal)
- the container using more memory or processors than its limits, or outliving timeout_s (asked of Modal)
- one process using more memory, processor time or file size than its limits, where code cannot raise them
- the process group of a command outliving it; anything outliving `close`
- output without end costing the trainer memory
Does not stop:
- root, which code is in Modal's containers, from raising its limits where Modal leaves it CAP_SYS_RESOURCE,
  from making any number of processes, and from breaking the container's own programs, which we use
- a process in a session of its own outliving its command; it ends with the sandbox
- many files together filling the container's disk
- bugs in what Modal isolates containers with
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.sandbox.base import Sandbox, SandboxResult, checked
from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.process import Capture, exit_or_signal
from torchrl_agentic.sandbox.remote import scripts
from torchrl_agentic.sandbox.remote.modal_command import Command
from torchrl_agentic.sandbox.remote.modal_container import Container, Request, modal_errors
from torchrl_agentic.sandbox.remote.modal_process import Served
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits
from torchrl_agentic.sandbox.workspace import MAX_READ

if TYPE_CHECKING:
    import modal

logger = logging.getLogger(__name__)

FILE_S = 120.0
"""How long reading or writing one file may take."""


class ModalSandbox(Sandbox):
    """Commands in a container at Modal; a new one per sandbox, ended by `close`.

    app: the name of the Modal app that it appears under, made where there is none; or a `modal.App`.
    image: a `modal.Image`, or the name of one in a registry; None is Modal's Debian with Python. It needs
    /bin/sh, env and setsid.
    cores: what it may use of processors at most. timeout_s: after that Modal ends it, whatever became of us.
    client: a `modal.Client`; None is the one of MODAL_TOKEN_ID or ~/.modal.toml.

    The container may use twice limits.memory_bytes: an interpreter, and a command beside it.
    """

    name: ClassVar[str] = "modal"
    cannot: ClassVar[frozenset[str]] = frozenset({"daemons", "processes"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "full"})

    def __init__(
        self,
        limits: ResourceLimits | None = None,
        *,
        app: str | modal.App = "torchrl-agentic",
        image: str | modal.Image | None = None,
        cores: float = 1.0,
        timeout_s: int = 3600,
        client: modal.Client | None = None,
    ) -> None:
        try:
            import modal
        except ImportError as error:
            raise MissingExtra("ModalSandbox", "modal", "modal") from error
        super().__init__(limits)
        if self.limits.fs_read_roots or self.limits.fs_write_roots:
            raise ValueError("a sandbox at Modal cannot show folders of this host: leave fs_*_roots empty")
        if not cores > 0 or timeout_s < 1:
            raise ValueError(f"cores and timeout_s must be above 0; got {cores} and {timeout_s}")
        if image is None:
            image = modal.Image.debian_slim()
        if isinstance(image, str):
            image = modal.Image.from_registry(image)  # pyright: ignore[reportUnknownMemberType]  its **kwargs
        self._request = Request(
            app=app,
            image=image,
            cores=cores,
            memory_bytes=self.limits.memory_bytes,
            timeout_s=timeout_s,
            open_network=self.limits.network == "full",
            client=client,
        )
        self._lock = asyncio.Lock()
        self._container: Container | None = None
        self._remote: modal.Sandbox | None = None
        self._raises_limits = False
        self._served: set[Served] = set()

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Which limits hold here; whether code can raise those of a process is known once it is open."""
        return {
            "cpu_seconds": not self._raises_limits,
            "memory_bytes": not self._raises_limits,
            "memory_total": self.limits.memory_bytes is not None,
            "max_processes": False,
            "disk_bytes": not self._raises_limits,
            "disk_total": False,
            "network": True,
            "seccomp": False,
        }

    def fresh(self) -> ModalSandbox:
        """Make another one with the same settings, not open yet."""
        request = self._request
        return ModalSandbox(
            self.limits,
            app=request.app,
            image=request.image,
            cores=request.cores,
            timeout_s=request.timeout_s,
            client=request.client,
        )

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self._remote is not None

    async def open(self) -> None:
        """Make the container, and /work in it; the first time, Modal may have to build the image."""
        async with self._lock:
            if self._remote is not None:
                return
            await self._end()
            self._container = Container(self._request)
            try:
                remote = await self._container.make()
                await self._prepare(remote)
            except BaseException:
                await to_the_end(self._end_quietly())
                raise
            self._remote = remote

    async def _prepare(self, remote: modal.Sandbox) -> None:
        with modal_errors("prepare a sandbox"):
            process = await remote.exec.aio(*scripts.prepare(), workdir="/", timeout=60)
            answer, reason, code = await asyncio.gather(
                process.stdout.read.aio(), process.stderr.read.aio(), process.wait.aio()
            )
        if code:
            raise SandboxError(
                f"the image cannot serve as a sandbox: {reason.strip() or f'exit code {code}'}"
            )
        self._raises_limits = answer.strip() != "0"

    async def close(self) -> None:
        """End the container; also what an `open` left that failed or was cancelled.

        Raises:
            SandboxError: Modal could not be told; call it again, or Modal ends the container after timeout_s.
        """
        async with self._lock:
            await to_the_end(self._end())

    async def _end(self) -> None:
        self._remote = None
        served, self._served = self._served, set()
        for process in served:
            process.stop()
        container = self._container
        if container is not None:
            await container.end()
            if self._container is container:
                self._container = None

    async def _end_quietly(self) -> None:
        """End the container where something else is to be told already; a later `close` tries it again."""
        try:
            await self._end()
        except SandboxError:
            logger.exception("a sandbox stays at Modal for up to %d s", self._request.timeout_s)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        limits: ResourceLimits | None = None,
    ) -> SandboxResult:
        """Run one command to its end; its wall time counts from when Modal has started it."""
        effective = self.limits.narrow(limits)
        if effective.network != self.limits.network:
            raise ValueError(
                "all commands of a sandbox at Modal have the same network; to tighten another limit alone, "
                "pass dataclasses.replace(sandbox.limits, ...)"
            )
        words = scripts.supervised(checked(argv), effective, cwd=cwd, stdin=stdin is not None)
        out, err = Capture(effective.output_bytes), Capture(effective.output_bytes)

        async def keep(data: bytes) -> None:
            out.add(data)

        began = time.monotonic()
        code = await self._finish(
            words, stdin=stdin, stdout=keep, stderr=err.add, wall_s=effective.wall_seconds
        )
        return SandboxResult(
            stdout=out.text(),
            stderr=err.text(),
            exit_code=-9 if code is None else exit_or_signal(code),
            wall_seconds=time.monotonic() - began,
            timed_out=code is None,
            truncated=bool(out.omitted or err.omitted),
        )

    async def _finish(
        self,
        words: Sequence[str],
        *,
        stdin: bytes | None = None,
        stdout: Callable[[bytes], Awaitable[None]],
        stderr: Callable[[bytes], None],
        wall_s: float | None,
    ) -> int | None:
        """Run a command to its end and give its exit code; None where it was stopped at its time."""
        remote = self._opened()
        command = Command(remote, words, stdout=stdout, stderr=stderr, wall_s=wall_s)
        try:
            await command.started()
            async with asyncio.timeout(wall_s):
                return await command.follow(stdin)
        except TimeoutError:
            return None
        finally:
            await to_the_end(self._stopped(command, remote))

    async def _stopped(self, command: Command, remote: modal.Sandbox) -> None:
        if not await command.end():
            await self._give_up(remote)

    async def _give_up(self, remote: modal.Sandbox) -> None:
        if self._remote is remote:
            logger.warning("a command in %s could not be ended, so the sandbox is", remote.object_id)
            await self._end_quietly()

    async def spawn(self, argv: Sequence[str]) -> Served:
        """Start a long-lived process; neither its time nor its processor time has a limit of its own."""
        limits = replace(self.limits, cpu_seconds=None)
        words = scripts.supervised(checked(argv), limits, stdin=True)
        remote = self._opened()
        served = Served(remote, words, lambda: self._give_up(remote))
        try:
            await served.started()
        except BaseException:
            await served.kill()
            raise
        self._served = {other for other in self._served if other.running} | {served}
        return served

    # Files go through commands, and not through the SDK's `filesystem`: that follows links, waits for ever at
    # a FIFO, and holds a file of any size in memory; beneath, it is an exec as well, of a program of Modal's.

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file inside, making its folders.

        Raises:
            OSError: it cannot be written, for want of space for example.
        """
        await self._file(scripts.write(path), path, stdin=data)

    async def read_file(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file inside."""
        limit = min(MAX_READ if max_bytes is None else max_bytes, MAX_READ)
        return await self._file(scripts.read(path, limit), path, limit=limit)

    async def _file(
        self, argv: Sequence[str], path: str, *, stdin: bytes | None = None, limit: int = 0
    ) -> bytes:
        content, reason = bytearray(), Capture(1000)

        async def keep(data: bytes) -> None:
            content.extend(data[: limit - len(content)])

        free = ResourceLimits(
            cpu_seconds=None, memory_bytes=None, max_processes=None, disk_bytes=None, wall_seconds=FILE_S
        )
        words = scripts.supervised(argv, free, stdin=stdin is not None)
        code = await self._finish(words, stdin=stdin, stdout=keep, stderr=reason.add, wall_s=FILE_S)
        if code:
            refused = scripts.refusal(code, path, reason.text())
            raise refused or SandboxError(f"the sandbox cannot reach its files: {reason.text()}")
        if code is None:
            raise SandboxError(f"{path} was not read or written within {FILE_S:g} s")
        return bytes(content)

    def _opened(self) -> modal.Sandbox:
        if self._remote is None:
            raise SandboxError("the sandbox is not open: use 'async with', or call open() first")
        return self._remote
