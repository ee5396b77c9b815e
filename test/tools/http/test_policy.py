"""Which URLs may be asked for, and where a host may be reached."""

import contextlib

import pytest
from helpers.web_addresses import OTHER_PRIVATE, SPELLINGS_OF_LOOPBACK, URLS, looks_public
from hypothesis import given

from torchrl_agentic.errors import ToolError
from torchrl_agentic.tools.http.policy import HostPolicy, parse_address


@pytest.mark.parametrize("host", SPELLINGS_OF_LOOPBACK + OTHER_PRIVATE)
@pytest.mark.parametrize("url", ["http://{}/", "https://{}:443/latest", "http://{}:80", "HTTP://{}?x"])
def test_no_spelling_of_a_private_address_passes(host: str, url: str):
    with pytest.raises(ToolError):
        HostPolicy().target(url.format(host))


@pytest.mark.parametrize(
    ("url", "because"),
    [
        ("ftp://example.org/", "http:// or https://"),
        ("file:///etc/passwd", "http:// or https://"),
        ("gopher://example.org/", "http:// or https://"),
        ("//example.org/", "http:// or https://"),
        ("example.org", "http:// or https://"),
        ("", "http:// or https://"),
        ("http://user:secret@example.org/", "user name"),
        ("http://user@example.org/", "user name"),
        ("http://example.org:8080/", "port 8080"),
        ("http://example.org:22/", "port 22"),
        ("http://example.org:-1/", "port -1"),
        ("http://example.org:0/", "port 0"),
        ("http://example.org:99999/", "port 99999"),
        ("http://example.org:x/", "not a valid URL"),
        ("http://exa\r\nmple.org/", "not a valid URL"),
        ("http://example.org/\r\nHost: evil", "not a valid URL"),
        ("http://example.org/\0", "not a valid URL"),
        ("http://exa mple.org/", "not a host"),
        ("http://evil\0.example.org/", "not a valid URL"),
        ("http://evil%00.example.org/", "not a host"),
        ("http://example.org./", "not a host"),
        ("http://.example.org/", "not a host"),
        ("http://a..b/", "not a host"),
        ("http:///x", "not a host"),
        ("http://-a.example/", "not a host"),
        ("http://[::1/", "not a valid URL"),
        ("http://example.org/\ud800", "not a valid URL"),
        ("http://\ud800.org/", "not a valid URL"),
        ("https://example.org/" + "a" * 9000, "9020 characters"),
        ("https://" + "a" * 64 + ".org/", "not a host"),
        ("https://" + "a." * 130 + "org/", "not a host"),
    ],
)
def test_invalid_url_is_rejected_with_the_reason(url: str, because: str):
    with pytest.raises(ToolError) as refusal:
        HostPolicy().target(url)
    assert because in str(refusal.value)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 400


def test_target_is_the_address_that_the_client_connects_to():
    target = HostPolicy().target("HTTPS://Bücher.Example/a b?c=d#e")
    assert (target.host, target.port) == ("xn--bcher-kva.example", 443)
    assert str(target.url) == "https://xn--bcher-kva.example/a%20b?c=d"
    assert HostPolicy().target("http://[2606:4700:4700::1111]/").host == "2606:4700:4700::1111"


@pytest.mark.parametrize(
    ("allowed", "url", "passes"),
    [
        (["example.org"], "https://example.org/", True),
        (["EXAMPLE.org"], "https://Example.ORG/", True),
        (["example.org"], "https://www.example.org/", False),
        (["example.org"], "https://notexample.org/", False),
        (["example.org"], "https://example.org.evil.com/", False),
        (["example.org"], "https://8.8.8.8/", False),
        (["*.example.org"], "https://www.example.org/", True),
        (["*.example.org"], "https://a.b.example.org/", True),
        (["*.example.org"], "https://example.org/", False),
        (["*.example.org"], "https://evilexample.org/", False),
        (["bücher.example"], "https://xn--bcher-kva.example/", True),
        (["example.org:8080"], "http://example.org:8080/", True),
        (["example.org:8080"], "http://example.org/", False),
        (["*.example.org:8080"], "http://a.example.org:8080/", True),
        (["10.0.0.5"], "http://10.0.0.5/", True),
        (["10.0.0.5"], "http://[::ffff:10.0.0.5]/", True),
        (["10.0.0.5"], "http://10.0.0.6/", False),
        (["10.0.0.5"], "http://012.0.0.5/", False),
        (["10.0.0.5"], "https://example.org/", False),
        (["10.0.0.5:8080"], "http://10.0.0.5:8080/", True),
        (["10.0.0.5:8080"], "http://10.0.0.5/", False),
        (["10.0.0.0/8"], "http://10.1.2.3/", True),
        (["10.0.0.0/8"], "http://11.1.2.3/", False),
        (["[::1]:8080"], "http://[::1]:8080/", True),
        (["::1"], "http://[::1]/", True),
        (["fd00::/8"], "http://[fd12::1]/", True),
        (["localhost"], "http://localhost/", True),
        (["localhost"], "http://127.0.0.1/", False),
        (["*"], "https://example.org/", True),
        (["*"], "http://10.0.0.5/", False),
        (["*", "10.0.0.5"], "http://10.0.0.5/", True),
        (["*", "localhost:8080"], "http://localhost:8080/", True),
        (["*", "localhost:8080"], "http://127.0.0.1:8080/", False),
    ],
)
def test_allowed_host_matches_exactly(allowed: list[str], url: str, passes: bool):
    with contextlib.nullcontext() if passes else pytest.raises(ToolError):
        HostPolicy(allowed).target(url)


def test_refusal_lists_the_allowed_hosts():
    with pytest.raises(ToolError, match=r"allowed: example.org, \*.example.com"):
        HostPolicy(["example.org", "*.example.com"]).target("https://example.net/")
    with pytest.raises(ToolError, match="allowed: 80, 443, 8080"):
        HostPolicy(["example.org", "example.org:8080"]).target("https://example.org:81/")


def test_ports_can_be_named_or_all_be_allowed():
    assert HostPolicy(ports=[8080]).target("http://example.org:8080/").port == 8080
    assert HostPolicy(ports=None).target("http://example.org:1234/").port == 1234
    with pytest.raises(ToolError):
        HostPolicy(ports=[8080]).target("http://example.org/")


@pytest.mark.parametrize(
    ("allowed", "host", "address", "permitted"),
    [
        ([], "example.org", "8.8.8.8", True),
        ([], "example.org", "10.0.0.5", False),
        (["example.org"], "example.org", "10.0.0.5", False),
        (["10.0.0.5"], "10.0.0.5", "10.0.0.5", True),
        (["db.corp", "10.0.0.0/8"], "db.corp", "10.0.0.5", True),
        (["db.corp", "10.0.0.0/8"], "db.corp", "::ffff:10.0.0.5", True),
        (["db.corp", "10.0.0.0/8"], "db.corp", "192.168.0.1", False),
        (["*.corp", "10.0.0.0/8"], "db.corp", "10.0.0.5", True),
        (["*", "10.0.0.0/8"], "evil.example", "10.0.0.5", False),
        (["localhost"], "localhost", "127.0.0.1", True),
        (["localhost"], "localhost", "::1", True),
        (["localhost"], "localhost", "10.0.0.1", False),
        (["localhost", "example.org"], "example.org", "127.0.0.1", False),
        (["*", "localhost"], "evil.example", "127.0.0.1", False),
        (["localhost:8080"], "localhost", "127.0.0.1", False),
        (["10.0.0.5:8080"], "10.0.0.5", "10.0.0.5", False),
    ],
)
def test_private_address_is_reached_only_if_it_was_named(
    allowed: list[str], host: str, address: str, permitted: bool
):
    parsed = parse_address(address)
    assert parsed is not None
    assert HostPolicy(allowed).permits(host, 80, parsed) is permitted


@pytest.mark.parametrize(
    "entry", ["http://example.org", "example.org/", "a b", "*.*.org", "exa*mple.org", "127.1", "", "*.",
    "10.0.0.1/8", "user@example.org", "example.org:x"],
)  # fmt: skip
def test_invalid_allowed_host_is_rejected_in_the_constructor(entry: str):
    with pytest.raises(ValueError, match="allowed_hosts"):
        HostPolicy([entry])


def test_allowed_hosts_given_as_a_string_are_rejected():
    with pytest.raises(ValueError, match=r"write \['example.org'\]"):
        HostPolicy("example.org")


@given(URLS)
def test_a_url_gives_a_target_or_a_reason_and_a_literal_that_passes_is_public(url: str):
    try:
        target = HostPolicy().target(url)
    except ToolError as refusal:
        assert str(refusal)
        return
    assert target.url.scheme in ("http", "https")
    assert target.port in (80, 443)
    assert not target.url.userinfo
    if (address := parse_address(target.host)) is not None:
        assert looks_public(address)
