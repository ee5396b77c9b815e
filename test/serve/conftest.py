"""The server that the wire tests use: ours, or the one whose URL is in SANDBOX_FUSION_URL."""

import os
from collections.abc import Callable, Generator
from typing import Any

import httpx
import pytest
from helpers.limit import limit

from torchrl_agentic.sandbox.forkserver_sandbox import cannot_work
from torchrl_agentic.serve.sandbox_app import sandbox_app
from torchrl_agentic.serve.serving import serving

GIVEN = os.environ.get("SANDBOX_FUSION_URL", "").removesuffix("/").removesuffix("/run_code")
Run = Callable[..., dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a fork server, or our own server, where there is none."""
    for item in items:
        if item.path.parent.name != "serve" or item.get_closest_marker("no_sandbox"):
            continue
        if cannot_work() is not None:
            item.add_marker(pytest.mark.skip(reason=f"the fork server does not work here: {cannot_work()}"))
        elif GIVEN and item.get_closest_marker("embedded"):
            item.add_marker(pytest.mark.skip(reason="our server is stricter than the original"))


@pytest.fixture(scope="session")
def url() -> Generator[str]:
    if GIVEN:
        yield GIVEN
        return
    with serving(sandbox_app()) as ours:
        yield ours


@pytest.fixture(scope="session")
def http(url: str) -> Generator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=limit(60), trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def run(http: httpx.Client) -> Run:
    """Send a program, and return the response."""

    def send(code: str, language: str = "python", **more: Any) -> dict[str, Any]:
        answer = http.post("/run_code", json={"code": code, "language": language, **more})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return send
