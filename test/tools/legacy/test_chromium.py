"""`as_tool(BrowserTransform())` with a real Chromium: deselected by default, see `make test-legacy`."""

import json
import os

import pytest
from helpers.browser_site import Site
from helpers.chromium import browsers_folder
from helpers.legacy_envs import call, gone, run
from helpers.processes import children
from torchrl.envs.llm.transforms import BrowserTransform

from torchrl_agentic import as_tool
from torchrl_agentic.testing.servers.embedded import serving
from torchrl_agentic.tools.legacy.base import end_trees

pytestmark = pytest.mark.legacy


@pytest.fixture(autouse=True)
def _browsers(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(browsers_folder(tmp_path / "browsers")))


@pytest.fixture(scope="module")
def url():
    with serving(Site()) as url:
        yield url


def go(url):
    return call("browser", action="navigate", url=url)


def read(selector="#title", what="text", **more):
    return call("browser", action="extract", selector=selector, extract_type=what, **more)


def contents(answers):
    return [json.loads(row[0])["content"] for row in answers]


def test_a_row_navigates_reads_types_clicks_and_scrolls(chat, url):
    chat = chat(1, as_tool(BrowserTransform(), name="browser"))
    assert json.loads(chat.step(go(url + "/"))[0][0]) == {"url": url + "/", "status": 200}
    assert contents(chat.step(read())) == ["/"]
    assert contents(chat.step(read("#link", "attribute", attribute="href"))) == ["/other"]
    chat.step(call("browser", action="type", selector="#name", text="Ada"))
    chat.step(call("browser", action="scroll", scroll_amount=10))
    chat.step(call("browser", action="click", selector="#link"))
    assert contents(chat.step(read())) == ["/other"]
    assert chat.errors() == [0]


def test_rows_load_pages_at_once_and_have_pages_and_cookies_of_their_own(chat, url):
    """The server answers neither before both have come. TorchRL has one page for the whole batch."""
    chat = chat(2, as_tool(BrowserTransform(), name="browser"))
    chat.step(go(url + "/meet"), go(url + "/meet"))
    assert chat.errors() == [0, 0]
    chat.step(go(url + "/set?ada"), go(url + "/set?bob"))
    chat.step(go(url + "/a"), go(url + "/b"))
    assert contents(chat.step(read(), read())) == ["/a", "/b"]
    assert contents(chat.step(read("#cookie"), read("#cookie"))) == ["of who=ada", "of who=bob"]


def test_a_masked_reset_gives_that_row_a_new_page_and_leaves_the_other(chat, url):
    chat = chat(2, as_tool(BrowserTransform(), name="browser"))
    chat.step(go(url + "/set?ada"), go(url + "/set?bob"))
    chat.reset(True, False)
    chat.step(go(url + "/a"), "x")
    assert contents(chat.step(read(), read())) == ["/a", "/set"]
    assert contents(chat.step(read("#cookie"), "x")[:1]) == ["of "]


def test_its_timeout_counts_though_torchrl_ignores_it(chat, url):
    chat = chat(1, as_tool(BrowserTransform(timeout=3), name="browser"))
    chat.step(go(url + "/"))
    assert "Timeout 3000ms" in chat.step(read("#absent"))[0][0]
    assert chat.errors() == [1]


def test_a_call_that_is_given_up_leaves_the_browser_to_the_others(chat, url):
    chat = chat(2, as_tool(BrowserTransform(), name="browser"), per_call_timeout=8)
    chat.step(go(url + "/a"), go(url + "/b"))
    assert "did not finish" in chat.step(go(url + "/hang"), "x")[0][0]
    assert contents(chat.step("x", read())[1:]) == ["/b"]
    chat.step(go(url + "/c"), "x")
    assert contents(chat.step(read(), "x")[:1]) == ["/c"]


def test_a_browser_that_crashed_is_started_again(chat, url):
    before = processes()
    chat = chat(1, as_tool(BrowserTransform(), name="browser"))
    chat.step(go(url + "/a"))
    _driver, *browser = [pid for pid in processes() if pid not in before]
    end_trees(browser)
    assert all(gone(pid) for pid in browser)
    chat.step(go(url + "/b"))
    assert contents(chat.step(read())) == ["/b"]


def test_closing_ends_the_browser_and_its_driver(chat, url):
    before = processes()
    chat = chat(1, as_tool(BrowserTransform(), name="browser"))
    chat.step(go(url + "/a"))
    pids = [pid for pid in processes() if pid not in before]
    assert len(pids) > 1
    chat.compose.close()
    assert all(gone(pid) for pid in pids)
    chat.step(go(url + "/b"))
    assert contents(chat.step(read())) == ["/b"]


def test_files_of_this_machine_are_refused(tmp_path):
    secret = tmp_path / "secret.html"
    secret.write_text("<h1 id=title>secret</h1>")
    tool = as_tool(BrowserTransform(), name="browser")
    with pytest.raises(Exception, match="only http and https"):
        run(tool, {"action": "navigate", "url": secret.as_uri()})


def processes():
    """Return the processes that this one has started, and all that they have started."""
    found = children(os.getpid())
    for pid in found:
        found += children(pid)
    return found
