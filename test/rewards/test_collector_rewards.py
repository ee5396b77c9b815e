"""Rewards of every kind through a collector: batches, trajectories, records and failures."""

import asyncio
import functools
import threading

import pytest
import torch
from helpers.chat_envs import add, call
from helpers.limit import limit
from torchrl.envs import Compose

from torchrl_agentic import (
    InfrastructureError,
    InvalidTask,
    Recorder,
    RecordTransform,
    Task,
    ToolCompose,
    read_records,
)
from torchrl_agentic.collectors import AgentCollector, CollectorError, Score
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.rewards import Weighted, batched, format_reward, numeric_match, tool_use_reward
from torchrl_agentic.testing import load_tiny

TOKENIZER = load_tiny()[1]
SCRIPT = [[call("add", a=1, b=2), "It is 3."], ["It is 4."]]


def collector(reward, *, transforms=None, n_tasks=1, **options):
    tasks = [Task(f"t{number}", [{"role": "user", "content": "1 + 2?"}], "3") for number in range(n_tasks)]
    return AgentCollector(
        ToolCompose([add]) if transforms is None else transforms,
        engine=ScriptedEngine(SCRIPT, TOKENIZER),
        tokenizer=TOKENIZER,
        tasks=tasks,
        reward=reward,
        **{"group_size": 2, "max_staleness": None, "on_failure": "raise", **options},
    )


def sync_reward(trajectory):
    assert threading.current_thread() is not threading.main_thread()
    return trajectory.final_answer == "It is 3."


async def async_reward(trajectory):
    await asyncio.sleep(0)
    return torch.tensor(sync_reward(trajectory))


class Callable:
    async def __call__(self, trajectory):
        return await async_reward(trajectory)


def sync_batch(trajectories):
    return torch.tensor([float(one.final_answer == "It is 3.") for one in trajectories])


async def async_batch(trajectories):
    return sync_batch(trajectories)


KINDS = {
    "async": async_reward,
    "async batch": batched(async_batch),
    "async object": Callable(),
    "batch": batched(sync_batch),
    "function of a coroutine": lambda one: async_reward(one),
    "partial": functools.partial(lambda right, one: one.final_answer == right, "It is 3."),
    "score": numeric_match(),
    "sync": sync_reward,
    "weighted": Weighted({"answer": numeric_match(), "unused": sync_reward}, {"unused": 0.0}),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_reward_reaches_the_batch(kind: str):
    with collector(KINDS[kind]) as found:
        (batch,) = list(found)
    assert batch["reward"].reshape(-1).tolist() == [1.0, 0.0]
    assert batch["advantage"].reshape(-1).sign().tolist() == [1.0, -1.0]


def test_parts_of_scores_are_columns_of_the_batch():
    reward = Weighted(
        {"answer": numeric_match(), "tools": tool_use_reward()}, {"tools": 0.25}, requires={"tools": "answer"}
    )
    with collector(reward, n_tasks=2, groups_per_batch=2) as found:
        (batch,) = list(found)
    assert batch["reward"].shape == (4, 1, 1)
    assert batch["agentic", "score", "answer"].tolist() == [[1.0], [0.0], [1.0], [0.0]]
    assert batch["agentic", "score", "tools"].tolist() == [[1.0], [0.0], [1.0], [0.0]]
    assert batch["reward"].reshape(-1).tolist() == [1.25, 0.0, 1.25, 0.0]


def test_a_part_that_a_trajectory_lacks_is_nan():
    def reward(trajectory):
        parts = {"calls": 1.0} if trajectory.n_calls else {}
        return Score(0.5, parts=parts)

    with collector(reward) as found:
        (batch,) = list(found)
    calls = batch["agentic", "score", "calls"].reshape(-1)
    assert calls[0] == 1
    assert calls[1].isnan()


def test_the_record_shows_how_a_score_came_about(tmp_path):
    with Recorder(tmp_path) as recorder:
        transforms = Compose(ToolCompose([add], recorder=recorder), RecordTransform())
        reward = Weighted({"answer": numeric_match(), "format": format_reward()}, {"format": 0.5})
        with collector(reward, transforms=transforms) as found:
            list(found)
    first, second = sorted(read_records(tmp_path), key=lambda one: -(one.score or 0))
    assert (first.score, second.score) == (1.5, 0.5)
    assert first.gts == "3"
    assert first.extras == {
        "score_answer": 1.0,
        "score_format": 1.0,
        "extracted_answer": "3",
        "score_explanation": "answer: '3' is right",
    }
    assert second.extras["score_explanation"] == "answer: expected '3'; found '4'"


def test_calls_of_several_trajectories_share_a_batch():
    """The first batch ends once the other trajectories wait for the next one."""
    all_wait = threading.Event()
    sizes, waiting = [], []

    def grade(trajectories):
        sizes.append(len(trajectories))
        assert all_wait.wait(limit(30))
        return [0.0] * len(trajectories)

    grader = batched(grade)

    async def reward(trajectory):
        score = asyncio.ensure_future(grader(trajectory))
        await asyncio.sleep(0)
        waiting.append(trajectory.name)
        if len(waiting) == 4:
            all_wait.set()
        return await score

    with collector(reward, group_size=4) as found:
        assert len(list(found)) == 1
    assert sum(sizes) == 4
    assert len(sizes) <= 2


@pytest.mark.parametrize(
    ("error", "kind"), [(InfrastructureError("judge down"), "engine"), (ValueError("bad"), "reward")]
)
def test_a_batch_that_fails_replaces_its_trajectories(error, kind: str, caplog):
    calls = []

    def grade(trajectories):
        calls.append(trajectories)
        if len(calls) == 1:
            raise error
        return [1.0] * len(trajectories)

    with collector(batched(grade), on_failure="replace") as found:
        (batch,) = list(found)
    assert batch["reward"].reshape(-1).tolist() == [1.0, 1.0]
    assert f"failed ({kind}; replacement 1 of 3)" in caplog.text


@pytest.mark.parametrize("value", ["1", None, [1.0, 2.0], float("inf"), Score(float("nan"))])
def test_something_that_is_no_finite_number_is_a_failed_reward(value):
    with collector(lambda _: value) as found, pytest.raises(CollectorError, match="the reward of t0"):
        list(found)


def test_a_task_that_its_reward_calls_invalid_is_dropped_at_once_and_counted():
    seen = []

    def judge(task, trajectory):
        seen.append(task.name)
        if task.name == "t1":
            raise InvalidTask("t1 has no answer")
        return 1.0

    def grade(trajectories):
        return [InvalidTask("t1 has no answer") if one.task.name == "t1" else 1.0 for one in trajectories]

    for reward in (lambda one: judge(one.task, one), batched(grade), Weighted({"answer": batched(grade)})):
        with collector(reward, n_tasks=3, on_failure="replace") as found:
            names = [name for batch in found for name in batch["collector", "name"]]
        assert [name.split("/")[0] for name in names] == ["t0", "t0", "t2", "t2"]
        figures = found.stats.snapshot()
        assert (figures["failures"], figures["events"]) == ({"task": 1}, {"dropped": 1})
    assert seen.count("t1") <= 2, "no trajectory of the group was replaced"
