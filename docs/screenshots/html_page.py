"""Screenshots of a page: `python docs/screenshots/html_page.py rollouts out/`, with Chromium and playwright.

Per scheme, light and dark: the overview; the trajectory with the most failed calls, or the worst score; and
the timeline of the last batch, if there is one.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from torchrl_agentic.records import Dump
from torchrl_agentic.viewer.html import write_page


def main() -> None:
    """Read the arguments, and take all screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dump", type=Path, help="a folder of a dump, or one of its files")
    parser.add_argument("out", type=Path, help="the folder for the images")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=900)
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "page.html"
        with Dump(told.dump) as dump:
            write_page(dump, page)
        # Chromium's own sandbox does not start for root, nor in most containers.
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            take(browser, page, told.out, scheme, told.width, told.height)
        browser.close()


def take(browser: Browser, page: Path, out: Path, scheme: str, width: int, height: int) -> None:
    """Take the screenshots of one color scheme."""
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    tab.goto(page.as_uri())
    tab.locator(".chart svg").first.wait_for()
    tab.screenshot(path=out / f"html-overview-{scheme}.png")
    has_errors = tab.evaluate("rows.some((row) => row.errors)")
    tab.locator("#order").select_option("errors" if has_errors else "worst")
    tab.locator("[role=option]").first.click()
    tab.locator("section.turn").first.wait_for()
    tab.screenshot(path=out / f"html-trajectory-{scheme}.png")
    if tab.get_by_role("link", name="Timeline").is_visible():
        tab.get_by_role("link", name="Timeline").click()
        tab.locator(".time-box canvas").wait_for()
        tab.get_by_role("button", name="Next straggler").click()
        tab.locator("main").evaluate("(main) => main.scrollTo(0, 0)")
        tab.wait_for_timeout(200)  # the canvas is drawn in the next frame
        tab.screenshot(path=out / f"html-timeline-{scheme}.png")
    tab.close()


if __name__ == "__main__":
    main()
