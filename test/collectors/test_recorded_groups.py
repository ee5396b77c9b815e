"""A collector records which trajectories left in which batch, and with which advantages."""

import random

import pytest
from helpers.chat_envs import add, call
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, Recorder, RecordTransform, Task, ToolCompose, read_records
from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.records import read_groups
from torchrl_agentic.testing import load_tiny
from torchrl_agentic.viewer.samples import advantages

TOKENIZER = load_tiny()[1]


def script(key, turn, ids):
    return call("add", a=1, b=2) if turn == 0 else "It is 3."


def collector_of(recorder, reward, *, n_tasks=6, group_size=4, **options):
    return AgentCollector(
        Compose(ToolCompose([add], recorder=recorder), EndTrajectory(when_no_calls=True), RecordTransform()),
        engine=ScriptedEngine(script, TOKENIZER),
        tokenizer=TOKENIZER,
        tasks=[Task(f"q{n}", [{"role": "user", "content": f"1 + 2? ({n})"}]) for n in range(n_tasks)],
        group_size=group_size,
        groups_per_batch=2,
        reward=reward,
        **options,
    )


def uneven(seed=0):
    chance = random.Random(seed)
    return lambda trajectory: chance.choice([0.0, 0.5, 1.0, chance.random()])


@pytest.mark.parametrize("sets_before", [False, True])
def test_groups_have_the_rewards_and_advantages_of_the_batch_and_its_step(tmp_path, sets_before):
    seen = []
    with Recorder(tmp_path) as recorder, collector_of(recorder, uneven()) as collector:
        batches = iter(collector)
        for step in range(3):
            if sets_before:
                recorder.step = step
            batch = next(batches)
            recorder.step = step
            for row in batch.tensordicts:
                seen.append((step, row["collector", "name"], float(row["reward"]), float(row["advantage"])))
            collector.update_policy_weights_()
    found = list(read_groups(tmp_path))
    assert [
        (one.step, member.name, member.reward, member.advantage) for one in found for member in one.members
    ] == seen
    assert len({advantage for *_, advantage in seen}) > 4
    assert [one.batch for one in found] == [0, 0, 1, 1, 2, 2]
    assert [one.policy_version for one in found] == [0, 0, 1, 1, 2, 2]
    assert {one.run for one in found} == {recorder.run}


def test_records_name_task_group_and_place_and_their_scores_give_the_advantages(tmp_path):
    with Recorder(tmp_path) as recorder, collector_of(recorder, uneven(1)) as collector:
        for _ in collector:
            collector.update_policy_weights_()
    records = {one.trajectory: one for one in read_records(tmp_path)}
    found = list(read_groups(tmp_path))
    assert len(found) == 6
    for group in found:
        of_group = [records[member.name] for member in group.members]
        assert {one.origin.group for one in of_group} == {group.number}
        assert {one.origin.task for one in of_group} == {group.task}
        assert [one.origin.index for one in of_group] == [0, 1, 2, 3]
        assert all(one.origin.seconds > 0 and one.origin.policy_versions for one in of_group)
        computed = advantages([one.score for one in of_group])
        assert computed == pytest.approx([member.advantage for member in group.members], abs=2e-5)


def test_replaced_trajectories_are_in_no_group(tmp_path):
    failed = []

    def reward(trajectory):
        if trajectory.index == 1 and "~" not in trajectory.name:
            failed.append(trajectory.name)
            raise OSError("the judge is down")
        return 1.0

    with Recorder(tmp_path) as recorder, collector_of(recorder, reward, n_tasks=2) as collector:
        list(collector)
    names = {member.name for group in read_groups(tmp_path) for member in group.members}
    assert len(names) == 8
    assert len(failed) == 2
    assert not names & set(failed)
    assert {one.trajectory for one in read_records(tmp_path)} == names | set(failed)
