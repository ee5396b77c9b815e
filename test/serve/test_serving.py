"""`serving`: any ASGI application, in a thread or in a process of its own."""

from typing import Any

import httpx
import pytest
from helpers.limit import limit

from torchrl_agentic.serve.serving import serving


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Say hello to any question."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})


def test_an_application_is_served_until_the_block_ends():
    with serving(hello) as url:
        assert httpx.get(url, trust_env=False).text == "hello"
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_application_factory_is_served_by_another_process():
    with serving("starlette.applications:Starlette") as url:
        answer = httpx.get(url, trust_env=False, timeout=limit(30))
    assert answer.status_code == 404
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_a_process_that_cannot_start_refuses_connections():
    with serving("torchrl_agentic.no_such_module:app") as url, pytest.raises(httpx.TransportError):
        httpx.get(url, trust_env=False, timeout=limit(30))
