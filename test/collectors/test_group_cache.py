"""`group_cache`: the trajectories of a group run identical calls once, and their batches stay the same."""

import asyncio
from collections import Counter

import pytest
from helpers.collector_worlds import call, collector_of, drained, tokenizer

from torchrl_agentic import Effects, RateLimiter, ToolCompose, tool
from torchrl_agentic.collectors.stats_table import table_of
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.testing import run_skipping

TASKS = [{"query": "one"}, {"query": "two"}]


def run(*, act=lambda key: None, say=lambda key, turn: call("look", key="k"), effects=None, **options):
    """Collect two groups of trajectories with two turns of calls each.

    Returns:
        The batches, how often each call ran, and the statistics.
    """
    ran = Counter()

    @tool(effects=effects)
    async def look(key: str) -> str:
        """Look something up.

        Args:
            key: The key.
        """
        ran[key] += 1
        await asyncio.sleep(1)
        if (found := act(key)) is not None:
            raise found
        return f"found {key}"

    async def main():
        engine = ScriptedEngine(lambda key, turn, ids: "end" if turn > 1 else say(key, turn), tokenizer())
        given = {"group_size": 4, "tasks": TASKS, **options}
        collector = collector_of(engine, tools=[look], **given)
        return await drained(collector), collector.stats

    batches, stats = run_skipping(main())
    return batches, ran, stats


def rows_of(batches):
    """Return task, tokens, log-probs' mask and sums of each row, sorted."""
    return sorted(
        (
            row["collector", "name"].partition("@")[0],
            row["tokens", "full"].tolist(),
            row["masks", "all_assistant_mask"].tolist(),
            int(row["agentic", "n_calls"]),
            int(row["agentic", "n_errors"]),
        )
        for batch in batches
        for row in batch
    )


@pytest.mark.parametrize("group_cache", [True, ["look"]])
def test_identical_calls_of_a_group_run_once_and_are_counted(group_cache):
    batches, ran, stats = run(group_cache=group_cache)
    plain, all_ran, unshared = run()
    assert rows_of(batches) == rows_of(plain)
    assert (ran, all_ran) == ({"k": 2}, {"k": 16})
    assert stats.snapshot()["events"] == {"cached": 14}
    assert stats.scalars()["collector/events/cached"] == 14
    assert "14 cached" in table_of(stats.snapshot())
    assert stats.snapshot()["calls"]["look"]["n"] == 16
    assert unshared.snapshot()["events"] == {}


def test_different_calls_run_each():
    def say(key, turn):
        return call("look", key=f"{turn} of {key}")

    _, ran, stats = run(group_cache=True, say=say)
    assert set(ran.values()) == {1}
    assert len(ran) == 16
    assert stats.snapshot()["events"] == {}


def test_a_shared_call_holds_one_slot_of_a_service():
    limiter = RateLimiter(max_concurrent=1)

    @tool
    async def look() -> str:
        """Look."""
        await asyncio.sleep(1)
        return "seen"

    async def main():
        engine = ScriptedEngine(lambda key, turn, ids: "end" if turn else call("look"), tokenizer())
        compose = ToolCompose([look], rate_limits={"look": limiter})
        options = {"tokenizer": tokenizer(), "group_size": 4, "group_cache": True}
        await drained(collector_of(engine, transforms=compose, tasks=TASKS, **options))

    run_skipping(main())
    assert limiter.stats().granted == 2


def test_tools_that_change_things_run_for_each_trajectory():
    effects = Effects(writes=["orders"])
    _, ran, stats = run(group_cache=True, effects=effects)
    assert (ran, stats.snapshot()["events"]) == ({"k": 16}, {})
    with pytest.raises(ValueError, match=r"group_cache names 'look', .*writes orders"):
        run(group_cache=["look"], effects=effects)


def test_a_trajectory_that_is_replaced_finds_the_results_of_its_group():
    failed = []

    def reward(trajectory):
        if not failed and trajectory.index == 1:
            failed.append(trajectory.name)
            raise LookupError("no reward")
        return 1.0

    batches, ran, stats = run(group_cache=True, reward=reward)
    assert len(rows_of(batches)) == 8
    assert (ran, stats.snapshot()["events"]) == ({"k": 2}, {"replaced": 1, "cached": 16})


@pytest.mark.parametrize("wrong", ["look", 3, None, [3]])
def test_something_else_than_names_is_refused(wrong):
    with pytest.raises(TypeError, match="group_cache is True, False or names of tools"):
        run(group_cache=wrong)


def test_a_name_of_no_tool_is_refused():
    with pytest.raises(ValueError, match="did you mean 'look'"):
        run(group_cache=["lok"])
