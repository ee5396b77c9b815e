"""A folder of browsers for Playwright that holds the system's Chromium."""

import json
import shutil
import stat
from pathlib import Path

import pytest

HOW = "needs Chromium and playwright: apt-get install chromium; pip install playwright, or `make test-legacy`"


def browsers_folder(folder):
    """Create the folder for `PLAYWRIGHT_BROWSERS_PATH`, because TorchRL has no option for the browser.

    At the path of Playwright's own headless shell it holds a script that starts the system's Chromium.
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
