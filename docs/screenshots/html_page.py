"""Screenshots of a page: `python docs/screenshots/html_page.py rollouts out/`, with Chromium and playwright.

Per scheme, light and dark: the overview; the trajectory with the most failed calls, or the worst score; of a
training run its page, the samples of the prompt whose scores differ most, and the timeline of the last batch.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from torchrl_agentic.records import Dump
from torchrl_agentic.viewer.html import write_page
from torchrl_agentic.viewer.run_folder import RunFolder


def overview(tab: Page) -> bool:
    """Show the overview."""
    tab.locator(".chart svg").first.wait_for()
    return True


def trajectory(tab: Page) -> bool:
    """Show the trajectory with the most failed calls, or the worst score."""
    has_errors = tab.evaluate("rows.some((row) => row.errors)")
    tab.locator("#order").select_option("errors" if has_errors else "worst")
    tab.locator("[role=option]").first.click()
    tab.locator("section.turn").first.wait_for()
    return True


def run(tab: Page) -> bool:
    """Show the page of the training run."""
    tab.get_by_role("link", name="Training run", exact=True).click()
    tab.locator(".curve-box svg").first.wait_for()
    return True


def samples(tab: Page) -> bool:
    """Show the samples of the prompt whose scores differ most."""
    number = tab.evaluate("groups.reduce((a, b) => (b.spread > a.spread ? b : a)).number")
    tab.evaluate(f"location.hash = addressOfGroup({number})")
    tab.locator(".sample").nth(2).wait_for()
    return True


def timeline(tab: Page) -> bool:
    """Show the timeline of the last batch, if there is one."""
    if not tab.get_by_role("link", name="Timeline").is_visible():
        return False
    tab.get_by_role("link", name="Timeline").click()
    tab.locator(".time-box canvas").wait_for()
    tab.get_by_role("button", name="Next straggler").click()
    tab.locator("main").evaluate("(main) => main.scrollTo(0, 0)")
    tab.wait_for_timeout(200)  # the canvas is drawn in the next frame
    return True


PICTURES: dict[str, Callable[[Page], bool]] = {
    "overview": overview,
    "trajectory": trajectory,
    "run": run,
    "samples": samples,
    "timeline": timeline,
}


def main() -> None:
    """Read the arguments, and take all screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dump", type=Path, help="a dump, or the folder of a training run with one")
    parser.add_argument("out", type=Path, help="the folder for the images")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--only", nargs="*", choices=PICTURES, default=PICTURES, help="which pictures")
    told = parser.parse_args()
    told.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "page.html"
        run = RunFolder.of(told.dump)
        with Dump(run.dump) as dump:
            write_page(dump, page, name=run.name, metrics=run.curves())
        # Chromium's own sandbox does not start for root, nor in most containers.
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = browser.new_page(viewport={"width": told.width, "height": told.height}, color_scheme=scheme)
            for name in told.only:
                tab.goto(page.as_uri())
                if PICTURES[name](tab):
                    tab.screenshot(path=told.out / f"html-{name}-{scheme}.png")
            tab.close()
        browser.close()


if __name__ == "__main__":
    main()
