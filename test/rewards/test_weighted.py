"""`Weighted`: a sum of scorers that run concurrently, some only under a condition."""

import asyncio
import threading

import pytest
from helpers.limit import limit
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic import InfrastructureError
from torchrl_agentic.collectors import Score
from torchrl_agentic.rewards import Weighted, exact_match
from torchrl_agentic.testing import finished_trajectory

DONE = finished_trajectory("yes", answer="yes")
NUMBERS = st.floats(-1e6, 1e6)


def constant(value):
    return lambda trajectory: value


@given(st.dictionaries(st.text(min_size=1), st.tuples(NUMBERS, st.none() | NUMBERS), min_size=1, max_size=6))
def test_the_score_is_the_weighted_sum_and_keeps_the_parts(parts):
    reward = Weighted(
        {name: constant(value) for name, (value, _) in parts.items()},
        {name: weight for name, (_, weight) in parts.items() if weight is not None},
    )
    score = asyncio.run(reward(DONE))
    assert score.parts == {name: value for name, (value, _) in parts.items()}
    expected = sum(value * (1.0 if weight is None else weight) for value, weight in parts.values())
    assert score.value == pytest.approx(expected)


async def test_sync_and_async_parts_run_at_the_same_time():
    meeting = threading.Barrier(3)  # broken unless all three are there

    def blocking(trajectory):
        meeting.wait(limit(30))
        return 1

    async def waiting(trajectory):
        await asyncio.to_thread(meeting.wait, 30)
        return 1

    reward = Weighted({"a": blocking, "b": blocking, "c": waiting})
    assert (await reward(DONE)).value == 3


async def test_a_part_runs_only_if_its_condition_scores_one():
    called = []

    async def judge(trajectory):
        called.append(trajectory)
        return 0.5

    for condition, value, count in ((0.99, 0.99, 0), (True, 1.5, 1)):
        reward = Weighted({"judge": judge, "right": constant(condition)}, requires={"judge": "right"})
        score = await reward(DONE)
        assert score.value == value
        assert list(score.parts) == ["judge", "right"]
        assert len(called) == count
        assert ("not called" in score.explanation) == (not count)


async def test_conditions_form_chains():
    scorers = {name: constant(1) for name in "abc"}
    assert (await Weighted(scorers, requires={"a": "b", "b": "c"})(DONE)).value == 3
    closed = Weighted({**scorers, "c": constant(0)}, requires={"a": "b", "b": "c"})
    assert (await closed(DONE)).parts == {"a": 0.0, "b": 0.0, "c": 0.0}


async def test_a_part_that_fails_cancels_the_others():
    ended = asyncio.Event()
    began = asyncio.Event()

    async def slow(trajectory):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def lost(trajectory):
        await began.wait()
        raise InfrastructureError("the grader is down")

    with pytest.raises(InfrastructureError, match="the grader is down") as raised:
        await Weighted({"slow": slow, "lost": lost}, requires={})(DONE)
    assert raised.value.__notes__ == ["raised by the scorer 'lost'"]
    assert ended.is_set()


async def test_a_cancelled_sum_cancels_its_parts():
    began, ended = asyncio.Event(), asyncio.Event()

    async def slow(trajectory):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(Weighted({"slow": slow})(DONE))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_answer_and_explanations_come_from_the_parts():
    async def judged(trajectory):
        return Score(0.5, None, "too short")

    score = await Weighted({"style": judged, "answer": exact_match()}, {"style": 0.0})(DONE)
    assert (score.value, score.answer) == (1.0, "yes")
    assert score.explanation == "style: too short\nanswer: 'yes' is right"


async def test_a_part_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="must be finite") as raised:
        await Weighted({"good": constant(1), "bad": constant(float("nan"))})(DONE)
    assert raised.value.__notes__ == ["raised by the scorer 'bad'"]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (({},), {}, "needs a scorer"),
        (({"a": constant(1)}, {"b": 1.0}), {}, "no scorer is named 'b'; there are a"),
        (({"a": constant(1)},), {"requires": {"a": "x"}}, "no scorer is named 'x'"),
        (({"a": constant(1), "b": constant(1)},), {"requires": {"a": "b", "b": "a"}}, "a → b → a"),
        (({"a": constant(1)}, {"a": float("inf")}), {}, "finite"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, message: str):
    with pytest.raises(ValueError, match=message):
        Weighted(*arguments, **options)


def test_a_scorer_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="'a' is a function"):
        Weighted({"a": 1.0})  # pyright: ignore[reportArgumentType]
