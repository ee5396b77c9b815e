"""`Client`: calls the tools of one MCP server, and connects to it again after it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    InputRequiredResult,
    PaginatedRequestParams,
    Tool,
)
from mcp_types.jsonrpc import CONNECTION_CLOSED
from pydantic import TypeAdapter, ValidationError

from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.limits.backoff import backoff_pause_s
from torchrl_agentic.messages import JSON
from torchrl_agentic.text import printable
from torchrl_agentic.tools.mcp.approval import canonical
from torchrl_agentic.tools.mcp.connection import Connection
from torchrl_agentic.tools.mcp.server_config import MCPServerConfig, too_large

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Pause before the second try to reach a lost server, and the longest pause, in seconds."""
MAX_PAGES = 1000
_MAX_LISTINGS = 3  # for one call
_SHOWN = 1000
MAX_TOOLS = 1000
MAX_DEFINITION, MAX_DEFINITIONS = 1 << 18, 1 << 24
"""Most characters of JSON in the description of a tool, and of all tools of a server."""

_RESULT: TypeAdapter[CallToolResult | InputRequiredResult] = TypeAdapter(CallToolResult | InputRequiredResult)
_NO_ANSWER = (
    "SSE stream", "Server returned an error response", "Session terminated", "Unexpected content type",
    "Failed to parse JSON response",
)  # fmt: skip
"""Beginnings of errors that the SDK creates if there is no response; servers use the same error codes."""
_TOO_LARGE = (
    "SSE stream failed: Server-sent event exceeded",
    "Failed to parse JSON response: the response has more",
)


class Client:
    """Calls the tools of a server over one connection, which all callers share.

    Args:
        config: The server.
        start_timeout: Seconds that it may take until it is ready, and again to list its tools.
        max_result_bytes: Most bytes of a response.
        changed: Called when its tools may have changed.
        seen: Called with each listing of its tools; returns their fingerprints by name.

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
        seen: Callable[[Sequence[Tool]], Mapping[str, str]],
    ) -> None:
        self.config = config
        self.restarts = 0
        self._start_timeout = start_timeout
        self._max_result_bytes = max_result_bytes
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
        connection = Connection(
            self.config,
            start_timeout=self._start_timeout,
            max_result_bytes=self._max_result_bytes,
            changed=self._told,
        )
        await connection.open()
        self._connection = connection
        if self.restarts:
            self._changed()  # the server may have another version now
        return connection

    def _told(self) -> None:
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
        self._fingerprints, self._looked_at = self._seen(found), connection
        return found

    async def _listed(self, connection: Connection) -> list[Tool]:
        size = 0
        found: list[Tool] = []
        cursor: str | None = None
        seen: set[str] = set()
        try:
            async with asyncio.timeout(self._start_timeout):
                for _ in range(MAX_PAGES):
                    params = PaginatedRequestParams(cursor=cursor) if cursor else None
                    page = await connection.session.list_tools(params=params)
                    size += self._size(page.tools)
                    found += page.tools
                    if len(found) > MAX_TOOLS or size > MAX_DEFINITIONS:
                        raise InfrastructureError(
                            f"the MCP server {self.config.name!r} lists more than {MAX_TOOLS:,} tools, or "
                            f"describes them with more than {MAX_DEFINITIONS:,} characters"
                        )
                    cursor = page.next_cursor
                    if cursor is None:
                        self._tries = 0
                        return found
                    if cursor in seen:
                        break
                    seen.add(cursor)
        except TimeoutError:
            what = f"did not list its tools within {self._start_timeout:g} s"
            raise InfrastructureError(f"the MCP server {self.config.name!r} {what}") from None
        except MCPError as error:
            raise self._failure(connection, error) or InfrastructureError(
                f"the MCP server {self.config.name!r} does not list its tools: {self._shown(error.message)}"
            ) from error
        except ValidationError as error:
            raise self._garbage(error) from error
        raise InfrastructureError(f"the MCP server {self.config.name!r} sends an endless list of tools")

    def _size(self, tools: Sequence[Tool]) -> int:
        """Return the number of characters in the descriptions of some tools."""
        total = 0
        for tool in tools:
            size = len(canonical(tool))
            if size > MAX_DEFINITION:
                raise InfrastructureError(
                    f"the MCP server {self.config.name!r} describes its tool {tool.name[:_SHOWN]!r} with "
                    f"{size:,} characters; at most {MAX_DEFINITION:,} are allowed"
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
        check: Callable[[str | None], None],
    ) -> tuple[CallToolResult, Sequence[str]]:
        """Call a tool.

        Args:
            name: The server's name of the tool.
            args: Arguments of the call.
            timeout: Seconds that the server may take to respond; None: no bound.
            left_s: Seconds until the call ends, with connecting if needed; None: no bound.
            on_progress: Called with the progress that the server reports.
            check: Called before the call with the fingerprint of the tool in the last listing, or None if it
                is not listed; its exceptions are raised.

        Returns:
            The server's result, and remarks for the model.

        Raises:
            ToolError: If the server refuses the call.
            TimeoutError: If there was no response in time; the call is cancelled on the server.
            InfrastructureError: If the server was lost, cannot be reached in time, or violates the protocol.
        """
        until = None if left_s is None else asyncio.get_running_loop().time() + left_s
        try:
            async with asyncio.timeout_at(until):
                connection = await self._looked_at_connection()
        except TimeoutError:
            raise InfrastructureError(
                f"the MCP server {self.config.name!r} could not be reached within {left_s:.3g} s"
            ) from None
        if until is not None:
            left_s = until - asyncio.get_running_loop().time()
            timeout = left_s if timeout is None else min(timeout, left_s)
        check(self._fingerprints.get(name))
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(args)))
        try:
            async with asyncio.timeout(timeout):
                # Not session.call_tool, which raises for a result that does not fit the tool's output schema,
                # while the model should see it.
                result = await connection.session.send_request(
                    request, _RESULT, progress_callback=on_progress
                )
        except TimeoutError:
            raise TimeoutError(f"no response within {timeout:.3g} s") from None
        except MCPError as error:
            if error.message.startswith(_TOO_LARGE):
                raise ToolError(too_large(None, self._max_result_bytes)) from error
            raise self._failure(connection, error) or ToolError(
                error.message, {"code": error.code, "data": error.data}
            ) from error
        except ValidationError as error:
            raise self._garbage(error) from error
        self._tries = 0
        if isinstance(result, InputRequiredResult):
            raise ToolError("the tool needs input from a user, which is not available; call it differently")
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
            raise InfrastructureError(
                f"the MCP server {self.config.name!r} was lost each time after it had listed its tools"
            )
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
        is_closed = error.code == CONNECTION_CLOSED and error.message == "Connection closed"
        if connection.is_live and not is_closed and not error.message.startswith(_NO_ANSWER):
            return None
        if is_closed or not connection.is_live or error.message.startswith("SSE stream"):
            connection.lose(error.message)
            connection.told = True
            return InfrastructureError(
                f"the MCP server {self.config.name!r} was lost during the call ({self._how(connection)}); "
                "its state in memory is lost, and the next call restarts it or connects to it again"
            )
        return InfrastructureError(
            f"the MCP server {self.config.name!r} {connection.answers.text() or self._shown(str(error))}"
        )

    def _how(self, connection: Connection) -> str:
        if connection.answers.forgotten:
            return "it no longer knows the session"
        return self._shown(connection.reason)

    def _shown(self, text: str) -> str:
        """Return a text of the server for one of our messages, without secrets and control characters."""
        return printable(self.config.without_secrets(text))[:_SHOWN]

    def _garbage(self, error: ValidationError) -> InfrastructureError:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        where = self._shown(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        return InfrastructureError(f"the MCP server {self.config.name!r} violates the protocol: {where}")

    async def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
