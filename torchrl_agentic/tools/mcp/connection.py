"""`Connection`: one session with an MCP server, which one task opens and closes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Self, cast

from mcp import ClientSession
from mcp.client.subscriptions import listen
from mcp.shared.exceptions import MCPError
from mcp_types import Implementation, ToolListChangedNotification
from mcp_types.jsonrpc import METHOD_NOT_FOUND, UNSUPPORTED_PROTOCOL_VERSION
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.text import printable
from torchrl_agentic.tools.mcp.http_transport import Answers, sse, streamable_http
from torchrl_agentic.tools.mcp.server_config import MCPServerConfig, Transport
from torchrl_agentic.tools.mcp.stdio_transport import Report, stdio

logger = logging.getLogger(__name__)

CLOSE_S = 8.0
"""Seconds that closing may take before it is cancelled."""
_SHOWN = 1000


class Connection:
    """A session with a server, which its own task opens and closes, as anyio requires.

    Calls may come from any task of the event loop.

    Args:
        config: The server.
        start_timeout: Seconds that the server may take until it is ready.
        max_result_bytes: Most bytes of a response.
        changed: Called when the server announces that its tools have changed.

    Attributes:
        report: Facts about a server that we started, for messages.
        answers: Facts about the HTTP responses of a server, for messages.
        reason: Why the connection was lost; "" before.
        told: Whether a call has reported the loss.
    """

    def __init__(
        self,
        config: MCPServerConfig,
        *,
        start_timeout: float,
        max_result_bytes: int,
        changed: Callable[[], None],
    ) -> None:
        self.config = config
        self.start_timeout = start_timeout
        self.max_result_bytes = max_result_bytes
        self.report, self.answers = Report(), Answers()
        self.reason = ""
        self.told = False
        self._changed = changed
        self._session: ClientSession | None = None
        self._is_ready = asyncio.Event()
        self._over = asyncio.Event()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_live(self) -> bool:
        """True while calls can be made."""
        return self._session is not None and not self._over.is_set() and not self.answers.forgotten

    @property
    def session(self) -> ClientSession:
        """The SDK's session, which makes the calls."""
        assert self._session is not None
        return self._session

    async def open(self) -> None:
        """Start the server, or connect to it.

        Raises:
            InfrastructureError: If that fails; the message has the reason and the output of the server.
        """
        self._task = asyncio.create_task(self._own(), name=f"MCP server {self.config.name}")
        self._task.add_done_callback(self._ended)
        try:
            await self._is_ready.wait()
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait((self._task,))
            raise
        if self._session is None:
            await asyncio.wait((self._task,))
            raise InfrastructureError(self._why()) from self._failure

    async def close(self) -> None:
        """End the session, and the server if we started it."""
        self._is_closing = True
        self._over.set()
        if self._task is None:
            return
        _, pending = await asyncio.wait((self._task,), timeout=CLOSE_S)
        if pending:
            logger.error("closing the MCP server %r took over %g s", self.config.name, CLOSE_S)
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=CLOSE_S)

    def lose(self, reason: str = "") -> None:
        """Mark the connection as lost.

        Args:
            reason: Why it was lost, unless the server's end is known.
        """
        if not self._over.is_set():
            self.reason = self.report.how or reason or "the connection was closed"
            self._over.set()
            if self._session is not None and not self._is_closing:
                logger.warning("the MCP server %r was lost: %s", self.config.name, self._lost())

    async def _own(self) -> None:
        kinds = list(self.config.kinds)
        while kinds:
            kind = kinds.pop(0)
            try:
                async with contextlib.AsyncExitStack() as stack:
                    try:
                        async with asyncio.timeout(self.start_timeout):
                            session = await stack.enter_async_context(self._begun(kind))
                    except TimeoutError:
                        raise TimeoutError(f"it was not ready within {self.start_timeout:g} s") from None
                    self._session = session
                    self._is_ready.set()
                    await self._over.wait()
            except BaseException as error:
                self._failure = error
                if asyncio.current_task().cancelling():  # pyright: ignore[reportOptionalMemberAccess]
                    raise  # we cancelled the task; anyio's own cancellation ends as an error
                if self._session is None and kinds and self.answers.is_refusal:
                    self.answers = Answers()
                    continue
            return

    @contextlib.asynccontextmanager
    async def _begun(self, kind: Transport) -> AsyncGenerator[ClientSession]:
        transport: Any
        if kind == "stdio":
            transport = stdio(self.config, self.report, self.max_result_bytes)
        else:
            transport = (sse if kind == "sse" else streamable_http)(
                self.config, self.answers, self.max_result_bytes
            )
        async with (
            transport as (read, write),
            ClientSession(
                _Watched(read, self._read_to_the_end),
                write,
                message_handler=self._message,
                client_info=Implementation(name="torchrl-agentic", version="1"),
            ) as session,
        ):
            await shake_hands(session)
            listening = self._listening(session)
            try:
                yield session
            finally:
                if listening is not None:
                    listening.cancel()

    def _listening(self, session: ClientSession) -> asyncio.Task[None] | None:
        """Subscribe to changes of the tools, if the protocol requires that."""
        if session.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            return None
        offered = session.server_capabilities
        if offered is None or offered.tools is None or not offered.tools.list_changed:
            return None

        async def follow() -> None:
            with contextlib.suppress(MCPError, RuntimeError, TimeoutError):
                async with listen(session, tools_list_changed=True) as changes:
                    async for _ in changes:
                        self._changed()

        return asyncio.create_task(follow())

    async def _message(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._changed()
        elif isinstance(message, Exception):
            logger.debug("the MCP server %r: %r", self.config.name, message)

    def _read_to_the_end(self) -> None:
        if self._session is not None:
            self.lose()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception() or self._failure
        self.lose("" if error is None else str(_first(error)))
        self._is_ready.set()

    def _why(self) -> str:
        """Return the message for a server that did not start."""
        error = _first(self._failure) if self._failure is not None else None
        if isinstance(error, InfrastructureError):
            return str(error)
        if self.report.how and not isinstance(error, TimeoutError):
            what = f"ended before it was ready ({self.report.how})"
        else:
            shown = printable(self.config.without_secrets(str(error)))[:_SHOWN] or type(error).__name__
            what = f"cannot be used: {', '.join(filter(None, (shown, self.answers.text())))}"
        return self.config.without_secrets(
            f"the MCP server {self.config.name!r} {what}: {self.config.shown}{self._printed()}"
        )

    def _lost(self) -> str:
        return printable(self.config.without_secrets(self.reason))[:_SHOWN] + self._printed()

    def _printed(self) -> str:
        printed = self.report.text(self.config)
        return f"; {printed}" if printed else ""


async def shake_hands(session: ClientSession) -> None:
    """Agree on a protocol version.

    Tries `initialize` first, which nearly all servers know and which opens a session over HTTP. A server that
    refuses it speaks a version from 2026 on.
    """
    try:
        await session.initialize()
    except MCPError as error:
        if error.code not in (UNSUPPORTED_PROTOCOL_VERSION, METHOD_NOT_FOUND):
            raise
        try:
            await session.discover()
        except MCPError:
            raise error from None


def _first(error: BaseException) -> BaseException:
    """Return the first exception of a group, because task groups wrap exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


class _Watched:
    """A stream of messages that calls a function when it has ended."""

    def __init__(self, stream: Any, ended: Callable[[], None]) -> None:
        self._stream = stream
        self._ended = ended

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        return await self._stream.receive()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except BaseException:
            self._ended()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._stream.__aexit__(exc_type, exc_val, exc_tb)
