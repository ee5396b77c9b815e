"""Pages as text, made in a process with limits."""

import asyncio
import os
from pathlib import Path

import pytest

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.tools.web import HttpTool, page
from torchrl_agentic.tools.web.page import PageReader

HTML = """<html><head><title>T</title><style>x{}</style></head><body><h1>Trees</h1><script>alert(1)</script>
<p>Some <b>grün</b> leaves.</p>
<table><tr><td>oak</td><td>9</td></tr><tr><td>fir</td><td>7</td></tr></table></body>"""


async def test_a_page_becomes_what_one_reads():
    text = await PageReader().text_of(HTML, 1000)
    assert text is not None
    assert text.split() == ["Trees", "Some", "grün", "leaves.", "oak", "9", "fir", "7"]
    assert await PageReader().text_of(HTML, 7) == "Trees\n\n"


async def test_a_page_that_would_take_gigabytes_is_given_up():
    """In our own process its layout makes 800 MB of text."""
    html = "<table><tr><td>" + "a" * 100_000 + "</td></tr>" + "<tr><td>b</td></tr>" * 8000 + "</table>"
    async with asyncio.timeout(20):
        assert await PageReader().text_of(html, 1000) is None


async def test_a_page_that_is_no_longer_wanted_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    number = tmp_path / "pid"
    script = f"import os, time; open({str(number)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    monkeypatch.setattr(page, "_CHILD", script)
    task = asyncio.create_task(PageReader().text_of(HTML, 1000))
    async with asyncio.timeout(10):
        while not (number.exists() and number.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


def test_without_the_extra_the_constructor_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[html\]"):
        HttpTool(html="ask")
    HttpTool()
