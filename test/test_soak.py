"""The soak test runs for a few simulated minutes, and its checks find what they are for."""

import asyncio
import random
import re
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from soak.accounts import Accounts
from soak.readings import SLACK, Reading, growth, left_over, slope
from soak.real import Drawn
from soak.simulated import Plan, World, soak

from torchrl_agentic import Message, ToolResult
from torchrl_agentic.messages import DispatchResult, ParsedCall, Turn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SHORT = Plan(240.0, 60.0, groups_per_batch=4, training_s=(5.0, 15.0))


def reading(minute, *, memory_mib=500.0, instances=(), **counts):
    return Reading(
        60.0 * minute,
        memory_mib,
        100.0,
        0.0,
        {**dict.fromkeys(SLACK, 10), **counts},
        Counter(dict(instances)),
    )


def call(key):
    return ParsedCall("look", {"key": key}, f"id_{key}")


def turn(*calls, results):
    return Turn("t", 0, Message("assistant", ""), DispatchResult("", calls, tuple(results)))


def found(key):
    return ToolResult.from_text(f"found {key}")


def test_nothing_is_wrong_with_a_collector_after_minutes_of_failures(tmp_path, caplog, capsys):
    caplog.set_level("CRITICAL")
    assert soak(tmp_path, SHORT) == []
    said = capsys.readouterr().out
    for status in "timeout", "crash", "error", "infra", "malformed", "unknown_tool", "invalid_args":
        assert re.search(rf"\d {status}\b", said), said


def test_tasks_that_tools_leave_behind_are_found(tmp_path, caplog, monkeypatch):
    """The control: the same run, with a tool that forgets a task for each tenth call."""
    caplog.set_level("CRITICAL")
    act, forgotten, numbers = World.act, [], iter(range(10**9))

    async def forgetful(self, key):
        if next(numbers) % 10 == 0:
            forgotten.append(asyncio.create_task(asyncio.Event().wait()))
        await act(self, key)

    monkeypatch.setattr(World, "act", forgetful)
    wrong = soak(tmp_path, SHORT)
    assert any(line.startswith("tasks: ") for line in wrong), wrong


@given(st.floats(-50, 50), st.lists(st.integers(0, 30), max_size=6), st.integers(0, 1000))
def test_a_slope_is_that_of_the_line_below_single_peaks(per_minute, peaks, seed):
    rng = random.Random(seed)
    times = [float(minute) for minute in range(31)]
    values = [per_minute * time for time in times]
    for peak in peaks[:3]:
        values[peak] += rng.uniform(0, 1_000)
    assert slope(times, values) == pytest.approx(per_minute, abs=1e-6)


@pytest.mark.parametrize("name", sorted(SLACK))
def test_a_count_that_grows_without_end_is_found(name):
    flat = [reading(minute) for minute in range(30)]
    assert growth(flat) == []
    rising = [reading(minute, **{name: 10 + SLACK[name] * minute}) for minute in range(30)]
    (line,) = growth(rising)
    assert line.startswith(f"{name}: ")


def test_a_count_may_have_peaks_and_may_rise_during_the_warm_up():
    counts = [0, 40, 90, 90, 90, 90, 1_000, 90, 90, 90, 90, 90, 1_000, 90, 90]
    assert growth([reading(minute, threads=count) for minute, count in enumerate(counts)]) == []


def test_memory_that_grows_is_found():
    steady = [reading(minute, memory_mib=500 + minute % 3) for minute in range(60)]
    assert growth(steady) == []
    rising = [reading(minute, memory_mib=500 + minute) for minute in range(60)]
    assert growth(rising) == ["memory_mib grows by 60.0 MiB per hour; the bound is 24.0"]


def test_objects_that_outlive_their_collector_are_found():
    before = reading(0, instances={"torchrl_agentic.a.Turn": 5})
    after = reading(60, instances={"torchrl_agentic.a.Turn": 8, "torchrl_agentic.a.Task": 1}, files=99)
    assert left_over(before, before) == []
    assert left_over(before, after) == ["files: 10 before, 99 after", "3 more torchrl_agentic.a.Turn"]


def test_a_call_without_a_result_is_found():
    books = Accounts()
    books.turn(turn(call("a"), call("b"), results=[found("a")]))
    assert any("2 calls, 1 results" in line for line in books.faults)


def test_a_call_that_ran_twice_or_never_is_found():
    books = Accounts()
    books.run("a")
    books.turn(turn(call("a"), results=[found("a")]))
    assert books.faults == []
    books.turn(turn(call("b"), results=[found("b")]))
    books.run("c")
    books.run("c")
    assert [line.split(": ")[-1] for line in books.faults] == [
        "call b has a result and ran 0 times",
        "call c ran 2 times",
    ]


def test_the_result_of_another_call_is_found():
    books = Accounts()
    books.run("a")
    books.turn(turn(call("a"), results=[found("b")]))
    assert "has the result of another" in books.faults[0]


def test_a_trajectory_that_begins_twice_or_closes_unopened_is_found():
    books = Accounts()
    books.open("t")
    books.open("t")
    books.close("u")
    assert len(books.faults) == 2


@given(st.text(max_size=40), st.integers(0, 6), st.integers(0, 50))
def test_drawn_calls_have_spans_of_their_message_and_keys_of_their_own(text, turn, seed):
    parser = Drawn(seed, "http://127.0.0.1:1")
    keys = Counter[str]()
    for _ in range(20):
        for one in parser.parse(text, turn=turn).calls:
            start, stop = one.span
            assert 0 <= start <= stop <= len(text)
            keys.update(re.findall(r"k\d+\.\d+", str(one.args.get("text", ""))))
    assert all(count == 1 for count in keys.values())
