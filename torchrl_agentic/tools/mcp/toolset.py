"""`MCPToolset`: the tools of one MCP server, under names that models can write."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, cast, get_args

from torchrl_agentic.errors import InfrastructureError, MissingExtra, check_count, check_seconds
from torchrl_agentic.limits import Limiter
from torchrl_agentic.limits.process_bound import ProcessBound
from torchrl_agentic.text import nearest, printable
from torchrl_agentic.tools.base import Effects, Tool, Toolset
from torchrl_agentic.tools.mcp.approval import Approval, OnChange
from torchrl_agentic.tools.mcp.mcp_tool import MCPProgress, MCPTool, SessionMCPTool
from torchrl_agentic.tools.mcp.server_config import MAX_RESULT_BYTES, MCPServerConfig
from torchrl_agentic.tools.per_trajectory import PerTrajectory, Users

if TYPE_CHECKING:
    import mcp_types

    from torchrl_agentic.tools.mcp.mcp_client import MCPClient

MAX_NAME = 64
"""Longest tool name that model APIs accept, in characters."""
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


def clean(name: str) -> str:
    """Return a name of letters, digits, _ and -; a long name is cut and ends with a digest of it."""
    fit = _UNFIT.sub("_", name) or "_"
    if len(fit) <= MAX_NAME:
        return fit
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{fit[: MAX_NAME - 9]}_{digest}"


def shown_names(names: Iterable[str], prefix: str = "") -> dict[str, str]:
    """Return the names that models see, by the server's names.

    Equal results are numbered from the second one on; a name that needs no cleaning is never numbered.

    Args:
        names: The server's names.
        prefix: Prefix of the names that models see.
    """
    ordered = list(dict.fromkeys(names))
    taken = {prefix + name for name in ordered if clean(prefix + name) == prefix + name}
    shown: dict[str, str] = {}
    for name in ordered:
        wanted = found = clean(prefix + name)
        count = 1
        while found != prefix + name and found in taken:
            count += 1
            found = f"{wanted[: MAX_NAME - 4]}_{count}"
        taken.add(found)
        shown[name] = found
    return shown


_SHOWN = 2000


class MCPToolset(Toolset):
    """The tools of one MCP server, for `ToolCompose.add_toolset`.

    After a server announces that its tools have changed, they are listed again at the next step or reset. If
    a server is lost, the running calls get INFRA results; the next call starts the server or connects to it
    again, and its result tells the model that the server's state is lost.

    Args:
        config: The server.
        name_prefix: Prefix of each name, needed if two servers have tools of one name. Characters that models
            cannot write in a name become "_".
        request_timeout: Seconds that the server may take for a call after it was sent; None: no bound.
            The `per_call_timeout` of the ToolCompose bounds the call too.
        start_timeout: Seconds that the server may take to start, and again to list its tools.
        tools: Names of the tools to offer, as the server has them; None: all.
        sessions: "shared": one connection for this process; "trajectory": one for each trajectory that
            calls, so that trajectories do not share the server's memory. Over HTTP that needs a server with
            sessions.
        limiter: Limiter of the calls of all its tools; share it with other users of the same server.
        effects: Effects of each of its tools; None: a tool that the server declares read-only reads
            "mcp:<name>", any other writes it, so that calls of one trajectory keep their order unless all of
            them only read.
        on_progress: Called on the event loop with the progress of running calls.
        progress_extends_timeout: Whether `request_timeout` begins again each time the server reports progress
            of the call. The `per_call_timeout` still bounds the call; a call without a deadline may take ten
            times as long.
        max_result_bytes: Most bytes of JSON in a response; a larger one becomes an ERROR result.
        on_change: Treatment of a tool whose description, schemas or annotations differ from the first
            listing, also after a restart of the server and in the server of another trajectory. "warn": log
            it once, and add a note to each result. "refuse": give calls INFRA results, show the model the
            tool as it was, name included, and offer no new tools.
        fingerprints: Fingerprints of an earlier run, `toolset.fingerprints`, to compare with instead of the
            first listing. With "refuse", `setup` raises if one differs.

    Raises:
        MissingExtra: If the MCP SDK is not installed.
        TypeError: If an argument has a wrong type.
        ValueError: If an argument has a wrong value.
    """

    def __init__(
        self,
        config: MCPServerConfig,
        *,
        name_prefix: str = "",
        request_timeout: float | None = 30.0,
        start_timeout: float = 30.0,
        tools: Sequence[str] | None = None,
        sessions: Literal["shared", "trajectory"] = "shared",
        limiter: Limiter | None = None,
        effects: Effects | None = None,
        on_progress: Callable[[MCPProgress], None] | None = None,
        progress_extends_timeout: bool = False,
        max_result_bytes: int = MAX_RESULT_BYTES,
        on_change: OnChange = "warn",
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise MissingExtra("MCPToolset", "mcp", "mcp")
        if not isinstance(cast("object", config), MCPServerConfig):
            raise TypeError(
                f"expected an MCPServerConfig, e.g. MCPServerConfig('npx', ['-y', 'some-server']); got "
                f"{type(config).__name__}; mcp_servers(...) reads a file of servers"
            )
        if isinstance(tools, str):
            raise TypeError(f"expected tools as a list of names: tools=[{tools!r}]")
        if sessions not in ("shared", "trajectory"):
            raise ValueError(f"expected sessions 'shared' or 'trajectory'; got {sessions!r}")
        if on_change not in get_args(OnChange):
            raise ValueError(f"expected on_change 'warn' or 'refuse'; got {on_change!r}")
        if not isinstance(cast("object", fingerprints), Mapping | None):
            raise TypeError(f"expected fingerprints as {{tool: fingerprint}}; got {fingerprints!r:.80}")
        check_count("max_result_bytes", max_result_bytes, optional=False)
        for what, seconds in (("request_timeout", request_timeout), ("start_timeout", start_timeout)):
            check_seconds(what, seconds)
        self.config = config
        self.name_prefix = name_prefix
        self.request_timeout, self.start_timeout = request_timeout, start_timeout
        self.selected = None if tools is None else tuple(tools)
        self.sessions: Literal["shared", "trajectory"] = sessions
        self.limiter = limiter
        self.effects = effects
        self.on_progress = on_progress
        self.progress_extends_timeout = progress_extends_timeout
        self.max_result_bytes = int(max_result_bytes)
        self.on_change: OnChange = on_change
        self.approval = Approval(config.name, on_change, self.selected, fingerprints)
        self.revision = 0
        self._tools: dict[str, MCPTool] = {}  # by the server's names
        self._offered: tuple[int, tuple[MCPTool, ...]] = (-1, ())
        self._state = ProcessBound[_Connections]()

    async def setup(self) -> Sequence[Tool]:
        """Connect, and return the tools that the server offers.

        Raises:
            InfrastructureError: If the server cannot be started or reached, or does not speak MCP; the
                message has its command, its exit status, and the last lines of its stderr.
            ValueError: If one of `tools` does not exist, or differs from `fingerprints` and is refused.
        """
        self._connections().users.join()
        try:
            found = await self._listed()
            self._check_selected(found)
            self.approval.check_pinned(found)
        except BaseException:
            await self.teardown()
            raise
        self._offered = (self.revision, self._tools_of(found))
        return self._offered[1]

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools of the last listing; empty while the server is not connected."""
        return self._offered[1]

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Digest of each tool's description at its approval; empty before `setup`."""
        return dict(self.approval.fingerprints or {})

    async def open(self) -> None:
        """Connect, as `setup` does; `tools` then has the tools."""
        await self.setup()

    async def close(self) -> None:
        """Close the connections, as `teardown` does."""
        await self.teardown()

    async def teardown(self) -> None:
        """Close the connections, which ends the servers that were started."""
        connections = self._connections()
        if not connections.users.leave():
            return
        self._offered = (-1, ())
        clients = [connections.shared, *(own.client for own in connections.of_trajectories)]
        connections.shared = None
        await asyncio.gather(*(client.close() for client in clients if client is not None))

    async def refresh(self) -> Sequence[Tool]:
        """Return the current tools; callers after the same change share one listing.

        With sessions "trajectory", tools are added and changed but never removed, because the server of
        another trajectory may still have them.

        Raises:
            InfrastructureError: If the server cannot be reached; the next call tries again.
        """
        async with self._connections().refreshing:
            revision, offered = self._offered
            if revision != self.revision:
                revision = self.revision
                tools = self._tools_of(await self._listed())
                if self.sessions == "trajectory":
                    tools = tuple(dict.fromkeys((*offered, *tools)))
                self._offered = (revision, tools)
            return self._offered[1]

    async def _listed(self) -> list[mcp_types.Tool]:
        if self.sessions == "shared":
            return await self.shared().tools()
        live = [own.client for own in self._connections().of_trajectories if own.has_changed]
        if live:
            return await live[-1].tools()
        client = self.client()
        try:
            return await client.tools()
        finally:
            await client.close()

    def _tools_of(self, found: Sequence[mcp_types.Tool]) -> tuple[MCPTool, ...]:
        """Return our tools for the server's; known tools stay the same objects.

        If changes are refused, new tools are left out, and changed ones stay as they were approved. Their
        names are computed from the approved names only, which the server cannot change.
        """
        kind = MCPTool if self.sessions == "shared" else SessionMCPTool
        listed = [definition.name for definition in found]
        approved = self.approval.fingerprints or ()
        shown = shown_names(approved if self.on_change == "refuse" else listed, self.name_prefix)
        tools: dict[str, MCPTool] = {}
        for definition in found:
            if self.selected is not None and definition.name not in self.selected:
                continue
            known = self._tools.get(definition.name)
            if self.approval.refuses(definition):
                if known is None:
                    continue
            elif known is None or known.name != shown[definition.name]:
                known = kind(self, shown[definition.name], definition)
            else:
                known.take(definition)
            self._tools[definition.name] = tools[definition.name] = known
        return tuple(tools.values())

    def _check_selected(self, found: Sequence[mcp_types.Tool]) -> None:
        names = [definition.name for definition in found]
        for wanted in self.selected or ():
            if wanted in self.approval.left_out:
                raise ValueError(
                    f"tools names {wanted!r}, which the MCP server {self.config.name!r} describes but cannot "
                    f"be offered: {self.approval.left_out[wanted]}"
                )
            if wanted not in names:
                near = nearest(wanted, names) or next((name for name in names if clean(name) == wanted), None)
                hint = f"; did you mean {near!r}?" if near else "."
                raise ValueError(
                    f"tools names {wanted!r}, which the MCP server {self.config.name!r} does not offer{hint} "
                    f"It offers: {', '.join(map(printable, names))[:_SHOWN] or 'none'}"
                )

    def shared(self) -> MCPClient:
        """Return the connection that all trajectories share, created at the first call."""
        connections = self._connections()
        if connections.shared is None:
            connections.shared = self.client()
        return connections.shared

    @asynccontextmanager
    async def of_trajectory(self, trajectory: str) -> AsyncGenerator[MCPClient]:
        """Open the connection of a trajectory for one of its tools; the last tool that leaves closes it.

        Args:
            trajectory: Name of the trajectory.

        Returns:
            An async context manager that yields the connection.
        """
        members = self._connections().of_trajectories
        member = members.join(trajectory, lambda: _TrajectoryConnection(self))
        client = member.value.client
        try:
            await client.connection()
            yield client
        finally:
            if member.leave():
                await client.close()

    def client(self, changed: Callable[[], None] | None = None) -> MCPClient:
        """Create a connection, which the caller closes.

        Args:
            changed: Called when the tools may have changed; None: `self.changed`.
        """
        from torchrl_agentic.tools.mcp.mcp_client import MCPClient

        return MCPClient(
            self.config,
            start_timeout=self.start_timeout,
            max_result_bytes=self.max_result_bytes,
            changed=changed or self.changed,
            seen=self.approval.see,
        )

    def changed(self) -> None:
        """Increase the revision, because the tools may have changed."""
        self.revision += 1

    def _connections(self) -> _Connections:
        """Return the connections of this process and event loop, new ones if there are none."""
        loop, found = asyncio.get_running_loop(), self._state.get()
        if found is not None and found.loop is loop:
            return found
        if found is not None and not found.loop.is_closed():
            raise InfrastructureError(
                f"the MCP server {self.config.name!r} is connected on another event loop, which still runs: "
                "create one MCPToolset for each loop"
            )
        return self._state.set(_Connections(loop))

    def __repr__(self) -> str:
        return f"MCPToolset({self.config!r})"


class _Connections:
    """The connections of a toolset that belong to one process and event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.users = Users()
        self.shared: MCPClient | None = None
        self.of_trajectories = PerTrajectory[_TrajectoryConnection]()
        self.refreshing = asyncio.Lock()


class _TrajectoryConnection:
    """The connection that the tools of one trajectory share."""

    def __init__(self, toolset: MCPToolset) -> None:
        self.has_changed = False
        self._toolset = toolset
        self.client = toolset.client(self._changed)

    def _changed(self) -> None:
        self.has_changed = True
        self._toolset.changed()
