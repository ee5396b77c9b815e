"""What a reward function reads from a finished trajectory, and what it may return."""

import asyncio
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import Score, Status, Task
from torchrl_agentic.messages import Message
from torchrl_agentic.testing import finished_trajectory
from torchrl_agentic.trajectory.score import is_async, score_with

PLAIN = st.text().filter(lambda text: "think>" not in text)


@given(PLAIN, PLAIN)
def test_reasoning_is_apart_from_the_answer(reasoning: str, answer: str):
    for text in (f"<think>{reasoning}</think>{answer}", f"{reasoning}</think>{answer}"):
        found = finished_trajectory(text)
        assert (found.reasoning, found.final_answer) == (reasoning.strip(), answer.strip())
    cut_off = finished_trajectory(f"<think>{reasoning}")
    assert (cut_off.reasoning, cut_off.final_answer) == (reasoning.strip(), "")
    assert finished_trajectory(answer).final_answer == answer.strip()


def test_reasoning_of_all_messages_is_joined():
    found = finished_trajectory("<think>a</think>x", "y", "<think>b</think>z<think>c</think>end")
    assert found.reasoning == "a\nbzc"
    assert found.final_answer == "end"
    assert found.texts == ("<think>a</think>x", "y", "<think>b</think>z<think>c</think>end")


def test_calls_come_with_their_results_in_order():
    calls = [("f", Status.OK), ("g", Status.INFRA), ("", Status.MALFORMED)]
    found = finished_trajectory("a", "b", calls=calls)
    assert [(call.tool, result.status) for call, result in found.calls] == calls
    assert found.calls[2][0].error is not None
    assert finished_trajectory("a").calls == ()


def test_a_trajectory_that_ends_with_a_result_has_no_answer():
    found = finished_trajectory("a")
    ended = replace(found, messages=(*found.messages, Message("tool", "42")))
    assert (ended.answer, ended.final_answer, ended.texts) == ("", "", ("a",))


def test_the_question_is_what_the_user_asked_last():
    found = finished_trajectory("a", question="first?")
    parts = [{"type": "text", "text": "see "}, {"type": "image"}]
    messages = [*found.task.messages, {"role": "user", "content": parts}, {"role": "system", "content": "s"}]
    assert found.question == "first?"
    assert replace(found, task=replace(found.task, messages=messages)).question == "see [image]"
    only = Task("t", [{"role": "system", "content": "s"}])
    assert replace(found, task=only).question == "s"


@pytest.mark.parametrize(
    ("answer", "data", "truth"),
    [
        ("a", {"ground_truth": "b"}, "a"),
        (None, {"ground_truth": 0}, 0),
        (None, {"reward_model": {"ground_truth": "b"}}, "b"),
        (None, {"extra_info": {"ground_truth": "b"}}, "b"),
        (None, {"answer": "b"}, "b"),
        (None, {"reward_model": "rule"}, None),
    ],
)
def test_the_right_answer_is_found_in_usual_columns(answer, data, truth):
    assert Task("t", [{"role": "user", "content": "q"}], answer, data).truth == truth


@pytest.mark.parametrize(
    "value", [1, True, 1.0, Fraction(1), np.float32(1), np.array([1]), torch.tensor(1.0)]
)
def test_numbers_of_every_kind_are_scores(value):
    assert Score.of(value) == Score(1.0)
    assert Score.of(Score(1.0, "x")) == Score(1.0, "x")


@pytest.mark.parametrize("value", [None, "1", b"1", [1.0], {}, np.array([1, 2]), torch.zeros(2)])
def test_other_values_are_no_scores(value):
    with pytest.raises(TypeError, match="a reward is a number, a bool, or an array or tensor with one; got"):
        Score.of(value)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        1e39,
        Score(float("nan")),
        Score(-1e39),
        Score(0.0, parts={"x": float("inf")}),
        Score(0.0, parts={"perplexity": 1e39}),
    ],
)
def test_scores_are_finite_in_float32(value):
    with pytest.raises(ValueError, match=r"must be finite and at most 3\.4028e\+38 in size"):
        Score.of(value)


async def test_async_scorers_are_not_called_on_a_thread():
    threads = []

    async def in_thread(function):
        threads.append(function)
        return function()

    async def scorer(trajectory):
        return 1

    class Object:
        __call__ = staticmethod(scorer)

        async def score(self, trajectory):
            return 1

    done = finished_trajectory("a")
    for one in (scorer, Object().score):
        assert is_async(one)
        assert (await score_with(one, done, in_thread)).value == 1
    assert threads == []
    assert (await score_with(lambda trajectory: scorer(trajectory), done, in_thread)).value == 1
    assert (await score_with(lambda trajectory: asyncio.sleep(0, 2), done, in_thread)).value == 2
    assert len(threads) == 2
