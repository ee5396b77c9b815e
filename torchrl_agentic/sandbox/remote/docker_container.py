"""A Docker container for one sandbox: made, given commands over the exec API, and removed for sure."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torchrl_agentic.errors import SandboxError
from torchrl_agentic.sandbox.base import WORK
from torchrl_agentic.sandbox.cancellation import to_the_end
from torchrl_agentic.sandbox.process import CHUNK, exit_or_signal
from torchrl_agentic.sandbox.remote.docker_calls import (
    REQUEST_S,
    close_stream,
    ended,
    insist,
    reported,
    transport_of,
)
from torchrl_agentic.sandbox.remote.docker_scripts import END, MARK, SUPERVISE

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer
    from aiodocker.execs import Exec
    from aiodocker.stream import Stream

USER = 1000
"""The user that commands run as."""
KEEPER = 1001
"""The user of the container's first processes: commands cannot signal those, not even all at once."""
GROUPS = range(60706, 61184)
"""The groups that commands run as, one each; systemd's table of groups gives them to nobody."""
STUCK_S = 0.2
"""How long a command may take no input until we look whether it still can."""
STDOUT, STDERR = 1, 2
Take: TypeAlias = Callable[[bytes], object]
END_S = 5.0
"""How long the processes of a command may take to be gone."""


class Container:
    """A running container. Made by `create`; whatever becomes of us, it goes away.

    lost: why it is gone.
    """

    def __init__(self, client: Docker, container: DockerContainer, lifeline: Stream) -> None:
        self.lost: str | None = None
        self._client = client
        self._container = container
        self._lifeline = lifeline
        self._commands: set[Command] = set()
        self._numbers = itertools.cycle(GROUPS)
        self._removing: asyncio.Future[None] | None = None

    @classmethod
    async def create(cls, client: Docker, config: Mapping[str, Any], name: str) -> Container:
        """Make a container and start it; `client` is closed with it."""
        container = client.containers.container(name)  # pyright: ignore[reportUnknownMemberType]  untyped options
        made = cls(client, container, container.attach(stdin=True))
        # Docker goes on with it when nobody waits for the answer any more; so do we, to remove what it made.
        making = asyncio.ensure_future(client.containers.create(config, name=name))
        try:
            with reported("make the container"):
                await asyncio.shield(making)
                await made._lifeline.__aenter__()
                await container.start()  # pyright: ignore[reportUnknownMemberType]  the same
        except BaseException:
            await to_the_end(made._give_up(making))
            raise
        return made

    async def start(self, argv: Sequence[str], *, env: Mapping[str, str], stdin: int | None = 0) -> Command:
        """Start a command in /work, which ends together with all that it starts.

        stdin: how many bytes will be sent; None: there is no telling.
        """
        if self.lost is not None:
            raise SandboxError(self.lost)
        group = self._free_group()
        mark = secrets.token_hex(8)
        supervise = ["sh", "-c", SUPERVISE, "sh", str(group), mark, str(stdin or "-")]
        with reported("start a command"):
            execution = await self._container.exec(
                [*supervise, *argv],
                stdin=stdin != 0,
                user=f"{USER}:{group}",
                workdir=WORK,
                environment={**env, MARK: mark},
            )
        command = Command(self, execution, group, mark)
        self._commands.add(command)
        try:
            with reported("start a command"):
                async with asyncio.timeout(REQUEST_S):
                    await command.stream.__aenter__()
            command.opened()
        except BaseException:
            await to_the_end(command.give_up())  # it may have come further than we know
            raise
        return command

    async def end(self, group: int, mark: str) -> None:
        """End every process of a command; where that cannot be done, the container ends too."""
        if self.lost is not None:
            return
        try:
            async with asyncio.timeout(END_S):
                with reported("end a command"):
                    await self._kill(group, mark)
        except (SandboxError, TimeoutError) as error:
            self.lost = f"the container is gone, since a command in it could not be ended: {error}"
            with contextlib.suppress(SandboxError):
                await self.remove()

    async def remove(self) -> None:
        """Remove it, with all that runs in it.

        Raises:
            SandboxError: Docker did not do so.
        """
        self.lost = self.lost or "the container has been removed"
        if self._removing is None:
            self._removing = asyncio.ensure_future(self._remove())
        await to_the_end(self._removing)

    async def _remove(self) -> None:
        # First what we do not read any more: Docker waits for that to be read, for 10 s each.
        for command in list(self._commands):
            await close_stream(command.stream)
        try:
            with reported("remove the container"):
                async with asyncio.timeout(REQUEST_S):
                    await insist(self._delete)
        finally:
            # Without its lifeline, `cat` ends, and with that the container; Docker then removes it by itself.
            await close_stream(self._lifeline)
            await self._client.close()

    def forget(self, command: Command) -> None:
        """Let another command have its group."""
        self._commands.discard(command)

    def _free_group(self) -> int:
        taken = {command.group for command in self._commands}
        for number in itertools.islice(self._numbers, len(GROUPS)):
            if number not in taken:
                return number
        raise SandboxError(f"more than {len(GROUPS)} commands at once in one container")

    async def _kill(self, group: int, mark: str) -> None:
        # Not of the command's group: the shell above the command, at its end, ends what is.
        ending = ["sh", "-c", END, "sh", str(group), mark]
        execution = await self._container.exec(ending, user=f"{USER}:{USER}")
        stream = execution.start()
        try:
            while await stream.read_out() is not None:
                pass
        finally:
            await close_stream(stream)
        if await ended(execution):
            raise SandboxError("the shell that was to do so was ended itself")

    async def _delete(self) -> None:
        from aiodocker.exceptions import DockerError

        try:
            await self._container.delete(force=True, v=True)
        except DockerError as error:
            if error.status not in (404, 409):  # it is gone; it is going
                raise

    async def _give_up(self, making: asyncio.Future[DockerContainer]) -> None:
        await asyncio.wait([making])
        with contextlib.suppress(SandboxError):
            await self.remove()
        if not making.cancelled():
            making.exception()  # Python would complain about one that nobody looked at


class Command:
    """A command in a container, and the connection to its streams. Made by `Container.start`."""

    def __init__(self, container: Container, execution: Exec, group: int, mark: str) -> None:
        self.group = group
        self.stream: Stream = execution.start()
        self._container = container
        self._execution = execution
        self._mark = mark
        self._greeting = f"{mark}\n".encode()
        self._ended = False

    async def receive(self) -> tuple[int, bytes] | None:
        """Read some output, with the number of the stream it is from; None at the end.

        Raises:
            SandboxError: it did not start.
        """
        with reported("pass on the output of a command"):
            message = await self.stream.read_out()
        number, data = (STDOUT, b"") if message is None else message
        if number == STDOUT and self._greeting:
            if not data.startswith(self._greeting):
                self._ended |= bool(data)  # Docker says that it did not start; else there is no telling
                said = data.decode("utf-8", "replace").strip() or "the connection was cut"
                raise SandboxError(f"Docker could not start a command: {said}")
            data, self._greeting = data.removeprefix(self._greeting), b""
        return None if message is None else (number, data)

    def opened(self) -> None:
        """Note that the connection stands."""
        # Nothing waits in a buffer of ours: what `send` has sent, Docker has.
        self._transport = transport_of(self.stream)
        self._transport.set_write_buffer_limits(0)

    async def send(self, data: bytes) -> None:
        """Write to its stdin.

        Raises:
            EOFError: it has ended, or the connection has.
        """
        try:
            for start in range(0, len(data) or 1, CHUNK):
                await self._send(data[start : start + CHUNK])
        except (AssertionError, RuntimeError, OSError) as error:  # aiodocker asserts
            raise EOFError("the process reads no more") from error

    async def _send(self, data: bytes) -> None:
        # Not cancelled: aiohttp lets all that wait for the same room share a future.
        writing = asyncio.ensure_future(self.stream.write_in(data))
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        while not (await asyncio.wait([writing], timeout=STUCK_S))[0]:
            # Docker may have said its last, but take what we send no more: asyncio would wait for that.
            if self._transport.is_closing():
                self._transport.abort()
        writing.result()

    async def communicate(self, stdin: bytes | None, out: Take, err: Take) -> None:
        """Send its input and take its output, to the end of the latter."""
        sending = asyncio.ensure_future(self.send(stdin or b""))
        try:
            while (piece := await self.receive()) is not None:
                number, data = piece
                (err if number == STDERR else out)(data)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)  # it need not have read all of it

    async def cut_short(self, out: Take, err: Take) -> None:
        """End it, and take what output there still is."""
        # Docker does not note any end in a container while there is output that nobody reads: we must go on.
        ending = asyncio.ensure_future(self.end())
        try:
            async with asyncio.timeout(END_S):
                await self.communicate(None, out, err)
        except (SandboxError, TimeoutError):
            pass
        finally:
            await to_the_end(ending)

    async def give_up(self) -> None:
        """End it, and take no more output."""
        await close_stream(self.stream)
        await self.end()
        await self.close()

    async def code(self) -> int:
        """Give its exit code, negative for a signal, once its output has ended.

        Raises:
            SandboxError: it has none: what ended is the connection, or the container.
        """
        with reported("say how a command ended"):
            code = await ended(self._execution)
        if code > 128 and not self._ended:
            # What was killed is the command, or the shell that would have ended the rest, or the container.
            await to_the_end(self.end())
            if self._container.lost is not None:
                raise SandboxError(self._container.lost)
        self._ended = True
        return exit_or_signal(code)

    async def end(self) -> None:
        """End it and everything it started."""
        if not self._ended:
            self._ended = True
            await self._container.end(self.group, self._mark)

    async def close(self) -> None:
        """Let go of its streams."""
        await close_stream(self.stream)
        self._container.forget(self)
