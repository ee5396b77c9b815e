"""Rewards for the form of a trajectory."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import Status
from torchrl_agentic.rewards import format_reward, length_penalty, tool_use_reward
from torchrl_agentic.testing import finished_trajectory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("a</think>\n<answer>b</answer>", 1),
        ("<think>a</think>b", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<answer>b</think></answer>", 0),
        ("<think>a</think></answer>b<answer>", 0),
        ("", 0),
    ],
)
def test_tags_stand_once_closed_and_in_order(text: str, expected: float):
    assert format_reward(tags=("think", "answer"))(finished_trajectory(text)).parts["tags"] == expected


def test_calls_count_as_far_as_it_was_asked():
    def value(calls, *statuses):
        trajectory = finished_trajectory("a", "b", calls=[("f", status) for status in statuses])
        return format_reward(calls=calls)(trajectory).value

    assert value("readable", Status.OK, Status.ERROR, Status.INVALID_ARGS) == 1
    assert value("readable", Status.OK, Status.MALFORMED) == 0
    assert value("valid", Status.INVALID_ARGS) == 0
    assert value("valid", Status.UNKNOWN_TOOL) == 0
    assert value("valid", Status.INFRA, Status.TIMEOUT) == 1
    assert value("any", Status.MALFORMED) == 1


def test_all_requirements_must_hold_and_each_is_reported():
    scorer = format_reward(tags=["answer"], pattern=r"\d")
    score = scorer(finished_trajectory("<answer>x</answer>"))
    assert score.value == 0
    assert score.parts == {"calls": 1.0, "tags": 1.0, "pattern": 0.0}
    assert "\\d" in score.explanation
    assert scorer(finished_trajectory("<answer>5</answer>")).value == 1


def test_wrong_arguments_of_a_format_are_refused():
    with pytest.raises(ValueError, match="readable"):
        format_reward(calls="all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"\['answer'\]"):
        format_reward(tags="answer")


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200), st.floats(0.1, 5))
def test_the_length_penalty_is_that_of_dapo(length: int, first: int, second: int, penalty: float):
    most, buffer = max(first, second), min(first, second)
    found = length_penalty(most, buffer, penalty=penalty)(finished_trajectory("x", n_sampled=length)).value
    if length <= most - buffer:
        expected = 0.0
    elif length <= most:
        expected = ((most - buffer) - length) / buffer
    else:
        expected = -1.0
    assert found == pytest.approx(penalty * expected)


def test_length_is_counted_in_turns_or_by_a_function_too():
    trajectory = finished_trajectory("a", "b", "c")
    assert length_penalty(4, 2, unit="turns")(trajectory).value == -0.5
    assert length_penalty(4, 2, unit=lambda one: 10 * len(one.texts))(trajectory).value == -1


def test_tokens_that_do_not_exist_cannot_be_counted():
    with pytest.raises(ValueError, match='unit="turns"'):
        length_penalty(4, 2)(replace(finished_trajectory("a"), ledger=None))


@pytest.mark.parametrize("arguments", [(0, 1), (4, 5), (4, 0)])
def test_a_penalty_without_a_range_is_refused(arguments):
    with pytest.raises(ValueError, match=r"buffer|max_length"):
        length_penalty(*arguments)


def tool_value(*calls, **options):
    return tool_use_reward(**options)(finished_trajectory("a", "b", calls=calls)).value


def test_using_a_tool_pays_once():
    assert tool_value() == 0
    assert tool_value(("f", Status.OK)) == 1
    assert tool_value(("f", Status.OK), ("g", Status.OK)) == 1
    assert tool_value(("f", Status.ERROR)) == 0


def test_failures_of_infrastructure_are_no_errors_of_the_model():
    for status in (Status.INFRA, Status.CRASH, Status.CANCELLED):
        assert tool_value(("f", status), error=-0.5) == 1
        assert tool_value(("f", status), used=0.0, success=0.25) == 0
    assert tool_value(("f", Status.ERROR), ("f", Status.TIMEOUT), error=-0.25) == -0.5


def test_tools_can_pay_differently():
    calls = [("search", Status.OK), ("search", Status.OK), ("python", Status.OK)]
    assert tool_value(*calls, used=0.0, tools={"search": 0.25}) == 0.5
    assert tool_value(("python", Status.OK), tools={"search": 0.25}) == 0
    assert tool_value(*calls, success=10.0, bounds=(0.0, 2.0)) == 2
    with pytest.raises(ValueError, match="bounds"):
        tool_use_reward(bounds=(1.0, 0.0))


def test_errors_are_explained_by_tool_and_status():
    calls = [("f", Status.ERROR), ("f", Status.ERROR), ("", Status.MALFORMED)]
    score = tool_use_reward(error=-0.1)(finished_trajectory("a", "b", calls=calls))
    assert score.explanation == "2 × f: error, 1 × unreadable: malformed"
    assert score.parts["error"] == pytest.approx(-0.3)
