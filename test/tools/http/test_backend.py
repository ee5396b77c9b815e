"""The choke point: one look-up per connection, every address checked, none but a checked one connected to."""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any

import httpcore
import httpx
import pytest
from helpers.web_addresses import ADDRESSES, SPELLINGS_OF_LOOPBACK, looks_public
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.errors import InfrastructureError, ToolError
from torchrl_agentic.tools.base import ToolContext
from torchrl_agentic.tools.http.http_client import CallProgress, PinnedBackend, PinnedTransport, current
from torchrl_agentic.tools.http.policy import HostPolicy


class Peer(httpcore.AsyncMockStream):
    def __init__(self, address: str) -> None:
        super().__init__([])
        self.address = address
        self.closed = False

    def get_extra_info(self, info: str) -> Any:
        return (self.address, 80) if info == "server_addr" else None

    async def aclose(self) -> None:
        self.closed = True


class Network(httpcore.AsyncMockBackend):
    """Connects nowhere, and says where it would have; addresses in `dead` do not answer."""

    def __init__(self, dead: Sequence[str] = (), instead: str | None = None) -> None:
        super().__init__([])
        self.asked: list[str] = []
        self.dead = dead
        self.instead = instead
        self.streams: list[Peer] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.asked.append(host)
        if host in self.dead:
            raise httpcore.ConnectTimeout
        self.streams.append(Peer(self.instead or host))
        return self.streams[-1]


async def reach(backend: PinnedBackend, host: str, port: int = 80) -> httpcore.AsyncNetworkStream:
    token = current.set(CallProgress(ToolContext("c1"), 1000))
    try:
        return await backend.connect_tcp(host, port)
    finally:
        current.reset(token)


async def test_a_name_is_resolved_once_and_the_checked_address_is_connected_to():
    lookups: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["8.8.8.8"] if len(lookups) == 1 else ["127.0.0.1"]

    network = Network()
    backend = PinnedBackend(HostPolicy(), resolve, network)
    await reach(backend, "rebinding.example")
    assert (lookups, network.asked) == (["rebinding.example"], ["8.8.8.8"])
    with pytest.raises(ToolError, match="not public"):
        await reach(backend, "rebinding.example")
    assert network.asked == ["8.8.8.8"]


@pytest.mark.parametrize(
    "records",
    [
        ["127.0.0.1"],
        ["8.8.8.8", "10.0.0.1"],
        ["8.8.8.8", "1.1.1.1", "::1"],
        ["8.8.8.8", "::ffff:169.254.169.254"],
        ["8.8.8.8", "64:ff9b::7f00:1"],
        ["8.8.8.8", "fe80::1%eth0"],
        ["8.8.8.8", "127.1"],
        ["8.8.8.8", "garbage"],
        ["8.8.8.8"] * 10 + ["127.0.0.1"],
        [],
    ],
)
async def test_one_bad_record_is_enough_to_refuse_a_name(records: list[str]):
    network = Network()
    with pytest.raises(ToolError):
        await reach(PinnedBackend(HostPolicy(), lambda host, port: records, network), "mixed.example")
    assert network.asked == []


@pytest.mark.parametrize("host", SPELLINGS_OF_LOOPBACK)
async def test_no_spelling_gets_past_the_backend_where_it_gets_past_the_policy(host: str):
    """The resolver of the system reads the short and octal forms."""
    network = Network()
    with pytest.raises((ToolError, UnicodeError)):
        await reach(PinnedBackend(HostPolicy(), _numeric, network), host.strip("[]"))
    assert network.asked == []


def _numeric(host: str, port: int) -> list[str]:
    try:
        return [socket.inet_ntoa(socket.inet_aton(host))]
    except (OSError, UnicodeError):
        raise socket.gaierror(socket.EAI_NONAME, "no such name") from None


@given(st.lists(ADDRESSES.map(str), max_size=6))
def test_only_public_addresses_are_connected_for_any_dns_answer(records: list[str]):
    network = Network(dead=records)
    with contextlib.suppress(ToolError, httpcore.ConnectTimeout):
        asyncio.run(reach(PinnedBackend(HostPolicy(), lambda host, port: records, network), "any.example"))
    assert all(looks_public(ipaddress.ip_address(asked)) for asked in network.asked)


async def test_the_next_address_is_tried_where_one_does_not_answer():
    network = Network(dead=["2606:4700::1"])
    backend = PinnedBackend(HostPolicy(), lambda host, port: ["2606:4700::1", "1.1.1.1"], network)
    await reach(backend, "example.org")
    assert network.asked == ["2606:4700::1", "1.1.1.1"]


async def test_connection_to_an_unexpected_peer_is_closed():
    network = Network(instead="127.0.0.1")
    with pytest.raises(InfrastructureError, match=r"instead of 8\.8\.8\.8"):
        await reach(PinnedBackend(HostPolicy(), lambda host, port: ["8.8.8.8"], network), "example.org")
    assert network.streams[0].closed


async def test_sockets_in_the_file_system_are_refused():
    with pytest.raises(ToolError):
        await PinnedBackend(HostPolicy()).connect_unix_socket("/run/docker.sock")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (socket.gaierror(socket.EAI_NONAME, "x"), ToolError, "does not exist"),
        (socket.gaierror(socket.EAI_AGAIN, "x"), ToolError, "does not respond"),
        (UnicodeError("label too long"), ToolError, "too long"),
        (OSError(24, "Too many open files"), InfrastructureError, "Too many open files"),
    ],
)
async def test_each_failure_to_look_a_name_up_has_its_own_sentence(error: Exception, kind: type, says: str):
    def resolve(host: str, port: int) -> list[str]:
        raise error

    with pytest.raises(kind, match=says):
        await reach(PinnedBackend(HostPolicy(), resolve, Network()), "example.org")


class Answering(Peer):
    """Answers each request, in turns of the event loop."""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await asyncio.sleep(0)
        self._left = [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab", b"cd"]

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        await asyncio.sleep(0)
        return self._left.pop(0)


class AnsweringNetwork(Network):
    """Connects to peers that answer."""

    @property
    def n_open(self) -> int:
        return sum(not stream.closed for stream in self.streams)

    async def connect_tcp(self, host: str, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        await asyncio.sleep(0)
        self.streams.append(Answering(host))
        return self.streams[-1]


async def get(transport: PinnedTransport, url: str = "http://8.8.8.8/") -> bytes:
    current.set(CallProgress(ToolContext("c1"), 100_000))
    response = await transport.handle_async_request(httpx.Request("GET", url))
    try:
        return b"".join([chunk async for chunk in response.aiter_raw()])
    finally:
        await response.aclose()


@pytest.mark.parametrize("has_idle", [False, True])
async def test_a_request_that_is_cancelled_at_any_step_leaves_no_connection(has_idle: bool):
    """One idle connection may wait for the next request; httpcore's own pool forgets some."""
    steps = 0
    while True:
        network = AnsweringNetwork()
        transport = PinnedTransport(
            PinnedBackend(HostPolicy(), network=network), ssl.create_default_context()
        )
        if has_idle:
            await get(transport)
        request = asyncio.create_task(get(transport))
        for _ in range(steps):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait([request])
        assert network.n_open <= 1, steps
        assert await get(transport) == b"abcd"
        assert network.n_open == 1
        await transport.aclose()
        assert network.n_open == 0
        if not request.cancelled():
            break
        steps += 1
    assert steps > 3


async def test_a_connection_serves_one_request_after_the_other_and_only_its_own_origin():
    network = AnsweringNetwork()
    transport = PinnedTransport(PinnedBackend(HostPolicy(), network=network), ssl.create_default_context())
    for _ in range(3):
        assert await get(transport) == b"abcd"
    assert await get(transport, "http://1.1.1.1/") == b"abcd"
    assert await get(transport) == b"abcd"
    assert [stream.address for stream in network.streams] == ["8.8.8.8", "1.1.1.1"]
    await asyncio.gather(*(get(transport) for _ in range(3)))
    assert len(network.streams) == 4
    await transport.aclose()
    assert network.n_open == 0
