"""`HostPolicy`: decides which URLs, hosts and addresses a request may reach.

The table of public addresses is our own, from the IANA registries of special-purpose addresses, because that
of `ipaddress` changes with Python's security releases and counts multicast and NAT64 as global. Addresses are
read in their usual full form only; short, octal and hexadecimal forms serve attackers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TypeAlias

import httpx

from torchrl_agentic.errors import ToolError
from torchrl_agentic.text import shorten

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

SPECIAL_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this host
            "10.0.0.0/8",
            "100.64.0.0/10",  # shared by providers; Alibaba's metadata
            "127.0.0.0/8",
            "168.63.129.16/32",  # Azure's host, as its guests see it
            "169.254.0.0/16",  # link-local; the metadata of most clouds
            "172.16.0.0/12",
            "192.0.0.0/24",  # protocol assignments; Oracle's metadata
            "192.0.2.0/24",
            "192.31.196.0/24",
            "192.52.193.0/24",
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",
            "192.175.48.0/24",
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
UNICAST_V6 = IPv6Network("2000::/3")
SPECIAL_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments, Teredo among them
            "2001:db8::/32",
            "2002::/16",  # 6to4: any IPv4 address may be inside
            "2620:4f:8000::/48",
            "3fff::/20",
        ),
    )
)
MAPPED = IPv6Network("::ffff:0:0/96")
NAT64 = IPv6Network("64:ff9b::/96")


def parse_address(text: str) -> Address | None:
    """Read an address in its full form, an IPv6 address with or without brackets.

    Args:
        text: The text.

    Returns:
        The address; None for other texts and for addresses with a zone (`fe80::1%eth0`), which have a meaning
        on one machine only.
    """
    if text.startswith("[") and text.endswith("]") and ":" in text:
        text = text[1:-1]
    if "%" in text:
        return None
    try:
        return ip_address(text)
    except ValueError:
        return None


def parse_network(text: str) -> Network | None:
    """Read an address or a network (`10.0.0.0/8`); return None for other texts."""
    address = parse_address(text)
    try:
        return ip_network(text if address is None else plain(address))
    except ValueError:
        return None


def plain(address: Address) -> Address:
    """Return the IPv4 address inside an IPv4-mapped or NAT64 address; return other addresses unchanged."""
    if isinstance(address, IPv6Address) and (address in MAPPED or address in NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """Return whether an address belongs to the public internet."""
    address = plain(address)
    if isinstance(address, IPv4Address):
        return not any(address in network for network in SPECIAL_V4)
    return address in UNICAST_V6 and not any(address in network for network in SPECIAL_V6)


MAX_URL_CHARS = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}
ANY = "*"
LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)")


@dataclass(frozen=True, slots=True)
class Target:
    """A checked URL.

    Attributes:
        url: The URL without its fragment.
        host: Host to connect to; an IPv6 address has no brackets.
        port: The port.
    """

    url: httpx.URL
    host: str
    port: int

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port, which credentials belong to."""
        return self.url.scheme, self.host, self.port


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One entry of `allowed_hosts`.

    Attributes:
        name: A host, `*.` and a host for all its subdomains, or `*` for any public host; "" if `network` is
            set.
        network: An address or a network, or None.
        port: The only allowed port; None: the ports of the policy.
    """

    name: str = ""
    network: Network | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> HostEntry:
        """Read an entry.

        Args:
            text: The entry.

        Raises:
            ValueError: If it is not a host, an address or a network.
        """
        if (network := parse_network(text)) is not None:
            return cls(network=network)
        head, colon, tail = text.rpartition(":")
        port = int(tail) if colon and re.fullmatch(r"[0-9]{1,5}", tail) else None
        rest = text if port is None else head
        if (network := parse_network(rest)) is not None:
            return cls(network=network, port=port)
        wildcard = "*." if rest.startswith("*.") else ""
        name = ANY if rest == ANY else wildcard + _ascii(rest.removeprefix("*."))
        if name != ANY and (not _NAME.fullmatch(name.removeprefix("*.")) or _ends_in_number(name)):
            raise ValueError(
                "allowed_hosts: expected a host ('example.org', '*.example.org', with or without ':8080'), "
                f"an address ('10.0.0.5'), a network ('10.0.0.0/8') or '*'; got {text!r}"
            )
        return cls(name=name, port=port)

    def names(self, host: str) -> bool:
        """Return whether the entry lists this host or its parent domain; `*` lists no host."""
        if self.name.startswith("*."):
            return host.endswith(self.name[1:])
        return bool(self.name) and self.name == host


class HostPolicy:
    """Decides which hosts may be reached.

    Args:
        allowed_hosts: The allowed hosts; see `HttpTool`. Empty: any public host.
        ports: Allowed ports for entries without a port; None: all.

    Raises:
        ValueError: If an entry is invalid.
    """

    def __init__(self, allowed_hosts: Iterable[str] = (), ports: Collection[int] | None = (80, 443)) -> None:
        if isinstance(allowed_hosts, str):
            raise ValueError(f"expected allowed_hosts as a list of hosts; write [{allowed_hosts!r}]")
        self.allowed_hosts = tuple(allowed_hosts)
        self.entries = tuple(map(HostEntry.parse, self.allowed_hosts)) or (HostEntry(ANY),)
        self.ports = None if ports is None else frozenset(ports)

    def target(self, text: str) -> Target:
        """Read and check a URL.

        Args:
            text: The URL.

        Raises:
            ToolError: If it is not a URL or not allowed; the message explains it to the model.
        """
        target = parse_target(text)
        self._check(target.host, target.port)
        return target

    def permits(self, host: str, port: int, address: Address) -> bool:
        """Return whether an allowed host may be reached at an address.

        An address that is not public must be listed, and so must be the host, because a host that only `*`
        allows could resolve to an address that was listed for others.

        Args:
            host: The host.
            port: The port.
            address: One of the addresses of the host.
        """
        if is_public(address):
            return True
        address = plain(address)
        entries = [entry for entry in self.entries if entry.port in (None, port)]
        literal = parse_address(host) is not None
        if not literal and not any(entry.names(host) for entry in entries):
            return False
        named = [entry.network for entry in entries if entry.network is not None]
        if any(entry.name == host == "localhost" for entry in entries):
            named += LOOPBACK
        return any(address in network for network in named)

    def _check(self, host: str, port: int) -> None:
        address = parse_address(host)
        entries = [entry for entry in self.entries if _allows(entry, host, address)]
        if not entries:
            if address is not None and any(entry.name == ANY for entry in self.entries):
                raise ToolError(
                    f"{host} is not a public address; only hosts of the public internet are allowed"
                )
            raise ToolError(f"host {host!r} is not allowed; allowed: {self._listed()}")
        if not any(_port_fits(entry, port, self.ports) for entry in entries):
            ports = sorted(
                {entry.port for entry in entries if entry.port is not None} | (self.ports or set())
            )
            raise ToolError(f"port {port} of {host!r} is not allowed; allowed: {', '.join(map(str, ports))}")

    def _listed(self) -> str:
        shown = ["any public host" if name == ANY else name for name in self.allowed_hosts[:10]]
        return ", ".join(shown + ["…"] * (len(self.allowed_hosts) > 10))


def parse_target(text: str) -> Target:
    """Read a URL.

    Args:
        text: The URL.

    Raises:
        ToolError: If it is not a URL, or is written in a form that other programs might read differently.
    """
    shown = ascii(shorten(text, 120))
    if len(text) > MAX_URL_CHARS:
        raise ToolError(f"the URL has {len(text)} characters; at most {MAX_URL_CHARS} are allowed: {shown}")
    try:
        url = httpx.URL(text)
        if url.fragment:
            url = url.copy_with(fragment=None)
        host = url.raw_host.decode("ascii")
    except (httpx.InvalidURL, ValueError):
        raise ToolError(
            f"{shown} is not a valid URL; write one like https://example.org/path?key=value"
        ) from None
    if url.scheme not in DEFAULT_PORTS:
        raise ToolError(f"{shown} does not begin with http:// or https://")
    if url.userinfo:
        raise ToolError(f"{shown} contains a user name or a password; leave it out")
    port = url.port if url.port is not None else DEFAULT_PORTS[url.scheme]
    if not 0 < port < 65536:
        raise ToolError(f"port {port} does not exist; leave it out, or use one from 1 to 65535")
    if parse_address(host) is None:
        if not _NAME.fullmatch(host):
            raise ToolError(
                f"{shorten(host)!a} is not a host; use letters, digits, dots and hyphens, e.g. example.org"
            )
        if _ends_in_number(host):
            raise ToolError(f"{host!r} is not a host; an address has four decimal numbers, e.g. 8.8.8.8")
    return Target(url, host, port)


def _allows(entry: HostEntry, host: str, address: Address | None) -> bool:
    if address is None:
        return entry.name == ANY or entry.names(host)
    if entry.network is not None:
        return plain(address) in entry.network
    return entry.name == ANY and is_public(address)


def _port_fits(entry: HostEntry, port: int, ports: frozenset[int] | None) -> bool:
    return port == entry.port if entry.port is not None else ports is None or port in ports


def _ends_in_number(host: str) -> bool:
    """Return whether a resolver may read a name as an address: 127.1, 2130706433, 0x7f000001, 0177.0.0.1."""
    return _NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _ascii(name: str) -> str:
    """Return a host name in its ASCII form; "" if it has none, which the caller refuses."""
    try:
        return httpx.URL(scheme="https", host=name).raw_host.decode("ascii")
    except (httpx.InvalidURL, ValueError):
        return ""
