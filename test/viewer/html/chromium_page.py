"""A page in headless Chromium, which is watched: it may say nothing, ask nothing and fetch nothing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOW = "apt-get install chromium; pip install playwright, or `make test-browser`"


@contextlib.contextmanager
def opened(page: Path | str, *, quiet: bool = True, **options: Any) -> Iterator[Any]:
    """Open a file or an address; fails where the page speaks, opens a dialog, raises, or asks for another file.

    quiet: whether it must not write to the console either.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise RuntimeError(f"this needs playwright: {HOW}") from None
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise RuntimeError(f"this needs Chromium: {HOW}")
    address = page.as_uri() if isinstance(page, Path) else page
    heard: list[str] = []
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not start for root, nor in most containers.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(**options)
        tab.on("pageerror", lambda error: heard.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: (heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        tab.on("request", lambda request: _asked(request.url, address, heard))
        if quiet:
            tab.on("console", lambda message: heard.append(f"console: {message.text}"))
        tab.goto(address)
        yield tab
        browser.close()
    assert not heard


def _asked(url: str, address: str, heard: list[str]) -> None:
    if url.split("#")[0] != address.split("#")[0] and not url.startswith("blob:"):
        heard.append(f"request: {url}")
