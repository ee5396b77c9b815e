"""Scalars of a batch are what a reader of the batch would compute."""

import math

import torch
from helpers.collector_worlds import CountedTool, WildEngine, collector_of, looks

from torchrl_agentic.rollout import average_metrics, batch_metrics


def test_metrics_are_means_over_the_trajectories_of_a_batch():
    tools = [CountedTool()]
    collector = collector_of(WildEngine(looks(1)), tools=tools, tasks=2, group_size=2, groups_per_batch=2)
    with collector:
        batch = next(iter(collector))
    for row, reward, version in zip(batch.tensordicts, (0.0, 1.0, 1.0, 1.0), (0, 0, 1, 1), strict=True):
        row["reward"] = torch.tensor([[reward]])
        versions = row["collector", "policy_version"]
        versions[versions >= 0] = version
        row["advantage"] = torch.tensor([[0.0 if version else reward - 0.5]])
    for row, part in zip(batch.tensordicts, (1.0, float("nan"), 0.0, 0.5), strict=True):
        row["agentic", "score", "style"] = torch.tensor([part])
    metrics = batch_metrics(batch, version=3)
    assert metrics["score/style"] == 0.5
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/max"] == 1.0
    assert metrics["reward/std"] == torch.tensor([0.0, 1.0, 1.0, 1.0]).std(unbiased=False).item()
    assert metrics["groups/mixed"] == 0.5
    assert metrics["age/max"] == 3.0
    assert 2.0 < metrics["age/mean"] < 3.0
    assert metrics["agentic/turn"] == batch["agentic", "turn"].float().mean().item()
    assert metrics["agentic/n_calls"] == 1.0
    assert metrics["ended/no_calls"] == 1.0
    assert metrics["tokens/all"] == sum(len(row["tokens", "full"]) for row in batch.tensordicts) / 4
    assert all(isinstance(value, float) for value in metrics.values())
    assert "age/mean" not in batch_metrics(batch)


def test_a_group_is_mixed_however_many_of_its_rewards_are_the_mean():
    collector = collector_of(
        WildEngine(looks(1)),
        tools=[CountedTool()],
        tasks=2,
        group_size=3,
        groups_per_batch=2,
        reward=lambda trajectory: 0.1 if trajectory.task.name == "t0" else float(trajectory.index),
    )
    with collector:
        batch = next(iter(collector))
    assert [row["advantage"].item() != 0 for row in batch.tensordicts] == [False] * 3 + [True, False, True]
    assert batch_metrics(batch)["groups/mixed"] == 0.5


def test_scalars_of_a_batch_without_sampled_tokens_or_with_huge_rewards_are_finite():
    collector = collector_of(WildEngine(looks(1)), tools=[CountedTool()], tasks=1, group_size=2)
    with collector:
        batch = next(iter(collector))
    for row, reward in zip(batch.tensordicts, (3e38, -3e38), strict=True):
        row["collector", "policy_version"].fill_(-1)
        row["masks", "all_assistant_mask"].fill_(False)
        row["reward"] = torch.tensor([[reward]])
    metrics = batch_metrics(batch, version=3)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["tokens/sampled"] == 0.0
    assert "age/mean" not in metrics


def test_scalars_of_several_processes_are_merged_by_what_they_mean(monkeypatch):
    mine = {"reward/mean": 1.0, "reward/max": 1.0, "ended/max_turns": 0.5, "score/style": 0.5}
    other = {"reward/mean": 0.0, "reward/max": 3.0, "ended/stop_tool": 1.0}
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)

    def gather(found, own):
        found[:] = [own, other]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    assert average_metrics(mine) == {
        "reward/mean": 0.5,
        "reward/max": 3.0,
        "ended/max_turns": 0.25,
        "ended/stop_tool": 0.5,
        "score/style": 0.5,
    }
