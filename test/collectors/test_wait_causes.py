"""`wait_causes` divides a wait among what the missing trajectories were doing."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors.wait_causes import BATCH, OTHER, BatchMember, wait_causes
from torchrl_agentic.trajectory.span import Span


def engine(start, stop, **more):
    return Span("engine", start, stop, **more)


def tool(start, stop, name="search"):
    return Span("tool", start, stop, name=name)


def test_the_wait_for_one_trajectory_is_what_it_did():
    member = BatchMember("a", 0, 9, [engine(1, 4), tool(4, 8), Span("reward", 8, 9)])
    found = wait_causes(2, 10, [member])
    assert found.causes == {"engine": 2, "tool/search": 4, "reward": 1, BATCH: 1}
    assert found.held == {"a": 7}


def test_a_slow_tool_holds_up_nothing_while_others_are_sampled():
    """Until 4 both are missing: half of that time is the tool's. From 4 on, all of it is."""
    slow, quick = BatchMember("slow", 0, 10, [tool(0, 10)]), BatchMember("quick", 0, 4, [engine(0, 4)])
    found = wait_causes(0, 10, [slow, quick])
    assert found.causes == {"tool/search": 8, "engine": 2}
    assert found.held == {"slow": 8, "quick": 2}


def test_trajectories_that_had_ended_before_the_wait_are_no_cause():
    done, late = BatchMember("done", 0, 5, [engine(0, 5)]), BatchMember("late", 0, 8, [tool(0, 8)])
    assert wait_causes(5, 8, [done, late]).held == {"late": 3}


def test_a_trajectory_that_had_not_begun_waits_for_admission():
    found = wait_causes(0, 6, [BatchMember("a", 4, 6, [engine(4, 6)])])
    assert found.causes == {"admission": 4, "engine": 2}


def test_calls_that_run_at_the_same_time_share_it():
    member = BatchMember("a", 0, 4, [Span("tools", 0, 4), tool(0, 4, "slow"), tool(0, 2, "quick")])
    assert wait_causes(0, 4, [member]).causes == {"tool/slow": 3, "tool/quick": 1}


def test_calls_of_a_turn_that_wait_for_a_limit_are_tools_without_a_name():
    member = BatchMember("a", 0, 4, [Span("tools", 0, 4), tool(3, 4)])
    assert wait_causes(0, 4, [member]).causes == {"tools": 3, "tool/search": 1}


def test_a_call_that_starts_while_the_model_writes_costs_nothing_until_the_answer_ends():
    member = BatchMember("a", 0, 5, [engine(0, 3), tool(1, 5)])
    assert wait_causes(0, 5, [member]).causes == {"engine": 3, "tool/search": 2}


def test_an_update_stops_the_engine_but_no_tool():
    sampled, ran = BatchMember("a", 0, 4, [engine(0, 4)]), BatchMember("b", 0, 4, [tool(0, 4)])
    found = wait_causes(0, 4, [sampled, ran], [Span("update", 1, 3)])
    assert found.causes == {"update": 1, "engine": 1, "tool/search": 2}


def test_time_between_spans_has_a_name():
    assert wait_causes(0, 3, [BatchMember("a", 0, 3, [engine(1, 2)])]).causes == {OTHER: 2, "engine": 1}


def test_a_wait_without_trajectories_is_spent_on_the_batch():
    assert wait_causes(1, 3, []).causes == {BATCH: 2}


times = st.floats(0, 100, allow_nan=False)
spans = st.builds(
    lambda cause, start, stop, name: Span(cause, min(start, stop), max(start, stop), name=name),
    st.sampled_from(["engine", "tools", "tool", "user", "reward", "admission"]),
    times,
    times,
    st.sampled_from("abc"),
)
members = st.lists(
    st.tuples(times, times, st.lists(spans, max_size=6)).map(
        lambda made: (min(made[:2]), max(made[:2]), made[2])
    ),
    max_size=6,
).map(lambda made: [BatchMember(str(n), *each) for n, each in enumerate(made)])


@given(members, times, times, st.lists(st.builds(Span, st.just("update"), times, times), max_size=3))
def test_the_parts_add_up_to_the_wait(members, one, other, own):
    start, stop = min(one, other), max(one, other)
    found = wait_causes(start, stop, members, own)
    assert all(seconds >= 0 for seconds in found.causes.values())
    assert math.isclose(sum(found.causes.values()), stop - start, abs_tol=1e-6)
    last = max([start, *(min(member.ended, stop) for member in members)])
    assert math.isclose(sum(found.held.values()), last - start, abs_tol=1e-6)


@given(members, times, times)
def test_a_wait_equals_the_sum_of_its_moments(members, one, other):
    """Compare with a slow and obvious computation: many short moments, one by one."""
    start, stop = min(one, other), max(one, other)
    edges = sorted(
        {start, stop, *(min(max(t, start), stop) for m in members for t in (m.began, m.ended))}
        | {min(max(t, start), stop) for m in members for s in m.spans for t in (s.start, s.stop)}
    )
    expected: dict[str, float] = {}
    for left, right in itertools.pairwise(edges):
        middle = (left + right) / 2
        missing = [member for member in members if member.ended > middle]
        for member in missing:
            running = [span for span in member.spans if span.start < middle < span.stop]
            causes = {span.cause for span in running}
            if middle < member.began:
                keys = ["admission"]
            elif first := [c for c in ("engine", "user", "reward", "admission") if c in causes]:
                keys = first[:1]
            elif "tool" in causes:
                keys = [f"tool/{span.name}" for span in running if span.cause == "tool"]
            else:
                keys = ["tools" if "tools" in causes else OTHER]
            for key in keys:
                expected[key] = expected.get(key, 0) + (right - left) / len(missing) / len(keys)
        if not missing:
            expected[BATCH] = expected.get(BATCH, 0) + right - left
    found = wait_causes(start, stop, members).causes
    for key in expected.keys() | found.keys():
        assert found.get(key, 0) == pytest.approx(expected.get(key, 0), abs=1e-6)
