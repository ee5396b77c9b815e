"""The one way out: resolves a host once, checks every address, connects to one that was checked.

It sits below the connection pool, so that whatever URL comes by whatever way, no connection is made past it.
TLS goes on above: name indication and certificate are those of the host, not of the address.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, TypeAlias, cast

import httpcore

from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.tool import ToolContext
from torchrl_agentic.tools.web.addresses import Address, parse_address, plain
from torchrl_agentic.tools.web.policy import HostPolicy

Resolver: TypeAlias = Callable[[str, int], Sequence[str]]
"""The addresses of a host. It may block: it runs on a thread. `socket.gaierror`: it knows none."""

MAX_ADDRESSES = 4
"""How many addresses of a host are tried, one after the other."""
ATTEMPT_S = 3.0
"""How long an address may take to answer before the next one is tried."""


class WireLimit(Exception):
    """A server has sent more bytes than a call may take."""


@dataclass(slots=True)
class Progress:
    """How far one call has come.

    doing: for the sentence that says where it stopped. connected: whether its request made a connection, and
    did not find one that was kept. body: what has arrived.
    """

    ctx: ToolContext
    bytes_left: int
    doing: str = "looking up the host"
    connected: bool = False
    body: bytearray = field(default_factory=bytearray)


current: ContextVar[Progress] = ContextVar("progress of the HTTP call")
"""httpcore hands a backend neither the request nor anything of ours, but calls it in the task of the call."""


def look_up(host: str, port: int) -> list[str]:
    """Ask the system's resolver."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class CountedStream(httpcore.AsyncNetworkStream):
    """A connection whose bytes count for the call that reads them: headers, framing and all.

    spoiled: it is not to be used for another request.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self.spoiled = False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read, and count.

        Raises:
            WireLimit: it is more than the call may take.
        """
        progress = current.get()
        data = await self._stream.read(max_bytes, timeout)
        progress.bytes_left -= len(data)
        if progress.bytes_left < 0:
            raise WireLimit
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write."""
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close."""
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Encrypt; the certificate must be that of the host."""
        current.get().doing = f"agreeing on TLS with {server_hostname}"
        try:
            return CountedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))
        except BaseException:  # httpcore leaves the connection open where it is cancelled
            await asyncio.shield(self._stream.aclose())
            raise

    def get_extra_info(self, info: str) -> Any:
        """Say what the connection knows of itself."""
        if info == "is_readable" and self.spoiled:
            return True  # which tells the pool not to use an idle connection again
        return self._stream.get_extra_info(info)


class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connects to what a policy permits, and to nothing else. network: what makes the connections."""

    def __init__(
        self,
        policy: HostPolicy,
        resolver: Resolver = look_up,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._network = network or cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to a host at one of its addresses.

        Raises:
            ToolError: one of its addresses is not permitted, or it has none.
            httpcore.ConnectError, httpcore.ConnectTimeout: none of them answers.
        """
        addresses = await self._addresses(host, port)
        current.get().doing = f"connecting to {host}"
        for index, address in enumerate(addresses):
            last = index == len(addresses) - 1
            try:
                stream = await self._network.connect_tcp(
                    str(address), port, None if last else ATTEMPT_S, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if last:
                    raise
                continue
            await self._check_peer(stream, address)
            current.get().connected = True
            current.get().doing = f"waiting for the answer of {host}"
            return CountedStream(stream)
        raise AssertionError("no host has no addresses")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: no URL leads to a socket in the file system."""
        raise ToolError("sockets in the file system are not reached over HTTP")

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> list[Address]:
        literal = parse_address(host)
        texts = [host] if literal is not None else await self._resolve(host, port)
        addresses = [parse_address(text) for text in dict.fromkeys(texts)]
        if not addresses:
            raise ToolError(f"host {host!r} has no address")
        found: list[Address] = []
        for address in addresses:
            if address is None or not self._policy.permits(host, port, address):
                raise ToolError(
                    f"host {host!r} has an address that is not public; only the internet can be reached"
                )
            found.append(address)
        return found[:MAX_ADDRESSES]

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        current.get().doing = f"looking up {host}"
        try:
            return await current.get().ctx.in_thread(self._resolver, host, port)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                raise ToolError(
                    f"host {host!r} cannot be looked up at the moment: its name server does not answer"
                ) from None
            raise ToolError(f"there is no host {host!r}: the name has no address") from None
        except UnicodeError:
            raise ToolError(f"host {host!r} cannot be looked up: a part of the name is too long") from None
        except OSError as error:
            raise InfrastructureError(f"names cannot be looked up: {error}") from error

    async def _check_peer(self, stream: httpcore.AsyncNetworkStream, address: Address) -> None:
        peer = stream.get_extra_info("server_addr")
        reached = parse_address(str(peer[0])) if peer else None
        if reached is None or plain(reached) != plain(address):
            await stream.aclose()
            raise InfrastructureError(f"connected to {reached} instead of {address}")
