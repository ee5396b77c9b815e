"""`ModalSandbox`: a container in Modal's cloud for each sandbox, under gVisor or in a virtual machine.

Modal's part is tested only up to the request for it.

Stops:
- reaching the trainer's files, processes, environment and terminal: Modal runs the code on other machines
- using a network that was not granted (enforced by Modal)
- the container using more memory or processors than its limits, or outliving timeout_s (enforced by Modal)
- one process using more memory, processor time or file size than its limits, where code cannot raise them
- the process group of a command outliving it; anything outliving `close`
- unlimited output using memory of the trainer
Does not stop:
- code, which is root in Modal's containers, raising its limits where Modal leaves it CAP_SYS_RESOURCE,
  starting any number of processes, and breaking the container's own programs, which the sandbox uses
- a process in its own session outliving its command; it ends with the sandbox
- many files together filling the disk of the container
- bugs in Modal's isolation of containers
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.remote.remote_process import Execution, Take
from torchrl_agentic.sandbox.remote.remote_sandbox import RemoteCommand, RemoteSandbox
from torchrl_agentic.sandbox.remote.sdk_requests import sdk_errors
from torchrl_agentic.sandbox.resource_limits import Network, ResourceLimits

if TYPE_CHECKING:
    import modal
    from modal.container_process import ContainerProcess
    from modal.io_streams import StreamReader

TAG = "torchrl-agentic"
"""Tag by which a lost container is found."""
# First process of the container, in place of that of the image: it keeps running, and reaps orphans.
_STAY = ("/bin/sh", "-c", "while :; do sleep 60; done")
_MIN_MEMORY_MIB = 128
_CORES_REQUESTED = 0.125
_REST_S = 1.0
"""Maximum seconds to wait for the rest of the output of a command that has ended."""
_BACKSTOP_S = 10
"""Seconds after its wall limit when Modal itself ends a command."""


class ModalSandbox(RemoteSandbox["modal.Sandbox"]):
    """Run commands in a container at Modal. Each sandbox creates one and ends it at `close`.

    The container may use twice limits.memory_bytes: for an interpreter and for a command beside it.

    Args:
        limits: Limits of the sandbox.
        app: A `modal.App`, or the name of one, which is created if it does not exist.
        image: A `modal.Image`, or the name of one in a registry; None for Modal's Debian with Python. It
            needs /bin/sh and `programs`.
        cores: Number of processors that it may use.
        timeout_s: Seconds after which Modal ends it in any case.
        client: A `modal.Client`; None for that of MODAL_TOKEN_ID or ~/.modal.toml.

    Raises:
        ValueError: If a number is not above 0, or the limits ask for folders or an unsupported network.
    """

    name: ClassVar[str] = "modal"
    package: ClassVar[str] = "modal"
    not_stopped: ClassVar[frozenset[str]] = frozenset({"daemons", "processes"})
    network: ClassVar[frozenset[Network]] = frozenset({"none", "full"})
    unenforced: ClassVar[Mapping[str, str]] = {
        "disk_total": "Modal has no limit for it",
        "max_processes": "Modal has no limit for it",
        "memory_total": "it is that of memory_bytes, which is not set",
        "seccomp": "the filter is that of Modal",
    }

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
        super().__init__(limits)
        import modal

        if not cores > 0 or timeout_s < 1:
            raise ValueError(f"cores and timeout_s must be above 0; got {cores} and {timeout_s}")
        if image is None:
            image = modal.Image.debian_slim()
        if isinstance(image, str):
            image = modal.Image.from_registry(image)  # pyright: ignore[reportUnknownMemberType]  its **kwargs
        self.app, self.image, self.cores, self.timeout_s, self.client = app, image, cores, timeout_s, client
        self._app_id: str | None = None

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced; once open, this includes whether code can raise it."""
        return {
            **dict.fromkeys(("cpu_seconds", "memory_bytes", "disk_bytes"), not self.raises_limits),
            **dict.fromkeys(("max_processes", "disk_total", "seccomp"), False),
            "memory_total": self.limits.memory_bytes is not None,
            "network": True,
        }

    async def _create(self, mark: str) -> modal.Sandbox:
        import modal

        memory = None
        if self.limits.memory_bytes is not None:
            mib = max(_MIN_MEMORY_MIB, math.ceil(self.limits.memory_bytes / 2**20))
            memory = (mib, 2 * mib)
        self._app_id = None
        with sdk_errors("Modal could not create a sandbox", _refusals()):
            app = self.app
            if isinstance(app, str):
                app = await modal.App.lookup.aio(app, client=self.client, create_if_missing=True)
            if not hasattr(self.image, "object_id"):
                await self.image.build.aio(app)
            self._app_id = app.app_id
            return await modal.Sandbox.create.aio(  # pyright: ignore[reportUnknownMemberType]  PathLike of what
                *_STAY,
                app=app,
                image=self.image,
                workdir=WORK,
                timeout=self.timeout_s,
                cpu=(min(_CORES_REQUESTED, self.cores), self.cores),
                memory=memory,
                block_network=self.limits.network != "full",
                tags={TAG: mark},
                client=self.client,
            )

    async def _end(self, machine: modal.Sandbox) -> None:
        from modal.exception import NotFoundError

        with sdk_errors(f"Modal could not end the sandbox {machine.object_id}"):
            with contextlib.suppress(NotFoundError):
                await machine.terminate.aio()
            await machine.detach.aio()  # pyright: ignore[reportUnknownMemberType]  its stub has no result

    async def _end_lost(self, mark: str) -> None:
        import modal

        if self._app_id is None:
            return
        with sdk_errors("Modal could not look for a lost sandbox"):
            async for lost in modal.Sandbox.list.aio(
                app_id=self._app_id, tags={TAG: mark}, client=self.client
            ):
                await lost.terminate.aio()

    async def _execute(self, machine: modal.Sandbox, command: RemoteCommand) -> ModalExecution:
        from modal.exception import ConflictError, InvalidError

        timeout = None if command.wall_s is None else math.ceil(command.wall_s) + _BACKSTOP_S
        try:
            with sdk_errors("Modal could not start a command", _refusals()):
                process = await machine.exec.aio(*command.words, workdir="/", timeout=timeout, text=False)
        except SandboxError as error:
            if isinstance(error.__cause__, InvalidError) and not isinstance(error.__cause__, ConflictError):
                raise ValueError(f"{error}; write long arguments to a file") from None
            raise
        return ModalExecution(process, command)


class ModalExecution(Execution):
    """A command that Modal runs in a container.

    Args:
        process: The command at the SDK.
        command: The command.
    """

    def __init__(self, process: ContainerProcess[bytes], command: RemoteCommand) -> None:
        self._process, self._command = process, command

    async def wait(self) -> int:
        """Deliver the output to its end. Return the exit code, 128 + n for signal n."""
        ended = asyncio.ensure_future(self._process.wait.aio())
        streams = (
            (self._process.stdout, self._command.stdout),
            (self._process.stderr, self._command.stderr),
        )
        readers = [asyncio.ensure_future(_read(stream, take)) for stream, take in streams]
        left = {ended, *readers}
        try:
            with sdk_errors("Modal could not report how a command continues"):
                while not ended.done():
                    done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                # A process in its own session may keep the streams open for longer.
                for task in (await asyncio.wait(readers, timeout=_REST_S))[0]:
                    task.result()
                code = ended.result()
        finally:
            for task in (ended, *readers):
                task.cancel()
            await asyncio.gather(ended, *readers, return_exceptions=True)
        return 137 if code < 0 else code  # negative: Modal ended it at its timeout

    async def write(self, data: bytes) -> None:
        """Write to stdin. Raise EOFError if the command has closed it."""
        from modal.exception import InvalidError, NotFoundError

        with sdk_errors("Modal could not write to a command"):
            try:
                self._process.stdin.write(data)
                await self._process.stdin.drain.aio()
            except (InvalidError, NotFoundError):
                raise EOFError("the process has closed its stdin") from None


async def _read(stream: StreamReader[bytes], take: Take) -> None:
    async with contextlib.aclosing(aiter(stream)) as chunks:
        async for chunk in chunks:
            await take(chunk)


def _refusals() -> tuple[type[Exception], ...]:
    from modal import exception as refused

    of_requests = (refused.AuthError, refused.InvalidError, refused.NotFoundError, refused.RemoteError)
    return (*of_requests, refused.PermissionDeniedError, refused.ResourceExhaustedError)
