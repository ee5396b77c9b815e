"""Playwright's folder of browsers, with the system's Chromium in it."""

import json
import shutil
import stat
from pathlib import Path

import pytest

HOW = "needs Chromium and playwright: apt-get install chromium; pip install playwright, or `make test-legacy`"


def browsers_folder(folder):
    """Make what `PLAYWRIGHT_BROWSERS_PATH` shall be: TorchRL lets nobody choose the browser.

    Where playwright looks for a headless shell of its own stands a script that starts the system's Chromium.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        import playwright
    except ImportError:
        pytest.fail(f"no playwright: this {HOW}")
    if chromium is None:
        pytest.fail(f"no chromium: this {HOW}")
    listed = json.loads((Path(playwright.__file__).parent / "driver/package/browsers.json").read_text())
    revision = next(b["revision"] for b in listed["browsers"] if b["name"] == "chromium-headless-shell")
    script = (
        Path(folder)
        / f"chromium_headless_shell-{revision}/chrome-headless-shell-linux64/chrome-headless-shell"
    )
    script.parent.mkdir(parents=True)
    # Chromium's own sandbox does not start for root, nor in most containers.
    script.write_text(f'#!/bin/sh\nexec {chromium} --no-sandbox "$@" 2>/dev/null\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder
