"""The time until the viewer shows a dump of 1 GB, and the time from one trajectory to the next.

The dump is written once, some 45 KB a trajectory, and removed at the end; json reads it line by line beside.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrl_agentic.messages import DispatchResult, Message, ParsedCall, Timing, ToolResult, Turn
from torchrl_agentic.records import TrajectoryRecord, record_to_json
from torchrl_agentic.viewer.app import RolloutViewer
from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.query import parse
from torchrl_agentic.viewer.state import ViewerState

Benchmark = Callable[..., Any]
BYTES = 1 << 30
TEXT = "Several words that stand in a message of a trajectory, again and again.\n" * 100


def _record(number: int) -> TrajectoryRecord:
    call = ParsedCall("python", {"code": f"print({number})"}, "call_0")
    result = ToolResult.from_text(f"{number}\n{TEXT}")
    result = ToolResult(result.parts, timing=Timing(0.0, 0.001, 0.02))
    context = (Message("user", f"Question {number // 8}: {TEXT}"),)
    outcome = DispatchResult("", (call,), (result,))
    first = Turn("t", 0, Message("assistant", "I compute."), outcome, (), context)
    last = Turn("t", 1, Message("assistant", f"It is {number}. {TEXT}"), DispatchResult())
    return TrajectoryRecord(f"{number:08x}", (first, last), score=number % 97 / 97, trajectory=f"t{number}")


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a dump of 1 GB."""
    path = tmp_path_factory.mktemp("dump") / "1.jsonl"
    size = 0
    with path.open("w") as file:
        while size < BYTES:
            size += file.write(json.dumps(record_to_json(_record(size))) + "\n")
    yield path
    path.unlink()


async def first_screen(path: Path) -> int:
    """Start the viewer, and wait until a trajectory is on the screen."""
    viewer = RolloutViewer(ViewerState(Library(path)))
    async with viewer.run_test(size=(80, 24)) as pilot:
        while not viewer.page.virtual_size.height or viewer.state.list.opened.row is None:
            await pilot.pause(0.005)
        return len(viewer.state.list.shown)


def test_first_screen(benchmark: Benchmark, dump: Path) -> None:
    benchmark.group = "viewer: the first screen of 1 GB"
    found = benchmark.pedantic(lambda: asyncio.run(first_screen(dump)), rounds=5, warmup_rounds=1)
    assert found > 0


def test_all_lines_by_json(benchmark: Benchmark, dump: Path) -> None:
    """Drop each line after reading it; a viewer would keep the lines."""
    benchmark.group = "viewer: the first screen of 1 GB"

    def read() -> int:
        with dump.open() as file:
            return sum(1 for line in file if json.loads(line))

    assert benchmark.pedantic(read, rounds=1) > 1000


@pytest.fixture(scope="module")
def state(dump: Path) -> Iterator[ViewerState]:
    """Return a dump that has been read completely."""
    library = Library(dump)
    found = ViewerState(library)
    while library.work():
        found.catch_up()
    yield found
    library.close()


def test_index_and_summaries(benchmark: Benchmark, dump: Path) -> None:
    benchmark.group = "viewer: all of 1 GB"

    def read() -> int:
        library = Library(dump)
        while library.work():
            pass
        library.close()
        return len(library.listing.shown)

    assert benchmark.pedantic(read, rounds=1) > 1000


def test_search(benchmark: Benchmark, state: ViewerState) -> None:
    benchmark.group = "viewer: all of 1 GB"

    def search() -> int:
        state.search.begin("Question 77:")
        while state.library.work():
            pass
        return sum(state.library.counts.values())

    assert benchmark.pedantic(search, rounds=1) >= 0


def test_sort_and_filter(benchmark: Benchmark, state: ViewerState) -> None:
    benchmark.group = "viewer: all of 1 GB"

    def ask() -> int:
        state.list.sort, state.list.query = "score descending", parse("score>0.25 tool:python")
        state.list.ask()
        while state.library.work():
            pass
        return len(state.list.shown)

    assert benchmark.pedantic(ask, rounds=3) > 1000


def test_next_trajectory(benchmark: Benchmark, state: ViewerState) -> None:
    """Measure from the key press to the visible lines of the page."""
    benchmark.group = "viewer: from one trajectory to the next"

    def go() -> int:
        state.list.go(37)
        return len(state.page.lay_out(80).lines)

    assert benchmark.pedantic(go, rounds=200) > 10


def test_next_trajectory_of_100_mb(benchmark: Benchmark, tmp_path: Path) -> None:
    benchmark.group = "viewer: from one trajectory to the next"
    record = _record(1)
    said = Turn("t", 0, Message("assistant", TEXT * (10**8 // len(TEXT))), DispatchResult())
    long = TrajectoryRecord("long", (said,), score=1.0, trajectory="long")
    lines = [json.dumps(record_to_json(one)) for one in (record, long)]
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    library = Library(tmp_path)
    state = ViewerState(library)
    while library.work():
        state.catch_up()

    def go() -> int:
        state.list.go(1)
        return len(state.page.lay_out(80).lines)

    assert benchmark.pedantic(go, rounds=50) > 10
    library.close()
    (tmp_path / "1.jsonl").unlink()
