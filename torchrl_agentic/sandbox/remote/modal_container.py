"""A container at Modal, from its creation to its end, whatever comes between."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import WORK

if TYPE_CHECKING:
    import modal

TAG = "torchrl-agentic"
"""The tag by which a container is found whose creation we lost sight of."""
PATIENCE_S = 30.0
"""How long a container that is being made may take to be there, once it is not wanted any more."""
# The first process of the container, in place of the image's: it stays, and it reaps what is left behind.
_STAY = ("/bin/sh", "-c", "while :; do sleep 60; done")
_MIN_MEMORY_MIB = 128
_CORES_REQUESTED = 0.125


@contextlib.contextmanager
def modal_errors(doing: str) -> Generator[None]:
    """Turn what the SDK raises into a `SandboxError`; nothing but calls of the SDK belongs inside."""
    import grpclib
    from grpclib.exceptions import StreamTerminatedError
    from modal.exception import Error

    try:
        yield
    except (Error, grpclib.GRPCError, StreamTerminatedError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise SandboxError(f"Modal could not {doing}: {reason}") from error


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of Modal; see `ModalSandbox`."""

    app: str | modal.App
    image: modal.Image
    cores: float
    memory_bytes: int | None
    timeout_s: int
    open_network: bool
    client: modal.Client | None


class Container:
    """A container, made by `make` at most once, and ended by `end`, which may be called again."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._creating: asyncio.Task[modal.Sandbox] | None = None

    async def make(self) -> modal.Sandbox:
        """Make it. Where that fails or is cancelled, `end` is due as well.

        Raises:
            SandboxError: it cannot be had.
        """
        import modal

        request = self._request
        with modal_errors("make a sandbox ready"):
            app = request.app
            if isinstance(app, str):
                app = await modal.App.lookup.aio(app, client=request.client, create_if_missing=True)
            # Once, and apart from the creation: whoever is cancelled need not wait for a build.
            if not hasattr(request.image, "object_id"):
                await request.image.build.aio(app)
        # A creation under way cannot be called off for sure: `end` lets it finish, and ends what comes of it.
        self._creating = asyncio.ensure_future(self._create(app))
        with modal_errors("make a sandbox"):
            return await asyncio.shield(self._creating)

    async def _create(self, app: modal.App) -> modal.Sandbox:
        import modal

        request, mark, memory = self._request, {TAG: uuid.uuid4().hex}, None
        if request.memory_bytes is not None:
            mib = max(_MIN_MEMORY_MIB, math.ceil(request.memory_bytes / 2**20))
            memory = (mib, 2 * mib)
        try:
            return await modal.Sandbox.create.aio(  # pyright: ignore[reportUnknownMemberType]  PathLike of what
                *_STAY,
                app=app,
                image=request.image,
                workdir=WORK,
                timeout=request.timeout_s,
                cpu=(min(_CORES_REQUESTED, request.cores), request.cores),
                memory=memory,
                block_network=not request.open_network,
                tags=mark,
                client=request.client,
            )
        except BaseException:
            # The answer may have been lost, and not the request.
            with contextlib.suppress(SandboxError), modal_errors("look for a lost sandbox"):
                async for lost in modal.Sandbox.list.aio(app_id=app.app_id, tags=mark, client=request.client):
                    await lost.terminate.aio()
            raise

    async def end(self) -> None:
        """End it, if there is one; where it is being made, as soon as it is.

        Raises:
            SandboxError: Modal could not be told.
        """
        from modal.exception import NotFoundError

        if self._creating is None:
            return
        if not self._creating.done():
            await asyncio.wait([self._creating], timeout=PATIENCE_S)
        if not self._creating.done():
            self._creating.cancel()
            await asyncio.wait([self._creating])
        if not self._creating.cancelled() and self._creating.exception() is None:
            remote = self._creating.result()
            with modal_errors(f"end the sandbox {remote.object_id}"):
                with contextlib.suppress(NotFoundError):
                    await remote.terminate.aio()
                await remote.detach.aio()  # pyright: ignore[reportUnknownMemberType]  its stub has no result
        self._creating = None
