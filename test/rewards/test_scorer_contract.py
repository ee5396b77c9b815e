"""The contract of scorers, inherited by every scorer of the package, and failed by broken ones."""

import asyncio
import math

import pytest

from torchrl_agentic import Message
from torchrl_agentic.engines import ChatEngine
from torchrl_agentic.rewards import (
    ModelJudge,
    Weighted,
    batched,
    contains,
    exact_match,
    format_reward,
    length_penalty,
    matches_regex,
    numeric_match,
    tool_use_reward,
)
from torchrl_agentic.testing import ScorerContract, finished_trajectory


class AlwaysRight(ChatEngine):
    version, max_concurrent = 0, 8

    async def chat(self, messages, *, tools, max_tokens, key):
        return Message("assistant", '{"grade": "C"}')

    async def update(self, weights):
        return 0

    async def close(self):
        pass


class TestExactMatch(ScorerContract):
    least, most = 0.0, 1.0

    def make(self):
        return exact_match()


class TestNumericMatch(ScorerContract):
    least, most = 0.0, 1.0

    def make(self):
        return numeric_match()


class TestContains(ScorerContract):
    least, most = 0.0, 1.0

    def make(self):
        return contains()


class TestMatchesRegex(ScorerContract):
    least, most = 0.0, 1.0

    def make(self):
        return matches_regex(r"is (\w+)")


class TestFormatReward(ScorerContract):
    least, most = 0.0, 1.0

    def make(self):
        return format_reward(tags=["think", "answer"], pattern=r"\d")


class TestLengthPenalty(ScorerContract):
    least, most = -1.0, 0.0

    def make(self):
        return length_penalty(4, 2, unit="turns")


class TestToolUseReward(ScorerContract):
    least, most = -1.0, 1.0

    def make(self):
        return tool_use_reward(error=-0.5)


class TestWeighted(ScorerContract):
    def make(self):
        parts = {"answer": numeric_match(), "judge": ModelJudge(AlwaysRight())}
        return Weighted(parts, {"judge": 0.5}, requires={"judge": "answer"})


class TestBatched(ScorerContract):
    def make(self):
        return batched(lambda trajectories: [len(one.answer) for one in trajectories], max_size=2)


class TestBatchedAsync(ScorerContract):
    def make(self):
        async def lengths(trajectories):
            await asyncio.sleep(0)
            return [len(one.answer) for one in trajectories]

        return batched(lengths)


class Broken(ScorerContract):
    def __init__(self, scorer):
        self.scorer = scorer

    def make(self):
        return self.scorer


def changes_the_task(trajectory):
    trajectory.task.data["seen"] = True
    return 1.0


@pytest.mark.parametrize(
    ("scorer", "test"),
    [
        (lambda one: math.nan, "test_it_returns_a_finite_number_or_score"),
        (lambda one: "1", "test_it_returns_a_finite_number_or_score"),
        (changes_the_task, "test_it_leaves_the_trajectory_unchanged"),
        (lambda one: 1 / len(one.answer), "test_it_scores_whatever_the_model_wrote"),
    ],
)
async def test_broken_scorers_fail(scorer, test: str):
    with pytest.raises((AssertionError, TypeError, ValueError, ZeroDivisionError)):
        await getattr(Broken(scorer), test)()


async def test_a_scorer_with_a_shared_place_fails():
    """It keeps the trajectory where the next call overwrites it."""
    place = {}

    async def shared(trajectory):
        place["answer"] = trajectory.answer
        await asyncio.sleep(0)
        return len(place["answer"])

    with pytest.raises(AssertionError):
        await Broken(shared).test_scores_asked_for_at_the_same_time_are_those_of_one_after_the_other()


def test_a_finished_trajectory_has_what_was_asked_for():
    one = finished_trajectory("<think>a</think>b", "c", question="q", answer=3, n_sampled=5)
    assert (one.question, one.texts, one.reasoning, one.final_answer) == (
        "q",
        ("<think>a</think>b", "c"),
        "a",
        "c",
    )
    assert (one.n_sampled, one.task.truth, one.has_ended) == (5, 3, True)
