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
from torchrl_agentic.text import printable
from torchrl_agentic.tools.mcp.approval import canonical
from torchrl_agentic.tools.mcp.connection import Connection
from torchrl_agentic.tools.mcp.server_config import MCPServerConfig, too_large

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
"""Before the second try to reach a server that was lost, and before any."""
MAX_PAGES = 1000
_MOST_LOOKS = 3  # for one call
_SHOWN = 1000
MAX_TOOLS = 1000
MAX_DEFINITION, MAX_DEFINITIONS = 1 << 18, 1 << 24
"""The most characters of what a server says of a tool, as JSON, and of all its tools."""

_RESULT: TypeAdapter[CallToolResult | InputRequiredResult] = TypeAdapter(CallToolResult | InputRequiredResult)
_NO_ANSWER = (
    "SSE stream", "Server returned an error response", "Session terminated", "Unexpected content type",
    "Failed to parse JSON response",
)  # fmt: skip
"""How errors begin that the SDK makes itself where no answer came; servers give theirs by the same codes."""
_TOO_LARGE = (
    "SSE stream failed: Server-sent event exceeded",
    "Failed to parse JSON response: the answer has more",
)


class Client:
    """A server, and the one connection with it that all who call share.

    restarts: how often it was lost and reached again.

    Args:
        config: The server.
        start_timeout: Seconds that it may take until it is ready, and again to list its tools.
        max_result_bytes: The most bytes of an answer.
        changed: Called when its tools may be others now.
        seen: Called with each listing of its tools; returns their fingerprints by name.
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
        self._looked_at: Connection | None = None  # which they are of
        self._is_stale = True  # whether its tools may be others than they were listed
        self._listing = asyncio.Lock()
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
            self._changed()  # it may be another version of it
        return connection

    def _told(self) -> None:
        self._is_stale = True
        self._changed()

    def _connected(self, task: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # looked at, also where all who waited for it are gone

    async def tools(self) -> list[Tool]:
        """List all tools, page by page.

        Raises:
            InfrastructureError: the server is lost, does not answer in time, never comes to an end, or says
                more than is taken.
        """
        async with self._listing:
            return await self._look()

    async def _look(self) -> list[Tool]:
        connection = await self.connection()
        self._is_stale = False  # before what it says from now on
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
                            f"says more than {MAX_DEFINITIONS:,} characters of them"
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
        raise InfrastructureError(f"the MCP server {self.config.name!r} lists its tools without end")

    def _size(self, tools: Sequence[Tool]) -> int:
        """Count the characters of what a server says of some tools."""
        total = 0
        for tool in tools:
            size = len(canonical(tool))
            if size > MAX_DEFINITION:
                raise InfrastructureError(
                    f"the MCP server {self.config.name!r} says {size:,} characters of its tool "
                    f"{tool.name[:_SHOWN]!r}, and at most {MAX_DEFINITION:,} are taken"
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
            name: Name of the tool, as the server has it.
            args: Its arguments.
            timeout: Seconds that the server may take to answer; None: no bound.
            left_s: Seconds until the call ends, with connecting where that is needed; None: no bound.
            on_progress: Called with what the server says meanwhile.
            check: Called before, with the fingerprint of the tool as the server lists it now; None if it does
                not list it. What it raises is raised.

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
                connection = await self._looked_at_connection()
        except TimeoutError:
            raise InfrastructureError(
                f"the MCP server {self.config.name!r} cannot be connected to within {left_s:.3g} s"
            ) from None
        if until is not None:
            left_s = until - asyncio.get_running_loop().time()
            timeout = left_s if timeout is None else min(timeout, left_s)
        check(self._fingerprints.get(name))
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
            if error.message.startswith(_TOO_LARGE):
                raise ToolError(too_large(None, self._max_result_bytes)) from error
            raise self._failure(connection, error) or ToolError(
                error.message, {"code": error.code, "data": error.data}
            ) from error
        except ValidationError as error:
            raise self._garbage(error) from error
        self._tries = 0
        if isinstance(result, InputRequiredResult):
            raise ToolError("the tool asks for more input from a user, and there is none here")
        return result, self._news()

    async def _looked_at_connection(self) -> Connection:
        """Give a live connection, after a look at its tools: those of one that was lost may be others.

        A server that says with each listing that its tools are others now is called all the same.
        """
        for _ in range(_MOST_LOOKS):
            connection = await self.connection()
            if not self._is_stale:
                return connection
            async with self._listing:
                if self._is_stale:  # none of the others that waited has looked
                    await self._look()
        if self._looked_at is None or not self._looked_at.is_live:
            raise InfrastructureError(
                f"the MCP server {self.config.name!r} was lost each time that its tools had been listed"
            )
        return self._looked_at

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
            f"the MCP server {self.config.name!r} {connection.answers.text() or self._shown(str(error))}"
        )

    def _how(self, connection: Connection) -> str:
        if connection.answers.forgotten:
            return "it knows the session no more"
        return self._shown(connection.reason)

    def _shown(self, text: str) -> str:
        """Give a text of the server for a message of ours."""
        return printable(self.config.without_secrets(text))[:_SHOWN]

    def _garbage(self, error: ValidationError) -> InfrastructureError:
        first: Any = error.errors(include_url=False, include_input=False)[0]
        said = self._shown(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        return InfrastructureError(
            f"the MCP server {self.config.name!r} answered against the protocol: {said}"
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
