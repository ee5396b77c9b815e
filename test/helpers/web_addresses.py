"""Public and private addresses in many spellings, and the standard library's opinion of them."""

import ipaddress

from hypothesis import strategies as st

NOT_PUBLIC = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254",
    "168.63.129.16", "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.192",
    "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe",
    "::ffff:0:127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::8.8.8.8", "100::1",
    "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1",
    "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fec0::1", "ff02::1",
]  # fmt: skip
PUBLIC = [
    "1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.1", "172.15.255.255",
    "172.32.0.1", "192.0.1.1", "198.17.255.255", "198.20.0.1", "223.255.255.255",
    "2606:4700:4700::1111", "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8",
]  # fmt: skip
SPELLINGS_OF_LOOPBACK = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0x7f.1", "017700000001",
    "0177.0.0.1", "0177.1", "127.000.000.001", "127.0.0.1.", "00000000177.0.0.1", "0", "0.0.0.0",
    "127.00.0.1", "127.127.127.127", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::127.0.0.1]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]", "[64:ff9b::127.0.0.1]",
    "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::1%25lo]", "[::1%lo]", "１２７.０.０.１", "①②⑦.⓪.⓪.①",
    "127。0。0。1", "127%2e0%2e0%2e1", "%31%32%37.0.0.1", "[::ffff:127.0.0.1%25x]", "[127.0.0.1]",
    "127.0.0.1%00.example.org", "127.0.0.1\\@example.org",
]  # fmt: skip
OTHER_PRIVATE = [
    "10.0.0.1", "012.0.0.1", "0xa.1", "167772161", "172.16.0.1", "192.168.0.1", "192.168.257", "100.64.0.1",
    "169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "[::ffff:169.254.169.254]",
    "[fd00:ec2::254]", "[fe80::1]", "[fc00::1]", "[64:ff9b::a9fe:a9fe]", "168.63.129.16", "100.100.100.200",
    "[ff02::1]", "224.0.0.1", "255.255.255.255", "192.0.0.192", "[::ffff:0:a9fe:a9fe]",
]  # fmt: skip
ADDRESSES = st.one_of(
    st.ip_addresses(),
    st.ip_addresses(v=4).map(lambda a: ipaddress.IPv6Address(f"::ffff:{a}")),
    st.ip_addresses(v=4).map(lambda a: ipaddress.IPv6Address(f"64:ff9b::{a}")),
    st.ip_addresses(v=4).map(lambda a: ipaddress.IPv6Address((0x2002 << 112) | int(a) << 80)),
)

PIECES = st.sampled_from(
    ["http://", "https://", "ftp:", "//", "/", ":", "@", "#", "?", "\\", ".", "[", "]", "%", "%00", "%2e",
     "127", "1", "0x7f", "0177", "::1", "::ffff:", "10.0.0.1", "example.org", "localhost", "xn--", "80",
     "\r\n", "\0", "é", "\ud800", "。", "１", " ", "\t"]
)  # fmt: skip
URLS = st.one_of(
    st.text(),
    st.lists(PIECES, max_size=12).map("".join),
    st.lists(PIECES, max_size=6).map(lambda parts: "http://" + "".join(parts)),
    st.ip_addresses().map(lambda a: f"http://[{a}]/" if a.version == 6 else f"http://{a}/"),
)


def looks_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Check by the table of the standard library that an address, or the one inside it, is public."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in ipaddress.IPv6Network("64:ff9b::/96"):
            return looks_public(ipaddress.IPv4Address(address.packed[-4:]))
        inside = address.ipv4_mapped or address.sixtofour
        if inside is not None:
            return looks_public(inside)
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_link_local)
