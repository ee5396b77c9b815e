"""A page in headless Chromium, which is watched: it may say nothing, ask nothing and fetch nothing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HOW = "apt-get install chromium; pip install playwright, or `make test-browser`"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail(f"this needs playwright: {HOW}")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail(f"this needs Chromium: {HOW}")
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root, nor in most containers.
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Callable[..., Any]:
    """Open a file or an address; fails where the page opens a dialog, raises, or fetches another file.

    quiet: whether it must not write to the console either.
    """

    @contextlib.contextmanager
    def open_page(page: Path | str, *, quiet: bool = True, **options: Any) -> Iterator[Any]:
        address = page.as_uri() if isinstance(page, Path) else page
        heard: list[str] = []
        tab = browser.new_page(**options)
        tab.on("pageerror", lambda error: heard.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: (heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        tab.on("request", lambda request: _asked(request.url, address, heard))
        if quiet:
            tab.on("console", lambda message: heard.append(f"console: {message.text}"))
        tab.goto(address)
        yield tab
        tab.close()
        assert not heard

    return open_page


def _asked(url: str, address: str, heard: list[str]) -> None:
    if url.split("#")[0] != address.split("#")[0]:
        heard.append(f"request: {url}")
