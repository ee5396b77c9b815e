"""Access: requests of web pages and other machines are rejected; over real HTTP."""

import socket
from collections.abc import Generator, Mapping
from typing import Any

import httpx
import pytest

from torchrl_agentic.sandbox import Sandbox, UnsafeSubprocessSandbox
from torchrl_agentic.serve.access import Access
from torchrl_agentic.serve.sandbox_app import sandbox_app
from torchrl_agentic.serve.search_app import Document, search_app
from torchrl_agentic.serve.serving import serving

pytestmark = [pytest.mark.no_sandbox, pytest.mark.filterwarnings("ignore:.*UnsafeSubprocessSandbox")]
DOCUMENTS = [Document("1", "Cats", "They sleep.")]
TOKEN = "correct-horse-battery-staple"
BODY = b'{"queries": ["cats"]}'
JSON_TYPE = {"Content-Type": "application/json"}


def _post(url: str, path: str = "/retrieve", body: bytes = BODY, **headers: str) -> tuple[int, str]:
    """Send a request with exactly these headers; underscores in names become hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return _send(url, "POST", path, body, {"Host": httpx.URL(url).netloc.decode(), **JSON_TYPE, **named})


def _send(url: str, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
    port = httpx.URL(url).port
    assert port is not None
    lines = [f"{method} {path} HTTP/1.1", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    head, _, text = answer.decode().partition("\r\n\r\n")
    return int(head.split(" ", 2)[1]), head + "\n" + text


@pytest.fixture(scope="module")
def url() -> Generator[str]:
    with serving(search_app(DOCUMENTS)) as found:
        yield found


@pytest.fixture(scope="module")
def guarded() -> Generator[str]:
    with serving(search_app(DOCUMENTS, access=Access(token=TOKEN))) as found:
        yield found


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:1", "LocalHost:99", "127.0.0.1", "127.0.0.1:9", "127.8.9.1:80", "[::1]:5"],
)
def test_names_of_loopback_are_served(url: str, host: str):
    assert _post(url, Host=host)[0] == 200


FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0"]
FOREIGN += [
    "192.168.0.1:80",
    "[::2]",
    "",
    "127.0.0.1@evil.example",
    "127.0.0.1:80:evil.example",
    "::1",
    "[::1",
]


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_other_host_names_are_rejected_against_dns_rebinding(url: str, host: str, method: str):
    path = "/retrieve" if method == "POST" else "/v1/ping"
    status, said = _send(url, method, path, BODY, {"Host": host, **JSON_TYPE})
    assert status == 403, said
    assert "pong" not in said
    assert "sleep" not in said


def test_a_request_that_names_no_host_is_refused(url: str):
    port = httpx.URL(url).port
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        sock.sendall(b"GET /v1/ping HTTP/1.0\r\n\r\n")
        assert b" 403 " in sock.recv(65536).partition(b"\r\n")[0]


def test_a_host_that_is_allowed_is_served_and_the_others_are_not():
    with serving(search_app(DOCUMENTS, access=Access(hosts=("Box.example",)))) as url:
        assert _post(url, Host="box.example:8000")[0] == 200
        assert _post(url, Host="localhost")[0] == 200
        assert _post(url, Host="other.example")[0] == 403


def test_all_hosts_can_be_allowed():
    with serving(search_app(DOCUMENTS, access=Access(hosts=None))) as url:
        assert _post(url, Host="anything.example")[0] == 200


@pytest.mark.parametrize("hosts", [(), None])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:1", "http://127.0.0.1", "null", ""]
)
def test_pages_of_other_origins_are_refused(origin: str, hosts: tuple[str, ...] | None):
    with serving(search_app(DOCUMENTS, access=Access(hosts=hosts))) as url:
        status, said = _post(url, Origin=origin)
    assert (status, "sleep" in said) == (403, False)


def test_page_of_a_rebound_name_is_rejected_even_if_all_hosts_are_allowed():
    with serving(search_app(DOCUMENTS, access=Access(hosts=None))) as url:
        assert _post(url, Host="evil.example", Origin="http://evil.example")[0] == 403


def test_the_own_origin_is_served(url: str):
    own = httpx.URL(url).netloc.decode()
    assert _post(url, Origin=f"http://{own}", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site", "other"])
def test_requests_across_sites_are_refused(url: str, site: str):
    assert _post(url, Sec_Fetch_Site=site)[0] == 403
    headers = {"Host": "localhost", "Sec-Fetch-Site": site}
    assert _send(url, "GET", "/v1/ping", b"", headers)[0] == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_content_types_that_pages_send_without_preflight_are_rejected(url: str, kind: str):
    status, said = _post(url, Content_Type=kind)
    assert status == 415
    assert "application/json" in said


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_served_with_parameters_too(url: str, kind: str):
    assert _post(url, Content_Type=kind)[0] == 200


def test_nobody_is_given_leave_to_send_from_another_origin(url: str):
    headers = {"Host": "localhost", "Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    status, said = _send(url, "OPTIONS", "/retrieve", b"", headers)
    assert status == 403
    assert "access-control-allow" not in said.lower()


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain", "Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json", "Origin": "https://evil.example"},
        {"Content-Type": "application/json", "Host": "evil.example", "Origin": "http://evil.example"},
    ],
)
@pytest.mark.parametrize("path", ["/run_code", "/run_jupyter"])
def test_a_page_cannot_run_code(headers: dict[str, str], path: str):
    made = 0

    def make() -> Sandbox:
        nonlocal made
        made += 1
        return UnsafeSubprocessSandbox()

    with serving(sandbox_app(make_sandbox=make)) as url:
        assert httpx.get(f"{url}/v1/ping", trust_env=False).json() == "pong"
        before = made  # it has determined its languages
        body = b'{"code": "print(1)", "language": "python", "cells": ["print(1)"]}'
        status, said = _send(url, "POST", path, body, {"Host": "127.0.0.1", **headers})
    assert status in (403, 415), said
    assert made == before


def test_request_with_the_token_is_served(guarded: str):
    assert _post(guarded, Authorization=f"Bearer {TOKEN}")[0] == 200
    assert _post(guarded, Authorization=f"bearer {TOKEN}")[0] == 200


WRONG = [
    "",
    "Bearer",
    "Bearer ",
    f"Bearer {TOKEN}x",
    f"Bearer {TOKEN[:-1]}",
    f"Basic {TOKEN}",
    TOKEN,
    "Bearer ä",
]


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_token_is_refused_and_not_repeated(guarded: str, given: str):
    status, said = _post(guarded, Authorization=given)
    assert status == 401
    assert "www-authenticate: bearer" in said.lower()
    assert TOKEN not in said


def test_response_without_a_token_says_only_that_one_is_needed(guarded: str):
    assert _post(guarded)[0] == 401
    assert _post(guarded, path="/nowhere")[0] == 401
    assert _send(guarded, "GET", "/retrieve", b"", {"Host": "localhost"})[0] == 401


def test_a_ping_needs_no_token(guarded: str):
    """Monitoring of services uses it."""
    assert httpx.get(f"{guarded}/v1/ping", trust_env=False).json() == "pong"


def test_the_token_does_not_save_a_page(guarded: str):
    assert _post(guarded, Authorization=f"Bearer {TOKEN}", Origin="https://evil.example")[0] == 403


def test_a_token_is_not_shown():
    assert TOKEN not in repr(Access(token=TOKEN))


@pytest.mark.parametrize("wrong", [{"token": ""}, {"token": "two words are no token"}, {"hosts": ("a:80",)}])
def test_invalid_access_options_are_rejected(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=r"token|host"):
        Access(**wrong)
