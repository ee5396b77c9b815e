"""A server as its tools see it: connected to when it is needed, and again when it was lost."""

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
from torchrl_agentic.messages import JSON
from torchrl_agentic.tools.mcp.config import MCPServerConfig
from torchrl_agentic.tools.mcp.connection import Connection

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Before the second try to reach a server that was lost, and before any."""
MAX_PAGES = 1000

_RESULT: TypeAdapter[CallToolResult | InputRequiredResult] = TypeAdapter(CallToolResult | InputRequiredResult)
_NO_ANSWER = (
    "SSE stream", "Server returned an error response", "Session terminated", "Unexpected content type",
    "Failed to parse JSON response",
)  # fmt: skip
"""How errors begin that the SDK makes itself where no answer came; servers give theirs by the same codes."""


class Client:
    """A server, and the one connection with it that all who call share.

    restarts: how often it was lost and reached again. changed: called when its tools may be others now.
    """

    def __init__(self, config: MCPServerConfig, *, start_timeout: float, changed: Callable[[], None]) -> None:
        self.config = config
        self.restarts = 0
        self._start_timeout = start_timeout
        self._changed = changed
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._tries = 0  # since a call went well
        self._untold = False

    @property
    def pid(self) -> int | None:
        """The process of a server that we started and that runs; of a sandbox, the outermost one."""
        live = self._connection is not None and self._connection.is_live
        return self._connection.report.pid if live and self._connection is not None else None

    async def connection(self) -> Connection:
        """Give a live connection; many may wait for one try.

        Raises:
            InfrastructureError: there is none to be had now.
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
        await asyncio.sleep(pause_s(self._tries))
        self._tries += 1
        connection = Connection(self.config, start_timeout=self._start_timeout, changed=self._changed)
        await connection.open()
        self._connection = connection
        if self.restarts:
            self._changed()  # it may be another version of it
        return connection

    def _connected(self, task: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # looked at, also where all who waited for it are gone

    async def tools(self) -> list[Tool]:
        """List all tools, page by page.

        Raises:
            InfrastructureError: the server is lost, does not answer in time, or never comes to an end.
        """
        connection = await self.connection()
        found: list[Tool] = []
        cursor: str | None = None
        seen: set[str] = set()
        try:
            async with asyncio.timeout(self._start_timeout):
                for _ in range(MAX_PAGES):
                    params = PaginatedRequestParams(cursor=cursor) if cursor else None
                    page = await connection.session.list_tools(params=params)
                    found += page.tools
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
                f"the MCP server {self.config.name!r} does not list its tools: {error.message}"
            ) from error
        except ValidationError as error:
            raise self._garbage(error) from error
        raise InfrastructureError(f"the MCP server {self.config.name!r} lists its tools without end")

    async def call(
        self,
        name: str,
        args: Mapping[str, JSON],
        *,
        timeout: float | None,
        left_s: float | None = None,
        on_progress: ProgressFnT,
    ) -> tuple[CallToolResult, Sequence[str]]:
        """Call a tool.

        Args:
            name: Name of the tool, as the server has it.
            args: Its arguments.
            timeout: Seconds that the server may take to answer; None: no bound.
            left_s: Seconds until the call ends, with connecting where that is needed; None: no bound.
            on_progress: Called with what the server says meanwhile.

        Returns:
            What the server answered, and what the model should be told besides.

        Raises:
            ToolError: The server refuses the call.
            TimeoutError: There was no answer in time; the server was told that nobody waits any more.
            InfrastructureError: The server was lost, cannot be connected to in time, or does not keep to the
                protocol.
        """
        until = None if left_s is None else asyncio.get_running_loop().time() + left_s
        try:
            async with asyncio.timeout_at(until):
                connection = await self.connection()
        except TimeoutError:
            raise InfrastructureError(
                f"the MCP server {self.config.name!r} cannot be connected to within {left_s:.3g} s"
            ) from None
        if until is not None:
            left_s = until - asyncio.get_running_loop().time()
            timeout = left_s if timeout is None else min(timeout, left_s)
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(args)))
        try:
            async with asyncio.timeout(timeout):
                # Not session.call_tool: that makes an error of a result that is other than the tool's schema
                # says, which the model should see.
                result = await connection.session.send_request(
                    request, _RESULT, progress_callback=on_progress
                )
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:.3g} s") from None
        except MCPError as error:
            raise self._failure(connection, error) or ToolError(
                error.message, {"code": error.code, "data": error.data}
            ) from error
        except ValidationError as error:
            raise self._garbage(error) from error
        self._tries = 0
        if isinstance(result, InputRequiredResult):
            raise ToolError("the tool asks for more input from a user, and there is none here")
        return result, self._news()

    def _news(self) -> Sequence[str]:
        if not self._untold:
            return ()
        self._untold = False
        return (
            f"[the MCP server {self.config.name!r} was lost before this call, and connected to anew: what it "
            "held in memory is gone]",
        )

    def _failure(self, connection: Connection, error: MCPError) -> InfrastructureError | None:
        """Say that there was no answer; None: the error is the server's answer."""
        is_closed = error.code == CONNECTION_CLOSED and error.message == "Connection closed"
        if connection.is_live and not is_closed and not error.message.startswith(_NO_ANSWER):
            return None
        if is_closed or not connection.is_live or error.message.startswith("SSE stream"):
            connection.lose(error.message)
            connection.told = True
            return InfrastructureError(
                f"the MCP server {self.config.name!r} was lost during the call ({self._how(connection)}); "
                "what it held in memory is gone, and the next call starts or connects to it anew"
            )
        return InfrastructureError(
            f"the MCP server {self.config.name!r} {connection.answers.text() or error}"
        )

    def _how(self, connection: Connection) -> str:
        if connection.answers.forgotten:
            return "it knows the session no more"
        return self.config.without_secrets(connection.reason)

    def _garbage(self, error: ValidationError) -> InfrastructureError:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return InfrastructureError(
            f"the MCP server {self.config.name!r} answered against the protocol: {where}: {first['msg']}"
        )

    async def close(self) -> None:
        """End the connection; a later call makes a new one."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


def pause_s(tries: int) -> float:
    """Say how long to wait before the next try, after some that led to no good call; none after none."""
    return 0.0 if tries == 0 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(tries - 1, 16))
