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
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from torchrl_agentic.errors import MissingExtra, SandboxError
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.remote.remote_process import Take
from torchrl_agentic.sandbox.remote.remote_sandbox import RemoteSandbox
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
_CHUNK = 1 << 20


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
    not_stopped: ClassVar[frozenset[str]] = frozenset({"daemons", "processes"})
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
            raise ValueError(
                "a sandbox at Modal cannot show folders of this host; copy files with write_file"
            )
        if not cores > 0 or timeout_s < 1:
            raise ValueError(f"cores and timeout_s must be above 0; got {cores} and {timeout_s}")
        if image is None:
            image = modal.Image.debian_slim()
        if isinstance(image, str):
            image = modal.Image.from_registry(image)  # pyright: ignore[reportUnknownMemberType]  its **kwargs
        self.app, self.image, self.cores, self.timeout_s, self.client = app, image, cores, timeout_s, client
        self._app_id: str | None = None
        self._mark: dict[str, str] = {}

    @property
    def limits_enforced(self) -> Mapping[str, bool]:
        """Map each limit to whether it is enforced; once open, this includes whether code can raise it."""
        return {
            **dict.fromkeys(("cpu_seconds", "memory_bytes", "disk_bytes"), not self.raises_limits),
            **dict.fromkeys(("max_processes", "disk_total", "seccomp"), False),
            "memory_total": self.limits.memory_bytes is not None,
            "network": True,
        }

    def fresh(self) -> ModalSandbox:
        """Return a new, unopened sandbox with the same settings."""
        return ModalSandbox(
            self.limits,
            app=self.app,
            image=self.image,
            cores=self.cores,
            timeout_s=self.timeout_s,
            client=self.client,
        )

    async def _create(self) -> modal.Sandbox:
        import modal

        memory = None
        if self.limits.memory_bytes is not None:
            mib = max(_MIN_MEMORY_MIB, math.ceil(self.limits.memory_bytes / 2**20))
            memory = (mib, 2 * mib)
        self._app_id, self._mark = None, {TAG: uuid.uuid4().hex}
        with sdk_errors("Modal could not create a sandbox"):
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
                tags=self._mark,
                client=self.client,
            )

    async def _end(self, machine: modal.Sandbox) -> None:
        from modal.exception import NotFoundError

        with sdk_errors(f"Modal could not end the sandbox {machine.object_id}"):
            with contextlib.suppress(NotFoundError):
                await machine.terminate.aio()
            await machine.detach.aio()  # pyright: ignore[reportUnknownMemberType]  its stub has no result

    async def _end_lost(self) -> None:
        import modal

        if self._app_id is None:
            return
        with sdk_errors("Modal could not look for a lost sandbox"):
            async for lost in modal.Sandbox.list.aio(
                app_id=self._app_id, tags=self._mark, client=self.client
            ):
                await lost.terminate.aio()

    async def execute(
        self,
        machine: modal.Sandbox,
        words: Sequence[str],
        stdout: Take,
        stderr: Take,
        *,
        stdin: bool,
        wall_s: float | None,
    ) -> ModalExecution:
        """Start a command; see `RemoteSandbox.execute`.

        Args:
            machine: The container.
            words: The command and its arguments.
            stdout: Receives output.
            stderr: Receives error output.
            stdin: True if `ModalExecution.write` will be called.
            wall_s: Seconds after which Modal may end the command; None for no limit.
        """
        from modal.exception import ConflictError, InvalidError

        timeout = None if wall_s is None else math.ceil(wall_s) + _BACKSTOP_S
        try:
            with sdk_errors("Modal could not start a command"):
                process = await machine.exec.aio(*words, workdir="/", timeout=timeout, text=False)
        except SandboxError as error:
            if isinstance(error.__cause__, InvalidError) and not isinstance(error.__cause__, ConflictError):
                raise ValueError(f"{error}; write long arguments to a file") from None
            raise
        return ModalExecution(process, stdout, stderr)

    def may_run(self, error: BaseException | None) -> bool:
        """Return whether Modal gave no clear answer."""
        from modal import exception as refused

        of_requests = (refused.AuthError, refused.InvalidError, refused.NotFoundError, refused.RemoteError)
        of_limits = (refused.PermissionDeniedError, refused.ResourceExhaustedError)
        return error is not None and not isinstance(error, (*of_requests, *of_limits))


class ModalExecution:
    """A command that Modal runs in a container.

    Args:
        process: The command at the SDK.
        stdout: Receives output.
        stderr: Receives error output.
    """

    def __init__(self, process: ContainerProcess[bytes], stdout: Take, stderr: Take) -> None:
        self._process, self._stdout, self._stderr = process, stdout, stderr

    async def wait(self) -> int:
        """Deliver the output to its end. Return the exit code, 128 + n for signal n."""
        ended = asyncio.ensure_future(self._process.wait.aio())
        streams = ((self._process.stdout, self._stdout), (self._process.stderr, self._stderr))
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
        """Write to stdin.

        Raises:
            EOFError: If the command has closed its stdin.
        """
        from modal.exception import InvalidError, NotFoundError

        with sdk_errors("Modal could not write to a command"):
            try:
                for start in range(0, len(data), _CHUNK):
                    self._process.stdin.write(data[start : start + _CHUNK])
                    await self._process.stdin.drain.aio()
            except (InvalidError, NotFoundError):
                raise EOFError("the process has closed its stdin") from None

    async def detach(self) -> None:
        """Do nothing: the streams are closed by `wait`."""


async def _read(stream: StreamReader[bytes], take: Take) -> None:
    async with contextlib.aclosing(aiter(stream)) as chunks:
        async for chunk in chunks:
            await take(chunk)
