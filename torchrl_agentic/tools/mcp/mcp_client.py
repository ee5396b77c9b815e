"""`MCPClient`: calls the tools of one MCP server, over a `Connection` that it opens again after a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, cast

import anyio
import anyio.abc
from mcp import ClientSession
from mcp.client.subscriptions import listen
from mcp.shared.dispatcher import ProgressFnT, coerce_request_id
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    PaginatedRequestParams,
    Tool,
    ToolListChangedNotification,
)
from mcp_types.jsonrpc import (
    CONNECTION_CLOSED,
    METHOD_NOT_FOUND,
    UNSUPPORTED_PROTOCOL_VERSION,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.limits.backoff import backoff_pause_s
from torchrl_agentic.messages import JSON
from torchrl_agentic.text import printable
from torchrl_agentic.tools.mcp.approval import canonical
from torchrl_agentic.tools.mcp.http_transport import Answers, sse, streamable_http
from torchrl_agentic.tools.mcp.message_reader import NO_RESPONSE, MessageReader
from torchrl_agentic.tools.mcp.server_config import MCPServerConfig, Transport
from torchrl_agentic.tools.mcp.stdio_transport import ServerReport, stdio
from torchrl_agentic.tools.schema import Validator

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Pause before the second try to reach a lost server, and the longest pause, in seconds."""
MAX_PAGES = 1000
MAX_EXTENSION = 10
"""How many times as long as its timeout a call may take that reports progress and has no other bound."""
_MAX_LISTINGS = 3  # for one call
_SHOWN = 1000
MAX_TOOLS = 1000
MAX_DEFINITION, MAX_DEFINITIONS = 1 << 18, 1 << 24
"""Most characters of JSON in the description of a tool, and of all tools of a server."""

_NO_ANSWER = (
    "SSE stream", "Server returned an error response", "Session terminated", "Unexpected content type",
    "server answered a request with 202", "Redirect to",
)  # fmt: skip
"""Beginnings of errors that the SDK creates if there is no response; servers use the same error codes."""
CLOSE_S = 8.0
"""Seconds that closing may take before it is cancelled."""
MAX_UNANSWERED = 100
"""Most requests of a server whose responses it has not read; no more messages are read from it then."""
UNREAD_S = 10.0
"""Seconds that a server may take then to read one of the responses."""


class MCPClient:
    """Calls the tools of a server over one connection, which all callers share.

    Args:
        config: The server.
        start_timeout: Seconds that it may take until it is ready, and again to list its tools.
        max_result_bytes: Most bytes of a response.
        changed: Called when its tools may have changed.
        seen: Called with each listing of its tools, and with the reason by name of those that are left out;
            returns the fingerprints by name.

    Attributes:
        restarts: Number of times that the server was lost and reached again.
    """

    def __init__(
        self,
        config: MCPServerConfig,
        *,
        start_timeout: float,
        max_result_bytes: int,
        changed: Callable[[], None],
        seen: Callable[[Sequence[Tool], Mapping[str, str]], Mapping[str, str]],
    ) -> None:
        self.config = config
        self.restarts = 0
        self.start_timeout = start_timeout
        self.max_result_bytes = max_result_bytes
        self._changed = changed
        self._seen = seen
        self._fingerprints: Mapping[str, str] = {}
        self._looked_at: Connection | None = None  # that of the last listing
        self._is_stale = True  # whether the tools may have changed since the last listing
        self._listing = asyncio.Lock()
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._tries = 0  # to connect, since the last successful call
        self._untold = False  # whether no result has reported the last loss

    @property
    def pid(self) -> int | None:
        """Process id of a running server that we started, or of its sandbox; None for other servers."""
        live = self._connection is not None and self._connection.is_live
        return self._connection.report.pid if live and self._connection is not None else None

    async def connection(self) -> Connection:
        """Return a live connection; concurrent callers share one try to connect.

        Raises:
            InfrastructureError: If the try failed.
        """
        if self._connection is not None and self._connection.is_live:
            return self._connection
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._connected)
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Connection:
        lost, self._connection = self._connection, None
        if lost is not None:
            self.restarts += 1
            self._untold = self._untold or not lost.told
            await lost.close()
        if self._tries:
            await asyncio.sleep(backoff_pause_s(self._tries, FIRST_PAUSE_S, LONGEST_PAUSE_S))
        self._tries += 1
        self._is_stale = True
        connection = Connection(self)
        await connection.open()
        self._connection = connection
        if self.restarts:
            self._changed()  # the server may have another version now
        return connection

    def tools_changed(self) -> None:
        """Note that the server has announced a change of its tools."""
        self._is_stale = True
        self._changed()

    def _connected(self, task: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # retrieved here, because all waiting callers may have been cancelled

    async def tools(self) -> list[Tool]:
        """List all tools, page by page.

        Raises:
            InfrastructureError: If the server is lost, does not respond in time, or lists too many tools.
        """
        async with self._listing:
            return await self._look()

    async def _look(self) -> list[Tool]:
        connection = await self.connection()
        self._is_stale = False  # before the listing, because the tools may change during it
        try:
            found = await self._listed(connection)
        except BaseException:
            self._is_stale = True
            raise
        left_out = connection.reader.left_out
        for definition in found:
            try:
                Validator(definition.input_schema)
            except ValueError as error:
                left_out[definition.name] = str(error)
        found = [definition for definition in found if definition.name not in left_out]
        self._fingerprints, self._looked_at = self._seen(found, left_out), connection
        return found

    async def _listed(self, connection: Connection) -> list[Tool]:
        size = 0
        found: list[Tool] = []
        cursor: str | None = None
        seen: set[str] = set()
        connection.reader.left_out = {}
        try:
            async with asyncio.timeout(self.start_timeout):
                for _ in range(MAX_PAGES):
                    params = PaginatedRequestParams(cursor=cursor) if cursor else None
                    page = await connection.session.list_tools(params=params)
                    size += self._size(page.tools)
                    found += page.tools
                    if len(found) > MAX_TOOLS or size > MAX_DEFINITIONS:
                        raise self._error(
                            f"lists more than {MAX_TOOLS:,} tools, or describes them with more than "
                            f"{MAX_DEFINITIONS:,} characters"
                        )
                    cursor = page.next_cursor
                    if cursor is None:
                        self._tries = 0
                        return found
                    if cursor in seen:
                        break
                    seen.add(cursor)
        except TimeoutError:
            raise self._error(f"did not list its tools within {self.start_timeout:g} s") from None
        except MCPError as error:
            refusal = self._error(f"does not list its tools: {self._shown(error.message)}")
            raise self._failure(connection, error) or refusal from error
        except ValidationError as error:
            raise self._garbage(error) from error
        raise self._error("sends an endless list of tools")

    def _size(self, tools: Sequence[Tool]) -> int:
        """Return the number of characters in the descriptions of some tools."""
        total = 0
        for tool in tools:
            size = len(canonical(tool))
            if size > MAX_DEFINITION:
                raise self._error(
                    f"describes its tool {tool.name[:_SHOWN]!r} with {size:,} characters; at most "
                    f"{MAX_DEFINITION:,} are allowed"
                )
            total += size
        return total

    async def call(
        self,
        name: str,
        args: Mapping[str, JSON],
        *,
        timeout: float | None,
        left_s: float | None = None,
        on_progress: ProgressFnT,
        progress_extends_timeout: bool = False,
        check: Callable[[str | None], None],
    ) -> tuple[CallToolResult, Sequence[str]]:
        """Call a tool.

        Args:
            name: The server's name of the tool.
            args: Arguments of the call.
            timeout: Seconds that the server may take to respond; None: no bound.
            left_s: Seconds until the call ends, with connecting if needed; None: no bound.
            on_progress: Called with the progress that the server reports.
            progress_extends_timeout: Whether `timeout` begins again with each progress, for `left_s` seconds
                at most, or `MAX_EXTENSION` times `timeout` if that is None.
            check: Called before the call with the fingerprint of the tool in the last listing, or None if it
                is not listed; its exceptions are raised.

        Returns:
            The server's result, and remarks for the model.

        Raises:
            ToolError: If the server refuses the call.
            TimeoutError: If there was no response in time; the call is cancelled on the server.
            InfrastructureError: If the server was lost, cannot be reached in time, or violates the protocol.
        """
        now = asyncio.get_running_loop().time
        until = None if left_s is None else now() + left_s
        try:
            async with asyncio.timeout_at(until):
                connection = await self._looked_at_connection()
        except TimeoutError:
            raise self._error(f"could not be reached within {left_s:.3g} s") from None
        check(self._fingerprints.get(name))
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(args)))
        begun = now()
        if until is None and timeout is not None:
            until = begun + (MAX_EXTENSION * timeout if progress_extends_timeout else timeout)

        def end() -> float | None:
            return until if timeout is None or until is None else min(now() + timeout, until)

        async def progressed(progress: float, total: float | None, message: str | None) -> None:
            if progress_extends_timeout:
                with contextlib.suppress(RuntimeError):  # the call has ended
                    bound.reschedule(end())
            await on_progress(progress, total, message)

        bound = asyncio.timeout_at(end())
        try:
            async with bound:
                # Not session.call_tool, which raises for a result that does not fit the tool's output schema,
                # while the model should see it.
                result = await connection.session.send_request(
                    request, CallToolResult, progress_callback=progressed
                )
        except TimeoutError:
            raise TimeoutError(f"no response within {(bound.when() or begun) - begun:.3g} s") from None
        except MCPError as error:
            lines = error.message.split("\n")
            raise self._failure(connection, error) or ToolError(
                "\n".join(map(printable, lines)), {"code": error.code, "data": error.data}
            ) from error
        except ValidationError as error:
            raise self._garbage(error) from error
        self._tries = 0
        return result, self._remarks()

    async def _looked_at_connection(self) -> Connection:
        """Return a live connection whose tools were listed, because tools may change after a restart.

        If the tools change during each listing, the server is called nevertheless.
        """
        for _ in range(_MAX_LISTINGS):
            connection = await self.connection()
            if not self._is_stale:
                return connection
            async with self._listing:
                if self._is_stale:  # no other waiting call has listed the tools
                    await self._look()
        if self._looked_at is None or not self._looked_at.is_live:
            raise self._error("was lost each time after it had listed its tools")
        return self._looked_at

    def _remarks(self) -> Sequence[str]:
        if not self._untold:
            return ()
        self._untold = False
        return (
            f"[the MCP server {self.config.name!r} was lost before this call and reached again; its state in "
            "memory is lost]",
        )

    def _failure(self, connection: Connection, error: MCPError) -> InfrastructureError | None:
        """Return the exception for a call without a response; None if the error is the server's response."""
        if error.data is NO_RESPONSE:
            return self._error(self._shown(error.message))
        is_closed = error.code == CONNECTION_CLOSED and error.message == "Connection closed"
        if connection.is_live and not is_closed and not error.message.startswith(_NO_ANSWER):
            return None
        if is_closed or not connection.is_live or error.message.startswith("SSE stream"):
            connection.lose(error.message)
            connection.told = True
            is_forgotten = connection.answers.forgotten
            how = "it no longer knows the session" if is_forgotten else self._shown(connection.reason)
            return self._error(
                f"was lost during the call ({how}); its state in memory is lost, and the next call restarts "
                "it or connects to it again"
            )
        return self._error(connection.answers.text() or self._shown(str(error)))

    def _error(self, what: str) -> InfrastructureError:
        return InfrastructureError(f"the MCP server {self.config.name!r} {what}")

    def _shown(self, text: str) -> str:
        """Return a text of the server for one of our messages, without secrets and control characters."""
        return printable(self.config.without_secrets(text))[:_SHOWN]

    def _garbage(self, error: ValidationError) -> InfrastructureError:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        where = self._shown(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        return self._error(f"violates the protocol: {where}")

    async def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class Connection:
    """A session with a server, which its own task opens and closes, as anyio requires.

    Calls may come from any task of the event loop.

    Args:
        client: Client of the server; its `tools_changed` is called when the server announces a change.

    Attributes:
        report: Facts about a server that we started, for messages.
        answers: Facts about the HTTP responses of a server, for messages.
        reader: Reads its messages.
        reason: Why the connection was lost; "" before.
        told: Whether a call has reported the loss.
    """

    def __init__(self, client: MCPClient) -> None:
        self.client, self.config = client, client.config
        self.report, self.answers, self.reader = (
            ServerReport(),
            Answers(),
            MessageReader(client.max_result_bytes),
        )
        self.reason = ""
        self.told = False
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
                        async with asyncio.timeout(self.client.start_timeout):
                            session = await stack.enter_async_context(self._begun(kind))
                    except TimeoutError:
                        raise TimeoutError(
                            f"it was not ready within {self.client.start_timeout:g} s"
                        ) from None
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
            transport = stdio(self.config, self.report, self.reader)
        else:
            transport = (sse if kind == "sse" else streamable_http)(self.config, self.answers, self.reader)
        requests = _ServerRequests()
        async with (
            transport as (read, write),
            ClientSession(
                _WatchedStream(read, self.reader, requests, self._read_to_the_end),
                _AnsweringStream(write, requests),
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
                        self.client.tools_changed()

        return asyncio.create_task(follow())

    async def _message(self, message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.client.tools_changed()
        elif isinstance(message, Exception):
            logger.debug("the MCP server %r: %r", self.config.name, message)

    def _read_to_the_end(self, reason: str) -> None:
        if self._session is not None:
            self.lose(reason)

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


class _ServerRequests:
    """The requests of a server that have no response yet, such as pings; the SDK starts a task for each."""

    def __init__(self) -> None:
        self._open: set[Any] = set()
        self._answered = asyncio.Event()

    async def received(self, message: object) -> None:
        """Note a message of the server; wait while too many requests have no response.

        Raises:
            EOFError: If the server does not read the responses, or uses the id of such a request again.
        """
        if isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self.closed((message.params or {}).get("requestId"))
        if not isinstance(message, JSONRPCRequest):
            return
        if (key := coerce_request_id(message.id)) in self._open:
            raise EOFError("it sent two requests with the same id")
        self._open.add(key)
        while len(self._open) > MAX_UNANSWERED:
            self._answered.clear()
            try:
                async with asyncio.timeout(UNREAD_S):
                    await self._answered.wait()
            except TimeoutError:
                raise EOFError(
                    f"it sent more than {MAX_UNANSWERED} requests and did not read the responses"
                ) from None

    def closed(self, request_id: object) -> None:
        """Note that a request has been answered, or needs no response."""
        if isinstance(request_id, int | str):
            self._open.discard(coerce_request_id(request_id))
            self._answered.set()


class _WatchedStream(anyio.abc.ObjectReceiveStream[Any]):
    """A stream of the server's messages, those for tickets included, with a bound on its requests.

    Args:
        stream: The stream.
        reader: Has the messages for tickets.
        requests: The requests of the server.
        ended: Called with the reason when it has ended; "" if it merely ended.
    """

    def __init__(
        self, stream: Any, reader: MessageReader, requests: _ServerRequests, ended: Callable[[str], None]
    ) -> None:
        self._stream, self._reader, self._requests, self._ended = stream, reader, requests, ended

    @property
    def last_context(self) -> Any:
        return getattr(self._stream, "last_context", None)

    async def receive(self) -> Any:
        try:
            item: Any = self._reader.tickets.redeemed(await self._stream.receive())
            await self._requests.received(getattr(item, "message", None))
        except EOFError as error:
            self._ended(str(error))
            raise anyio.EndOfStream from None
        except BaseException:
            self._ended("")
            raise
        return item

    async def aclose(self) -> None:
        await self._stream.aclose()


class _AnsweringStream(anyio.abc.ObjectSendStream[Any]):
    """A stream of messages to the server, which notes the responses to its requests."""

    def __init__(self, stream: Any, requests: _ServerRequests) -> None:
        self._stream, self._requests = stream, requests

    async def send(self, item: Any) -> None:
        await self._stream.send(item)
        if isinstance(item.message, JSONRPCResponse | JSONRPCError):
            self._requests.closed(item.message.id)

    async def aclose(self) -> None:
        await self._stream.aclose()
