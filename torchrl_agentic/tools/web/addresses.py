"""Which internet addresses are public, by a table of our own.

That of `ipaddress` has changed with Python's security releases, and counts multicast and NAT64 as global.
Source: the IANA registries of special-purpose addresses. Only addresses in their usual full form are read;
short, octal and hexadecimal forms are nobody's wish but an attacker's.
"""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TypeAlias

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
    """Read an address in its full form, an IPv6 one with or without brackets; None if it is none.

    An address with a zone (`fe80::1%eth0`) is none: it means something on this machine only.
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
    """Read an address or a network (`10.0.0.0/8`); None if it is neither."""
    address = parse_address(text)
    try:
        return ip_network(text if address is None else plain(address))
    except ValueError:
        return None


def plain(address: Address) -> Address:
    """Give the IPv4 address that an IPv6 one stands for, if it is IPv4-mapped or of NAT64; else itself."""
    if isinstance(address, IPv6Address) and (address in MAPPED or address in NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet."""
    address = plain(address)
    if isinstance(address, IPv4Address):
        return not any(address in network for network in SPECIAL_V4)
    return address in UNICAST_V6 and not any(address in network for network in SPECIAL_V6)
