"""Parts of a request that the model may set, and those that survive a redirect."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.errors import ToolError
from torchrl_agentic.tools.http.exchange import HttpRequest, checked_body, checked_headers, redirected
from torchrl_agentic.tools.http.policy import parse_target

HERE = parse_target("https://example.org/")


@pytest.mark.parametrize(
    "name",
    ["Host", "host", "Connection", "Transfer-Encoding", "Content-Length", "Content-Encoding", "TE", "Trailer",
     "Upgrade", "Keep-Alive", "Expect", "Proxy-Authorization", "Proxy-Connection", "Accept-Encoding",
     "X-Forwarded-For", "X-Forwarded-Host", "Forwarded", "Via", "X-Real-IP", "Cookie", "Cookie2",
     "Metadata-Flavor", "Metadata", "HTTP2-Settings"],
)  # fmt: skip
def test_reserved_headers_are_rejected_by_name(name: str):
    with pytest.raises(ToolError, match=name):
        checked_headers({name: "x"}, None)


@pytest.mark.parametrize(
    "headers",
    [{"X": "a\r\nHost: evil"}, {"X": "a\nb"}, {"X": "a\0b"}, {"X\r\nY": "a"}, {"X: y": "a"}, {"": "a"},
     {"X ": "a"}, {"X": "grün"}, {"X": 3}, {"X": None}, {"X": "a" * 5000}, {"X" * 200: "a"},
     {f"X-{n}": "a" for n in range(60)}, {"X": "\x7f"}, {"Xé": "a"}, "X: a", ["X"], {"Host\u200b": "a"}],
    ids=range(18),
)  # fmt: skip
def test_invalid_header_is_rejected(headers: Any):
    with pytest.raises(ToolError):
        checked_headers(headers, None)


def test_named_headers_are_the_only_ones():
    assert checked_headers({"X-Key": "1", "Cookie": "a=b"}, {"x-key", "cookie"}) == {
        "x-key": "1",
        "cookie": "a=b",
    }
    with pytest.raises(ToolError, match="allowed: x-key"):
        checked_headers({"Accept": "*/*"}, {"x-key"})
    with pytest.raises(ToolError):
        checked_headers({"Host": "x"}, {"host"})


@given(st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=4))
def test_headers_that_pass_are_one_line_each(headers: dict[str, str]):
    try:
        passed = checked_headers(headers, None)
    except ToolError:
        return
    assert all(name.isascii() and name.isprintable() and ":" not in name for name in passed)
    assert all(value.isascii() and value.replace("\t", " ").isprintable() for value in passed.values())


def test_a_body_is_text_or_json_but_not_both():
    assert checked_body({"body": "a"}, "POST") == (b"a", "text/plain; charset=utf-8")
    assert checked_body({"json": {"a": "é"}}, "POST") == (b'{"a": "\\u00e9"}', "application/json")
    assert checked_body({"body": "\ud800"}, "POST") == (b"?", "text/plain; charset=utf-8")
    assert checked_body({}, "POST") == (None, None)
    for args, method in (({"body": "a", "json": 1}, "POST"), ({"body": "a"}, "GET"), ({"json": 1}, "HEAD")):
        with pytest.raises(ToolError):
            checked_body(args, method)
    nest: list[Any] = []
    for _ in range(100_000):
        nest = [nest]
    with pytest.raises(ToolError, match="too deep"):
        checked_body({"json": nest}, "POST")
    while nest:  # freed level by level: all at once would be too deep as well
        nest = nest[0]


SECRET = {"authorization": "s", "x-api-key": "s", "cookie": "s", "accept": "*/*", "content-type": "a/b"}


@pytest.mark.parametrize(
    "there", ["https://other.org/", "https://www.example.org/", "https://example.org:8443/",
    "https://example.org.evil/"]
)  # fmt: skip
def test_secrets_stay_at_their_origin(there: str):
    ask = redirected(HttpRequest("GET", HERE, SECRET), 302, parse_target(there))
    assert ask.headers == {"accept": "*/*", "content-type": "a/b"}
    assert (
        redirected(HttpRequest("GET", HERE, SECRET), 302, parse_target("https://example.org:443/x")).headers
        == SECRET
    )


def test_nothing_goes_from_https_to_http():
    with pytest.raises(ToolError, match="https to http"):
        redirected(HttpRequest("GET", HERE, {}), 302, parse_target("http://example.org/"))


@pytest.mark.parametrize(
    ("method", "status", "then"),
    [("POST", 301, "GET"), ("POST", 302, "GET"), ("POST", 303, "GET"), ("PUT", 303, "GET"), ("HEAD", 303,
     "HEAD"), ("HEAD", 302, "HEAD"), ("POST", 307, "POST"), ("POST", 308, "POST"), ("PUT", 302, "PUT"),
     ("GET", 308, "GET")],
)  # fmt: skip
def test_a_redirect_changes_the_method_as_in_browsers(method: str, status: int, then: str):
    content = None if method in ("GET", "HEAD") else b"x"
    ask = redirected(
        HttpRequest(method, HERE, {"content-type": "a/b"}, content),
        status,
        parse_target("https://example.org/b"),
    )
    assert ask.method == then
    assert (ask.content is None) == (then in ("GET", "HEAD"))
    assert ("content-type" in ask.headers) == (method == then)


@pytest.mark.parametrize(("method", "status"), [("POST", 307), ("POST", 308), ("PUT", 302)])
def test_a_body_is_not_sent_on_to_another_site(method: str, status: int):
    with pytest.raises(ToolError, match="another site"):
        redirected(HttpRequest(method, HERE, {}, b"x"), status, parse_target("https://other.org/"))
