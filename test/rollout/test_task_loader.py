"""Tasks serve TorchRL's environments and collectors as rows: groups per prompt, columns, epochs."""

import itertools
import json
import warnings
from typing import Annotated, Any

import pytest
from helpers.chat_envs import call
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import DatasetChatEnv
from torchrl.objectives.llm import MCAdvantage

from torchrl_agentic import (
    AnswerRewardTransform,
    EndTrajectory,
    Inject,
    Task,
    TaskLoader,
    TaskStream,
    ToolCompose,
    load_tasks,
    tool,
)
from torchrl_agentic.rollout.task_loader import task_row
from torchrl_agentic.testing import ScriptedPolicy

with warnings.catch_warnings():  # TorchRL warns of classes of its own as they are defined
    warnings.filterwarnings("ignore", "Creating .*WeightUpdater", DeprecationWarning)
    from torchrl.collectors.llm import LLMCollector

pytestmark = [
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:frames_per_batch .* is not exactly divisible"),
]
ROWS = [
    {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "reward_model": {"ground_truth": f"{n + 1}"}}
    for n in range(3)
]
ROWS[1]["prompt"].insert(0, {"role": "system", "content": "Be brief."})
ROWS[2]["extra_info"] = {"place": "Oslo"}


def env_of(source, rows, repeats=2, tools=()):
    """Return an environment whose rows read tasks in groups."""
    base = DatasetChatEnv.from_dataloader(TaskLoader(source), batch_size=(rows,), repeats=repeats)
    ending = EndTrajectory(when_no_calls=True, max_turns=2)
    return TransformedEnv(base, Compose(ToolCompose(list(tools)), ending, AnswerRewardTransform()))


def adds(messages):
    """Answer right in every other row."""
    return f"#### {int(messages[-1].text.split()[0]) + 1}"


def test_a_task_has_as_many_rows_in_a_row_as_its_group():
    env = env_of(load_tasks(ROWS), rows=6)
    td = env.reset()
    assert list(td["name"]) == ["0", "0", "1", "1", "2", "2"]
    roles = [list(prompt.role) for prompt in td["history"].prompt]
    assert roles == [["user"]] * 2 + [["system", "user"]] * 2 + [["user"]] * 2
    done = env.step(ScriptedPolicy(adds)(td))
    assert done["next", "reward"].flatten().tolist() == [1.0] * 6
    assert list(env.reset()["name"])[:2] == ["0", "0"]
    env.close()


def test_a_stream_has_a_new_order_in_each_epoch():
    expected = [task.name for task in itertools.islice(TaskStream(load_tasks(ROWS), seed=5), 12)]
    env = env_of(TaskStream(load_tasks(ROWS), seed=5), rows=6)
    found = [name for _ in range(4) for name in list(env.reset()["name"])[::2]]
    env.close()
    assert found == expected
    assert found[:3] != found[3:6] or found[:3] != found[6:9]


def test_a_stream_continues_between_two_batches_of_an_environment():
    whole = TaskStream(load_tasks(ROWS), seed=5)
    env = env_of(whole, rows=4)
    expected = [list(env.reset()["name"]) for _ in range(5)]
    env.close()
    stream = TaskStream(load_tasks(ROWS), seed=5)
    env = env_of(stream, rows=4)
    found = [list(env.reset()["name"]) for _ in range(2)]
    env.close()
    resumed = TaskStream(load_tasks(ROWS), seed=5)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    env = env_of(resumed, rows=4)
    found += [list(env.reset()["name"]) for _ in range(3)]
    env.close()
    assert found == expected


def test_groups_reach_the_advantages_of_torchrl():
    """LLMCollector and a replay buffer with MCAdvantage, which finds the groups by the names of the tasks."""
    turns = itertools.count()
    env = env_of(TaskStream(load_tasks(ROWS)), rows=4)
    policy = ScriptedPolicy(lambda messages: adds(messages) if next(turns) % 2 else "#### 0")
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=12,
        total_dialog_turns=12,
        yield_completed_trajectories=False,
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(64), batch_size=4, transform=MCAdvantage(2, prompt_key="name")
    )
    for data in collector:
        for step in data.unbind(-1):
            buffer.extend(step.unsqueeze(-1))
    collector.shutdown()
    assert len(buffer) == 12
    for name in ("0", "1", "2"):
        advantages = [row["advantage"].item() for row in buffer[:].unbind(0) if row["name"] == name]
        assert len(advantages) == 4
        assert sum(advantages) == pytest.approx(0, abs=1e-4)
        assert max(advantages) > 0.5


def test_tools_get_the_columns_of_a_task():
    """A column that only other tasks have is None."""

    @tool
    def where(extra: Annotated[Any, Inject("extra_info")]) -> str:
        """Return the place."""
        return str(extra)

    env = env_of(load_tasks(ROWS), rows=3, repeats=1, tools=[where])
    td = env.step(ScriptedPolicy([[call("where")]] * 3)(env.reset()))
    results = [prompt.content[-1] for prompt in td["next", "history"].prompt]
    env.close()
    assert results == ["None", "None", "{'place': 'Oslo'}"]


def test_a_row_is_read_as_the_same_task():
    for task in load_tasks(ROWS):
        assert Task.of(task_row(task), 7) == task


@pytest.mark.parametrize(
    ("error", "source", "words"),
    [(TypeError, "rows.jsonl", "got str"), (TypeError, 3, "got int"), (ValueError, [], "there are no tasks")],
)
def test_a_wrong_source_is_named(error, source, words):
    with pytest.raises(error, match=words):
        TaskLoader(source)


def test_a_stream_that_ends_is_an_error_and_not_an_endless_search_for_more():
    env = env_of(TaskStream(load_tasks(ROWS[:2]), epochs=1), rows=2, repeats=2)
    with pytest.raises(RuntimeError, match=r"the tasks have ended.*epochs=None"):
        [env.reset() for _ in range(3)]
    env.close()


def test_an_iterable_without_a_length_is_read_row_by_row():
    (first, second) = TaskLoader(row for row in ROWS[:2])
    assert first["name"] == ["0"]
    assert second["query"][0] == ROWS[1]["prompt"]
