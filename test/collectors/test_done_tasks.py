"""`DoneTasks` is a set of numbers that keeps one number for all below it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.collectors.done_tasks import DoneTasks


@given(st.integers(0, 20), st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_it_holds_what_was_added_and_what_is_below(before, later, added):
    done = DoneTasks(before, later)
    copy = done.copy()
    for number in added:
        done.add(number)
    expected = {*range(before), *later, *added}
    assert {number for number in range(60) if number in done} == expected
    assert {number for number in range(60) if number in copy} == {*range(before), *later}
    state = done.to_json()
    assert state["tasks_before"] == next(number for number in range(60) if number not in expected)
    assert state["tasks_done"] == sorted(number for number in expected if number > state["tasks_before"])
    assert DoneTasks(state["tasks_before"], state["tasks_done"]).to_json() == state


@given(st.integers(0, 20), st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_it_does_not_hold_what_was_discarded(before, later, discarded):
    done = DoneTasks(before, later)
    for number in discarded:
        done.discard(number)
    expected = {*range(before), *later} - set(discarded)
    assert {number for number in range(60) if number in done} == expected
    for number in discarded:
        done.add(number)
    assert done.to_json() == DoneTasks(before, [*later, *discarded]).to_json()


def test_tasks_that_leave_in_order_take_no_memory():
    done = DoneTasks()
    for number in range(1000):
        done.add(number)
    assert done.to_json() == {"tasks_before": 1000, "tasks_done": []}


@pytest.mark.parametrize(("before", "error"), [("x", TypeError), (-1, ValueError)])
def test_a_wrong_number_is_refused(before, error):
    with pytest.raises(error, match="tasks_before"):
        DoneTasks(before)
