"""`Cached(tool, "group")`: a group runs identical calls once, and its batches stay the same."""

import asyncio
from collections import Counter

import pytest
from helpers.collector_worlds import call, collector_of, drained, n_answers, tokenizer

from torchrl_agentic import Cached, tool
from torchrl_agentic.collectors import Branching
from torchrl_agentic.engines import ScriptedEngine
from torchrl_agentic.testing import InProcessWorkers, run_skipping

TASKS = [{"query": "one"}, {"query": "two"}]
ran = Counter()


@tool
async def look(key: str) -> str:
    """Look something up.

    Args:
        key: The key.
    """
    ran[key] += 1
    await asyncio.sleep(1)
    return f"found {key}"


def run(looking, *, say=lambda key, turn: call("look", key="k"), **options):
    """Collect two groups of trajectories with two turns of calls each; return the batches and the calls."""

    async def main():
        def script(key, turn, ids):
            turn = n_answers(ids)
            return "end" if turn > 1 else say(key, turn)

        engine = ScriptedEngine(script, tokenizer())
        given = {"group_size": 4, "tasks": TASKS, **options}
        collector = collector_of(engine, tools=[looking], **given)
        return await drained(collector)

    ran.clear()
    return run_skipping(main()), dict(ran)


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


@pytest.mark.parametrize("speculate", [False, True])
def test_identical_calls_of_a_group_run_once(speculate):
    batches, shared = run(Cached(look, "group"), speculate=speculate)
    plain, alone = run(look, speculate=speculate)
    assert rows_of(batches) == rows_of(plain)
    assert (shared, alone) == ({"k": 2}, {"k": 16})


def test_different_calls_run_each():
    _, found = run(Cached(look, "group"), say=lambda key, turn: call("look", key=f"{turn} of {key}"))
    assert set(found.values()) == {1}
    assert len(found) == 16


def test_a_trajectory_that_is_replaced_finds_the_results_of_its_group():
    failed = []

    def reward(trajectory):
        if not failed and trajectory.index == 1:
            failed.append(trajectory.name)
            raise LookupError("no reward")
        return 1.0

    batches, found = run(Cached(look, "group"), reward=reward)
    assert failed
    assert len(rows_of(batches)) == 8
    assert found == {"k": 2}


def test_the_trees_of_a_group_share_their_calls():
    _, found = run(Cached(look, "group"), branching=Branching(at=(1,)))
    assert found == {"k": 2}


def test_the_trajectories_of_a_group_share_on_their_worker():
    _, found = run(Cached(look, "group"), workers=InProcessWorkers(1))
    assert found == {"k": 2}
