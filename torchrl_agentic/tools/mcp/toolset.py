"""Names that models can write."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from torchrl_agentic.errors import InfrastructureError, MissingExtra, check_count, check_seconds
from torchrl_agentic.limits import Limiter
from torchrl_agentic.printable import printable
from torchrl_agentic.tools.base import Effects, Tool, Toolset, current_session
from torchrl_agentic.tools.mcp.approval import Approval, OnChange
from torchrl_agentic.tools.mcp.mcp_tool import MCPProgress, MCPTool, SessionMCPTool
from torchrl_agentic.tools.mcp.server_config import MAX_RESULT_BYTES, MCPServerConfig

if TYPE_CHECKING:
    import mcp_types

    from torchrl_agentic.tools.mcp.mcp_client import Client

MAX_NAME = 64
"""What APIs of models take, in characters."""
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


def clean(name: str) -> str:
    """Give a name of letters, digits, _ and -; one that was too long ends in a digest of what it was."""
    fit = _UNFIT.sub("_", name) or "_"
    if len(fit) <= MAX_NAME:
        return fit
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{fit[: MAX_NAME - 9]}_{digest}"


def shown_names(names: Iterable[str], prefix: str = "") -> dict[str, str]:
    """Give each of a server's names the one that models see; of those that come out equal, later ones count.

    A name that is clean keeps its place, whatever comes before it.
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

    A server that says that its tools are others now is asked for them at the next step or reset. One that is
    lost gives INFRA results to the calls under way, and is started or reached again by the next call, which
    says that what it held is gone.

    Args:
        config: the server.
        name_prefix: put before each name. Two servers with tools of one name need it; else that is an error.
            What models cannot write in a name becomes "_".
        request_timeout: seconds that the server may take for a call, from when it is sent; None: no bound.
            The `per_call_timeout` of the ToolCompose bounds the call too: the smaller of both counts.
        start_timeout: seconds that it may take until it is ready, and again to list its tools.
        tools: names of the tools to offer, as the server has them; None: all.
        sessions: "shared": one connection for this process; "trajectory": one for each trajectory that
            calls, so that what it keeps in memory is not seen by others. Over HTTP that needs a server with
            sessions.
        limiter: what calls of all its tools go through; share it with whoever uses the same server.
        effects: of each of its tools; None: a tool that the server says only reads reads "mcp:<name>", any
            other writes it, so that calls of one trajectory keep their order unless all of them only read.
        on_progress: called on the event loop with what the server tells of calls under way.
        max_result_bytes: of an answer, as JSON; a larger one is an ERROR result that says so.
        on_change: what becomes of a tool whose description, schemas or annotations are not those of the first
            listing, also after a restart of the server and in the server of another trajectory. "warn": it is
            logged once, and each result has a note. "refuse": calls give INFRA results, the model is shown
            the tool as it was, its name included, and tools that are new are not offered.
        fingerprints: those of an earlier run, `toolset.fingerprints`, to compare with in place of the first
            listing. With "refuse", `setup` raises if one differs.

    Raises:
        MissingExtra: the MCP SDK is not installed.
        TypeError, ValueError: an argument means nothing.
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
        max_result_bytes: int = MAX_RESULT_BYTES,
        on_change: OnChange = "warn",
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise MissingExtra("MCPToolset", "mcp", "mcp")
        if not isinstance(cast("object", config), MCPServerConfig):
            raise TypeError(
                f"config is an MCPServerConfig, e.g. MCPServerConfig('npx', ['-y', 'some-server']); got "
                f"{type(config).__name__}; mcp_servers(...) reads a file of servers"
            )
        if isinstance(tools, str):
            raise TypeError(f"tools is a list of names: tools=[{tools!r}]")
        if sessions not in ("shared", "trajectory"):
            raise ValueError(f"sessions is 'shared' or 'trajectory'; got {sessions!r}")
        if on_change not in get_args(OnChange):
            raise ValueError(f"on_change is 'warn' or 'refuse'; got {on_change!r}")
        if not isinstance(cast("object", fingerprints), Mapping | None):
            raise TypeError(f"fingerprints is a mapping, {{tool: fingerprint}}; got {fingerprints!r:.80}")
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
        self.max_result_bytes = int(max_result_bytes)
        self.on_change: OnChange = on_change
        self.approval = Approval(config.name, on_change, self.selected, fingerprints)
        self.revision = 0
        self._tools: dict[str, MCPTool] = {}  # by the server's names
        self._offered: tuple[int, tuple[MCPTool, ...]] = (-1, ())
        self._forget()

    def _forget(self) -> None:
        """Begin without connections; those that were there belong to another process or event loop."""
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._users = 0
        self._shared: Client | None = None
        self._of_trajectories: dict[object, _Shared] = {}
        self._refreshing = asyncio.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to this process."""
        live = ("_home", "_users", "_shared", "_of_trajectories", "_refreshing")
        return {name: value for name, value in self.__dict__.items() if name not in live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without connections."""
        for name, value in state.items():
            setattr(self, name, value)
        self._forget()

    async def setup(self) -> Sequence[Tool]:
        """Connect, and give the tools that the server offers.

        Raises:
            InfrastructureError: the server cannot be started or reached, or says nothing sensible; the
                message has its command, how it ended, and the last lines of its stderr.
            ValueError: one of `tools` is not there, or is not as `fingerprints` says and that is refused.
        """
        self._at_home()
        self._users += 1
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
        """The tools that the server offered last; none while it is not connected."""
        return self._offered[1]

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """A digest of what the server said of each tool when it was approved; none before `setup`."""
        return dict(self.approval.fingerprints or {})

    async def open(self) -> None:
        """Connect, as `setup` does; `tools` then holds the tools."""
        await self.setup()

    async def close(self) -> None:
        """End the connections, as `teardown` does."""
        await self.teardown()

    async def teardown(self) -> None:
        """End the connections, and with them the servers that were started."""
        self._at_home()
        self._users = max(0, self._users - 1)
        if self._users:
            return
        self._offered = (-1, ())
        clients = [self._shared, *(shared.client for shared in self._of_trajectories.values())]
        self._shared = None
        await asyncio.gather(*(client.close() for client in clients if client is not None))

    async def refresh(self) -> Sequence[Tool]:
        """Give the tools as they are now; one listing serves all who ask after the same change.

        With sessions "trajectory" tools are added and changed but not taken away: what one trajectory's
        server does without, another's may have.

        Raises:
            InfrastructureError: the server cannot be asked; `revision` is as before, so ask again.
        """
        self._at_home()
        async with self._refreshing:
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
        live = [shared.client for shared in self._of_trajectories.values() if shared.has_changed]
        if live:
            return await live[-1].tools()
        client = self.client()
        try:
            return await client.tools()
        finally:
            await client.close()

    def _tools_of(self, found: Sequence[mcp_types.Tool]) -> tuple[MCPTool, ...]:
        """Give our tools for the server's; those that are known stay the same objects.

        Of what is refused, those that are new are left out, and others stay as they were approved, also in
        name: that comes of the names that were approved alone, which the server cannot change.
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
            if wanted not in names:
                near = get_close_matches(wanted, names, 1) or [
                    name for name in names if clean(name) == wanted
                ]
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"tools names {wanted!r}, which the MCP server {self.config.name!r} does not offer{hint} "
                    f"It offers: {', '.join(map(printable, names))[:_SHOWN] or 'none'}"
                )

    def shared(self) -> Client:
        """Give the connection that all share; made at its first call."""
        self._at_home()
        if self._shared is None:
            self._shared = self.client()
        return self._shared

    @asynccontextmanager
    async def of_trajectory(self, trajectory: str) -> AsyncGenerator[Client]:
        """Give the connection of a trajectory to one of its tools; the last that leaves ends it."""
        self._at_home()
        key = current_session.get() or trajectory
        shared = self._of_trajectories.get(key)
        if shared is None:
            shared = self._of_trajectories[key] = _Shared(self)
        shared.users += 1
        try:
            await shared.client.connection()
            yield shared.client
        finally:
            shared.users -= 1
            if shared.users == 0:
                if self._of_trajectories.get(key) is shared:
                    del self._of_trajectories[key]
                await shared.client.close()

    def client(self, changed: Callable[[], None] | None = None) -> Client:
        """Make a connection of its own, which whoever asks for it closes."""
        from torchrl_agentic.tools.mcp.mcp_client import Client

        return Client(
            self.config,
            start_timeout=self.start_timeout,
            max_result_bytes=self.max_result_bytes,
            changed=changed or self.changed,
            seen=self.approval.see,
        )

    def changed(self) -> None:
        """Take note that the tools may be others now."""
        self.revision += 1

    def _at_home(self) -> None:
        """Leave connections alone that were made before a fork, or on an event loop that is gone."""
        here = (os.getpid(), asyncio.get_running_loop())
        if self._home is None:
            self._home = here
        elif self._home != here:
            if self._home[0] == here[0] and not self._home[1].is_closed():
                raise InfrastructureError(
                    f"the MCP server {self.config.name!r} is connected to on another event loop, which still "
                    "runs: make one MCPToolset for each"
                )
            self._forget()
            self._home = here

    def __repr__(self) -> str:
        return f"MCPToolset({self.config!r})"


class _Shared:
    """The connection that the tools of one trajectory have, and how many of them."""

    def __init__(self, toolset: MCPToolset) -> None:
        self.users = 0
        self.has_changed = False
        self._toolset = toolset
        self.client = toolset.client(self._changed)

    def _changed(self) -> None:
        self.has_changed = True
        self._toolset.changed()
