"""The load and the table of the benchmark beside other libraries; its runs need their environments."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

PEERS = Path(__file__).parents[1] / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def peers() -> Iterator[SimpleNamespace]:
    """Import the modules, which import each other as programs of one folder do."""
    before = set(sys.modules)
    sys.path.insert(0, str(PEERS))
    try:
        names: dict[str, ModuleType] = {name: importlib.import_module(name) for name in ("load", "run")}
        yield SimpleNamespace(
            **names, script=names["load"].Script(names["load"].Load(8), names["load"].tokenizer())
        )
    finally:
        sys.path.remove(str(PEERS))
        for name in {"load", "run"} - before:
            sys.modules.pop(name, None)


def conversation(peers: Any, number: int, turns: int) -> list[int]:
    """Return the prompt after so many turns, rendered from messages as peers do."""
    script, messages = peers.script, list(peers.load.question(number))
    for turn in range(turns):
        function = {"name": "work", "arguments": script.arguments(number, turn)}
        calls = [{"type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": script.text(number, turn), "tool_calls": calls},
            {"role": "tool", "content": f"waited for {number} ms"},
        ]
    options = {"tools": [peers.load.work], "add_generation_prompt": True, "return_dict": False}
    return list(script.tokenizer.apply_chat_template(messages, **options))


@given(number=st.integers(0, 7), data=st.data())
def test_a_prompt_alone_tells_the_trajectory_the_turn_and_how_much_of_the_answer_it_has(
    peers: Any, number: int, data: st.DataObject
):
    turn = data.draw(st.integers(0, len(peers.script.load.plan(number).naps_ms)))
    answer = peers.script.ids(number, turn)
    done = data.draw(st.integers(0, len(answer) - 1))
    prompt = [*conversation(peers, number, turn), *answer[:done]]
    assert peers.script.find(prompt) == (number, turn, done)


def test_the_ids_of_an_answer_are_those_of_its_rendered_message(peers: Any):
    number = next(n for n in range(8) if len(peers.script.load.plan(n).naps_ms) > 1)
    before, after = conversation(peers, number, 0), conversation(peers, number, 1)
    answer = peers.script.ids(number, 0)
    assert after[len(before) : len(before) + len(answer)] == list(answer)


def test_a_trajectory_of_a_load_is_always_the_same_and_differs_by_seed(peers: Any):
    load = peers.load.Load(50)
    plans = [load.plan(number) for number in range(50)]
    assert plans == [peers.load.Load(50).plan(number) for number in range(50)]
    assert plans != [peers.load.Load(50, seed=1).plan(number) for number in range(50)]


def test_a_tenth_of_the_calls_of_the_load_with_stuck_tools_never_return(peers: Any):
    load = peers.load.Load(1_000, stuck=0.1)
    naps = [nap for number in range(1_000) for nap in load.plan(number).naps_ms]
    assert 0.08 < sum(nap == peers.load.FOREVER_MS for nap in naps) / len(naps) < 0.12


def test_no_tool_that_returns_takes_longer_than_the_time_limit_of_a_call(peers: Any):
    naps = {nap for number in range(1_000) for nap in peers.load.Load(1_000).plan(number).naps_ms}
    assert max(naps) < 1_000 * peers.load.CALL_TIMEOUT_S


def test_each_trajectory_whose_memory_is_measured_waits_in_the_same_turn(peers: Any):
    load = peers.load.MEASURES["memory"]
    assert {load.plan(number).naps_ms.index(peers.load.FOREVER_MS) for number in range(load.count)} == {2}


def figures(**changed: Any) -> dict[str, Any]:
    """Return the figures of a run in which all trajectories came."""
    plain = {
        "answers_per_s": 170.4,
        "cpu_ms_per_answer": 0.98,
        "makespan_s": 6.81,
        "limit_s": 30.0,
        "trajectories": 256,
        "of": 256,
        "wrong": 0,
        "tokens_lost": 0,
        "tokens_kept": 900,
    }
    return {**plain, **changed}


def test_a_run_that_reaches_its_limit_shows_how_far_it_came_instead_of_a_makespan(peers: Any):
    assert peers.run.makespan(figures()) == "6.8 s"
    assert peers.run.makespan(figures(makespan_s=None, trajectories=12)) == "not in 30 s: 12 of 256"


def test_lost_tokens_cut_trajectories_and_missing_ones_are_all_shown(peers: Any):
    assert peers.run.losses(figures()) == "0 (0.0 %), 0 cut"
    lost = figures(tokens_lost=100, wrong=3, trajectories=250)
    assert peers.run.losses(lost) == "100 (10.0 %), 3 cut, 6 missing"
    assert peers.run.losses({**lost, "failure": "no"}).endswith(", 6 missing, ended by an error")


def test_a_measure_without_figures_is_a_dash_in_the_table(peers: Any):
    found = {"ours": {"plain": figures(), "stuck": figures(wrong=6)}, "theirs": {"plain": {"error": "no"}}}
    head, _, ours, theirs = peers.run.table(found).splitlines()
    assert head.count("|") == ours.count("|") == theirs.count("|")
    assert ours.split(" | ")[:6] == ["| ours", "170", "0.98 ms", "6.8 s", "6.8 s", "250 of 256"]
    assert set(theirs.split(" | ")[1:-1]) == {"–", "– ms"}
