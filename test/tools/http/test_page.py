"""Pages as text, made in a sandbox where there is one, and in a process with limits elsewhere."""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from helpers.limit import limit

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.sandbox.tiers import tiers
from torchrl_agentic.tools.http import HttpTool, http_client
from torchrl_agentic.tools.http.http_client import PageReader

HTML = """<html><head><title>T</title><style>x{}</style></head><body><h1>Trees</h1><script>alert(1)</script>
<p>Some <b>grün</b> leaves.</p>
<table><tr><td>oak</td><td>9</td></tr><tr><td>fir</td><td>7</td></tr></table></body>"""
LOOK = """
import json, os, socket, urllib.request
seen = {{"pid": os.getpid(), "env": dict(os.environ)}}
try:
    seen["file"] = open({file!r}).read()
except OSError as error:
    seen["file"] = None
try:
    open({file!r} + ".new", "w")
    seen["written"] = True
except OSError as error:
    seen["written"] = False
try:
    socket.create_connection(("127.0.0.1", {port}), 5).close()
    seen["reached"] = True
except OSError as error:
    seen["reached"] = False
seen["left"] = os.path.exists("left")
open("left", "w").close()
text = json.dumps(seen)
"""
"""What code that took over the parser would try, in the place of the parser."""
WORKING = [kind for kind, reason in tiers() if reason is None]


def _only(kinds: list[type[Sandbox]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these kinds of sandboxes work alone, of those that do."""
    monkeypatch.setattr(
        "torchrl_agentic.sandbox.tiers.TIERS",
        [(kind, lambda kind=kind: None if kind in kinds else "switched off") for kind, _ in tiers()],
    )
    tiers.cache_clear()
    http_client.page_sandbox.cache_clear()


@pytest.fixture(autouse=True)
def _forget_tiers() -> Generator[None]:
    """Let the tests behind this one find the sandboxes of the machine; set up first, so ended last."""
    yield
    tiers.cache_clear()
    http_client.page_sandbox.cache_clear()


@pytest.fixture(params=[*WORKING, None], ids=lambda kind: kind.name if kind else "none")
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[type[Sandbox] | None]:
    """Read pages in each kind of sandbox that works here, and without one."""
    _only([] if request.param is None else [request.param], monkeypatch)
    yield request.param
    monkeypatch.undo()
    tiers.cache_clear()
    http_client.page_sandbox.cache_clear()


@pytest.mark.usefixtures("tier")
async def test_page_is_converted_to_readable_text():
    text = await PageReader().text_of(HTML, 1000)
    assert text is not None
    assert text.split() == ["Trees", "Some", "grün", "leaves.", "oak", "9", "fir", "7"]
    assert await PageReader().text_of(HTML, 7) == "Trees\n\n"


@pytest.mark.usefixtures("tier")
async def test_a_page_that_would_take_gigabytes_is_given_up():
    """In our own process its layout makes 800 MB of text."""
    html = "<table><tr><td>" + "a" * 100_000 + "</td></tr>" + "<tr><td>b</td></tr>" * 8000 + "</table>"
    async with asyncio.timeout(limit(30)):
        assert await PageReader().text_of(html, 1000) is None


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize(
    "code", ["1 / 0", "import os; os._exit(3)", "import os, signal; os.kill(os.getpid(), 9)"]
)
async def test_crashing_html_parser_affects_only_its_page(code: str):
    async with asyncio.timeout(limit(30)):
        assert await PageReader(code).text_of(HTML, 1000) is None
        assert await PageReader().text_of(HTML, 5) == "Trees"


@pytest.mark.usefixtures("tier")
async def test_pages_that_are_read_at_once_get_their_own_texts():
    reader = PageReader()
    texts = await asyncio.gather(*(reader.text_of(f"<p>page {n}</p>", 100) for n in range(6)))
    assert [text and text.strip() for text in texts] == [f"page {n}" for n in range(6)]


async def test_page_reader_has_no_access_to_host_network_or_other_pages(
    tier: type[Sandbox] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # without a sandbox, the code writes there
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "1")
    (tmp_path / "secret").write_text("of the host")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        code = LOOK.format(file=str(tmp_path / "secret"), port=listening.getsockname()[1])
        reader = PageReader(code)
        first, second = [await _seen(reader) for _ in range(2)]
    assert "SECRET_OF_THE_TRAINER" not in first["env"]
    assert first["pid"] != os.getpid()
    if tier is None:  # the same code shows that there was something to see
        assert (first["file"], first["reached"]) == ("of the host", True)
        return
    for seen in (first, second):
        assert (seen["file"], seen["written"], seen["reached"], seen["left"]) == (None, False, False, False)


async def _seen(reader: PageReader) -> dict[str, Any]:
    text = await reader.text_of("", 100_000)
    assert text is not None
    return json.loads(text)


async def test_without_a_sandbox_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    _only([], monkeypatch)
    with caplog.at_level(logging.WARNING):
        texts = await asyncio.gather(*(PageReader().text_of(HTML, 5) for _ in range(3)))
    assert texts == ["Trees"] * 3
    (record,) = [record for record in caplog.records if record.name == http_client.__name__]
    assert "without a sandbox" in record.getMessage()
    assert "switched off" in record.getMessage()
    http_client.page_sandbox.cache_clear()
    tiers.cache_clear()


async def test_with_a_sandbox_there_is_no_warning(caplog: pytest.LogCaptureFixture):
    if not WORKING:
        pytest.skip("no sandbox works here")
    http_client.page_sandbox.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert await PageReader().text_of(HTML, 5) == "Trees"
    assert not [record for record in caplog.records if record.name == http_client.__name__]


@pytest.mark.usefixtures("tier")
async def test_cancelled_pages_free_their_slots():
    reader = PageReader("import time\nwhile html == 'wait': time.sleep(0.1)\ntext = html")
    assert await reader.text_of("once", 9) == "once"
    async with asyncio.timeout(limit(30)):
        tasks = [asyncio.create_task(reader.text_of("wait", 9)) for _ in range(2 * http_client.AT_ONCE)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await reader.text_of("again", 9) == "again"


async def test_without_a_sandbox_a_cancelled_page_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    _only([], monkeypatch)
    number = tmp_path / "pid"
    code = f"import os, time; open({str(number)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(600)"
    task = asyncio.create_task(PageReader(code).text_of(HTML, 1000))
    async with asyncio.timeout(limit(10)):
        while not (number.exists() and number.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


def test_missing_extra_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"torchrl-agentic\[html\]"):
        HttpTool(html="ask")
    HttpTool()
