"""`as_tool(BrowserTransform())` without a browser; `test_chromium` has a browser."""

import asyncio

import pytest
from helpers.legacy_envs import call, run
from torchrl.envs.llm.transforms import (
    BrowserTransform,
)

from torchrl_agentic import as_tool
from torchrl_agentic.errors import InfrastructureError, ToolError


class Browser(BrowserTransform):
    """A browser without a browser: its visitors may have to meet, and it keeps a diary."""

    def __init__(self, meeting=1, **options):
        super().__init__(**options)
        self.diary, self.meeting = [], asyncio.Barrier(meeting)

    async def _init_browser(self):
        self.diary.append("init")

    async def _navigate(self, url):
        await self.meeting.wait()
        self.page = url
        return {"success": True, "result": {"url": url, "status": 200}}

    async def _click(self, selector):
        return {"success": False, "error": f"no element {selector}"}

    async def _extract(self, selector, extract_type, attribute=None):
        return {"success": True, "result": {"content": self.page}}

    def close(self):
        if "diary" in self.__dict__:
            self.diary.append("close")


def go(url, **more):
    return call("browser", action="navigate", url=url, **more)


SEE = call("browser", action="extract", selector="p", extract_type="text")


class TestBrowserTransform:
    def test_result_contains_only_the_answer(self, chat):
        chat = chat(1, as_tool(Browser(), name="browser"))
        assert chat.step(go("https://a.org")) == [['{"url": "https://a.org", "status": 200}']]

    def test_rows_are_at_it_at_once(self, chat):
        """Each waits for the others: one after the other, none would return."""
        chat = chat(3, as_tool(Browser(meeting=3), name="browser"))
        chat.step(*[go("https://a.org")] * 3)
        assert chat.errors() == [0] * 3

    def test_each_row_sees_its_own_page(self, chat):
        chat = chat(2, as_tool(Browser(), name="browser"))
        chat.step(go("https://a.org"), go("https://b.org"))
        assert chat.step(SEE, SEE) == [['{"content": "https://a.org"}'], ['{"content": "https://b.org"}']]

    def test_a_masked_reset_leaves_the_pages_of_the_others(self, chat):
        chat = chat(2, as_tool(Browser(), name="browser"))
        chat.step(go("https://a.org"), go("https://b.org"))
        chat.reset(True, False)
        assert chat.step(SEE, SEE) == [['{"content": null}'], ['{"content": "https://b.org"}']]

    def test_it_is_started_once(self, chat):
        browser = Browser()
        chat = chat(2, as_tool(browser, name="browser"))
        chat.step(go("https://a.org"), go("https://b.org"))
        chat.reset(True, True)
        chat.step(go("https://a.org"), go("https://b.org"))
        assert browser.diary == ["init"]

    def test_reported_failure_is_an_error(self, chat):
        chat = chat(1, as_tool(Browser(), name="browser"))
        assert chat.step(call("browser", action="click", selector="#x")) == [["no element #x"]]
        assert chat.errors() == [1]

    @pytest.mark.parametrize(
        ("allowed", "url"),
        [
            (["example.org"], "https://example.org/"),
            (["example.org"], "https://docs.example.org/"),
            (["Example.org"], "https://user@EXAMPLE.org:8443/"),
            (["example.org:8443"], "https://example.org:8443/"),
            (None, "http://anywhere.net"),
        ],
    )
    def test_an_allowed_host_is_visited(self, allowed, url):
        tool = as_tool(Browser(allowed_domains=allowed), name="browser")
        assert not run(tool, {"action": "navigate", "url": url}).is_error
        asyncio.run(tool.teardown())

    @pytest.mark.parametrize(
        ("allowed", "url"),
        [
            (["example.org"], "https://notexample.org/"),
            (["example.org"], "https://example.org.evil.net/"),
            (["example.org"], "https://example.org@evil.net/"),
            (["example.org"], "https://evil.net/#example.org"),
            (["example.org"], "file://example.org/etc/passwd"),
            (None, "file:///etc/passwd"),
            (None, "chrome://settings"),
            (None, "http://[broken"),
        ],
    )
    def test_another_host_and_files_of_this_machine_are_not(self, allowed, url):
        """TorchRL compares ends of strings, and lets any scheme through."""
        browser = Browser(allowed_domains=allowed)
        with pytest.raises(ToolError):
            run(as_tool(browser, name="browser"), {"action": "navigate", "url": url})
        assert browser.diary == []

    def test_browser_that_cannot_start_gives_infra(self):
        class Absent(Browser):
            async def _init_browser(self):
                raise ModuleNotFoundError("No module named 'playwright'")

        tool = as_tool(Absent(), name="browser")
        with pytest.raises(InfrastructureError, match="pip install playwright"):
            run(tool, {"action": "navigate", "url": "https://a.org"})
        asyncio.run(tool.teardown())

    def test_a_call_that_is_given_up_leaves_the_browser_to_the_others(self, chat):
        """The first row waits for a partner that never comes."""
        chat = chat(2, as_tool(Browser(meeting=2), name="browser"), per_call_timeout=0.5)
        assert "did not finish" in chat.step(go("https://a.org"), "x")[0][0]
        chat.step(go("https://a.org"), go("https://b.org"))
        assert chat.errors() == [0, 0]

    def test_it_is_closed_with_the_environment_and_works_again(self, chat):
        browser = Browser()
        chat = chat(1, as_tool(browser, name="browser"))
        chat.step(go("https://a.org"))
        chat.compose.close()
        assert browser.diary == ["init", "close"]
        chat.step(go("https://a.org"))
        assert browser.diary == ["init", "close", "init"]

    def test_an_argument_that_is_missing_is_an_error_that_names_it(self, chat):
        chat = chat(3, as_tool(Browser(), name="browser", input_schema={"type": "object"}))
        found = chat.step(call("browser", action="navigate"), call("browser"), go("https://a.org"))
        assert chat.errors() == [1, 1, 0]
        assert "'url'" in found[0][0]
        assert "'action'" in found[1][0]

    def test_schema_lists_the_actions(self, chat):
        tool = as_tool(Browser(), name="browser")
        assert "web pages" in tool.description
        assert "extract_type" in tool.spec()["function"]["parameters"]["properties"]
        chat = chat(1, tool)
        chat.step(call("browser", action="click"))
        assert chat.errors() == [1]

    def test_another_name_is_an_error_that_says_its_own(self):
        with pytest.raises(ValueError, match="has no tool 'web'; it has browser"):
            as_tool(Browser(), name="web")
