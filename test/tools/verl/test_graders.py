"""Answers are compared as numbers or mathematics, in any notation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import ParsedCall, RowData, Status, ToolContext
from torchrl_agentic.dispatch import Dispatcher
from torchrl_agentic.tools import LifecycleTool
from torchrl_agentic.tools.verl.graders import Geo3kTool, Gsm8kTool, boxed, same_mathematics, same_number


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("220000.0", "220000"),
        ("#### 220000.0", "220000"),
        ("She has 5 and then $1,234.50", "1234.5"),
        ("#### −3", "-3"),
        ("3 apples #### 4", "#### 4"),
        ("1e3", "1,000"),
    ],
)
def test_numbers_are_compared_as_numbers(answer, truth):
    assert same_number(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("4", "5"), ("", "5"), ("no", "no"), ("4 #### 5", "4"), ("12", "2"), ("1e99999999999999999999", "5")],
)
def test_other_numbers_are_others(answer, truth):
    assert not same_number(answer, truth)


@given(st.integers(-(10**9), 10**9))
def test_each_number_is_itself_in_each_way_of_writing_it(number):
    ways = [str(number), f"{number:,}", f"{number}.00", f"the answer is {number:,}", f"#### {number}"]
    assert all(same_number(way, str(number)) for way in ways)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac{3}{4}}", r"\frac34"),
        (r"\boxed{60^\circ}", "60"),
        (r"first \boxed{1}, then \boxed{2 \sqrt{3}}", r"2\sqrt{3}"),
        (r"\boxed{1,000}", "1000"),
        (r"$\boxed{\left(1, 2\right)}$", "(1,2)"),
        (r"\boxed{7.0}", "7"),
    ],
)
def test_mathematics_is_compared_by_boxed_answers(answer, truth):
    assert same_mathematics(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\boxed{1}", "2"),
        (r"\boxed{1/0}", "1"),
        (r"\boxed{", "x"),
        (r"\boxed{}", "$"),
        *(
            (rf"\boxed{{{one}}}", r"\boxed{5}")
            for one in ("sNaN", "NaN", "-Infinity", "1/sNaN", "0/Infinity")
        ),
        (r"\boxed{-Infinity}", r"\boxed{sNaN}"),
    ],
)
def test_other_mathematics_is_other(answer, truth):
    assert not same_mathematics(answer, truth)


@given(st.text("\\boxed{}ab", max_size=30))
def test_a_box_is_found_or_not_and_nothing_breaks(text):
    assert isinstance(boxed(text), str)
    same_mathematics(text, text)


@pytest.mark.parametrize(("kind", "right"), [(Gsm8kTool, "#### 42.0"), (Geo3kTool, r"\boxed{42}")])
async def test_better_answer_has_no_penalty_and_the_last_one_counts(kind, right):
    tool = LifecycleTool(kind())
    async with Dispatcher([tool]).session("t") as session:
        session.data = RowData(tools_kwargs={tool.name: {"create_kwargs": {"ground_truth": 42}}})
        answers = ["1", right, right]
        results = [
            (await session.run([ParsedCall(tool.name, {"answer": answer}, "c")]))[0] for answer in answers
        ]
    assert [result.reward for result in results] == [-0.05, 0.0, -0.05]
    assert [result.metrics["score"] for result in results] == [0.0, 1.0, 1.0]
    assert results[1].text == f"Current parsed answer={right} reward=1.0"
    assert session.rewards == {tool.name: 1.0}


async def test_a_row_without_the_right_answer_says_where_it_belongs(caplog):
    tool = LifecycleTool(Gsm8kTool())
    async with Dispatcher([tool]).session("t") as session:
        (result,) = await session.run([ParsedCall(tool.name, {"answer": "1"}, "c")])
    assert result.status is Status.CRASH
    assert "calc_gsm8k_reward needs the right answer" in caplog.text
    with pytest.raises(ValueError, match="create_kwargs"):
        await tool.run({"answer": "1"}, ToolContext("c"))
