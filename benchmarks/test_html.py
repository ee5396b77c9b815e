"""The cost of writing and opening a page of 10,000 trajectories, compared with `json.loads` of the dump."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic.messages import DispatchResult, Message, ParsedCall, Status, Timing, ToolResult, Turn
from torchrl_agentic.records import Dump, Recorder, TrajectoryRecord
from torchrl_agentic.viewer.html import write_page

TRAJECTORIES, TURNS = 10_000, 4
WORDS = [
    a + b for a in ("ba", "do", "ki", "lu", "me", "no", "pa", "ru") for b in ("n", "rt", "sk", "mp", "la")
]


def _record(number: int) -> TrajectoryRecord:
    """Return a conversation of 4 turns with one call each, of about 8 kB with results."""
    chance = random.Random(number)

    def text(words: int) -> str:
        return " ".join(chance.choices(WORDS, k=words))

    def turn(index: int) -> Turn:
        call = ParsedCall("python", {"code": text(30)}, f"call_{index}_0")
        status = chance.choice([Status.OK, Status.OK, Status.ERROR])
        timing = Timing(1e9 + index, 0.001, chance.random())
        result = ToolResult.from_text(text(100), status=status)
        result = ToolResult(result.parts, status=status, timing=timing)
        context = (Message("system", text(100)), Message("user", text(30))) if index == 0 else ()
        answers = (Message("tool", result.text, tool_call_id=call.call_id),)
        outcome = DispatchResult("", (call,), (result,))
        return Turn(f"t{number}", index, Message("assistant", text(150)), outcome, answers, context)

    turns = tuple(turn(index) for index in range(TURNS))
    return TrajectoryRecord(f"r{number}", turns, step=number // 1000, score=chance.random())


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    with Recorder(folder / "0.jsonl") as recorder:
        for number in range(TRAJECTORIES):
            recorder.write(_record(number))
    return folder


@pytest.fixture(scope="module")
def page(dump: Path) -> Path:
    out = dump / "page.html"
    with Dump(dump) as opened:
        write_page(opened, out)
    return out


@pytest.mark.parametrize("which", ["json.loads", "write_page"])
def test_write(benchmark: Callable[..., Any], dump: Path, which: str) -> None:
    benchmark.group = "html: write 10,000 trajectories"

    def loads() -> None:
        for line in (dump / "0.jsonl").read_bytes().splitlines():
            json.loads(line)

    def write() -> None:
        with Dump(dump) as opened:
            write_page(opened, dump / "written.html")

    benchmark.pedantic(loads if which == "json.loads" else write, rounds=3)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.parametrize("which", ["json.loads", "first list", "a trajectory", "a search"])
def test_open(benchmark: Callable[..., Any], dump: Path, page: Path, browser: Any, which: str) -> None:
    """Compare Python's `json.loads` with opening the page in a new tab of Chromium."""
    benchmark.group = "html: open 10,000 trajectories"

    def fresh() -> tuple[tuple[Any], dict[str, Any]]:
        return (browser.new_page(),), {}

    def loads(tab: Any) -> None:
        for line in (dump / "0.jsonl").read_bytes().splitlines():
            json.loads(line)

    def first_list(tab: Any) -> None:
        tab.goto(page.as_uri(), wait_until="commit")
        tab.locator("[role=option]").first.wait_for()

    def trajectory(tab: Any) -> None:
        tab.goto(f"{page.as_uri()}#r9999", wait_until="commit")
        tab.locator("section.turn").first.wait_for()

    def search(tab: Any) -> None:
        first_list(tab)
        tab.locator("#search").fill("no such words")
        tab.get_by_role("status").get_by_text(f"0 of {TRAJECTORIES:,}", exact=True).wait_for()

    contenders = {
        "json.loads": loads,
        "first list": first_list,
        "a trajectory": trajectory,
        "a search": search,
    }
    benchmark.pedantic(contenders[which], setup=fresh, rounds=3)
    for context in browser.contexts:
        context.close()
