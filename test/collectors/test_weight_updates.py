"""Weight updates: the age of batches, the versions of tokens, and answers that an update interrupts."""

import asyncio

import pytest
from helpers.collector_worlds import (
    CountedTool,
    WildEngine,
    check_nothing_left,
    check_rows,
    collector_of,
    drained,
    looks,
    rows_of,
    tasks_of,
    tokenizer,
)

from torchrl_agentic.testing import run_skipping


def uneven(key):
    """Return a delay that depends on the trajectory."""
    return 0.1 + sum(map(ord, key.split("@")[0])) % 23


def begun_at(row):
    """Return the version of the first sampled token."""
    versions = row["collector", "policy_version"]
    return versions[versions >= 0][0].item()


async def trained(engine, *, updates=1, batches=6, is_alone=True, **more):
    """Take batches with so many updates behind each; return the rows with the version at their batch."""
    tool = CountedTool(lambda key: asyncio.sleep(uneven(key) * 3))
    collector = collector_of(engine, tools=[tool], tasks=None, group_size=2, groups_per_batch=2, **more)
    found, taken = [], []
    async with collector, asyncio.timeout(1e6):
        async for batch in collector:
            taken.append(batch)
            found += [(row, engine.version) for row in batch.unbind(0)]
            for _ in range(updates):
                await collector.update_weights()
            if len(taken) == batches:
                break
    assert tool.is_all_closed
    if is_alone:
        check_nothing_left(collector, engine, tool)
    check_rows(taken, tool, looks(1), collector, size=2)
    return found


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("updates", [1, 3])
def test_no_token_is_older_than_the_bound(staleness, updates):
    engine = WildEngine(looks(1), delay=uneven)
    found = run_skipping(trained(engine, updates=updates, max_staleness=staleness))
    assert len(found) == 24
    ages = [now - begun_at(row) for row, now in found]
    assert max(ages) <= staleness
    if staleness == updates == 1:
        assert max(ages) == 1


def test_staleness_0_gives_the_batches_of_a_synchronous_script():
    """The script starts the groups of a batch, waits for all of them, and updates."""

    def names(rows):
        return [row["collector", "name"].split("/")[0] for row in rows]

    async def synchronous():
        engine, found = WildEngine(looks(1), delay=uneven), []
        for number in range(6):
            tasks = [{"name": f"t{2 * number + n}", "query": f"q{2 * number + n}"} for n in range(2)]
            collector = collector_of(
                engine, tools=[CountedTool()], tasks=tasks, group_size=2, groups_per_batch=2
            )
            found += rows_of(await drained(collector))
            await engine.update(None)
        return found

    async def asynchronous():
        engine = WildEngine(looks(1), delay=uneven)
        return [row for row, _ in await trained(engine, max_staleness=0)]

    found, wanted = run_skipping(asynchronous()), run_skipping(synchronous())
    assert names(found) == names(wanted)
    for rows in (found, wanted):
        versions = [row["collector", "policy_version"].unique().tolist() for row in rows]
        assert versions == [[-1, number // 4] for number in range(24)]


def parts(row):
    """Return the versions of each answer of a row."""
    versions, answers = row["collector", "policy_version"].tolist(), [[]]
    for version in versions:
        if version >= 0:
            answers[-1].append(version)
        elif answers[-1]:
            answers.append([])
    return [set(answer) for answer in answers if answer]


def test_resumed_answers_carry_the_version_of_each_token():
    found = run_skipping(trained(WildEngine(looks(1), delay=uneven), max_staleness=3))
    assert any(len(versions) > 1 for row, _ in found for versions in parts(row))


@pytest.mark.parametrize("how", ["finish", "cannot resume"])
def test_drained_answers_have_one_version(how):
    engine = WildEngine(looks(1), delay=uneven)
    engine.can_resume = how == "finish"
    on_update = "finish" if how == "finish" else "resume"
    found = run_skipping(trained(engine, max_staleness=3, on_update=on_update))
    answers = [versions for row, _ in found for versions in parts(row)]
    assert all(len(versions) == 1 for versions in answers)
    assert len(set.union(*answers)) > 1


@pytest.mark.parametrize("on_update", ["resume", "finish"])
def test_two_collectors_on_one_engine_follow_the_updates_of_both(on_update):
    async def main():
        engine = WildEngine(looks(1), delay=uneven)
        found = await asyncio.gather(
            *(
                trained(engine, max_staleness=2, batches=4, on_update=on_update, is_alone=False)
                for _ in range(2)
            )
        )
        for rows in found:
            assert max(now - begun_at(row) for row, now in rows) <= 2
            if on_update == "finish":
                assert all(len(versions) == 1 for row, _ in rows for versions in parts(row))
        assert engine.version == 8

    run_skipping(main())


def test_the_budget_of_an_answer_holds_over_resumed_parts():
    async def main():
        engine = WildEngine(lambda key, turn: "x" * 200, fate=lambda key: "abort", piece=7)
        (batch,) = await drained(collector_of(engine, tools=[], max_new_tokens=50))
        (row,) = batch.unbind(0)
        assert row["masks", "all_assistant_mask"].sum() == 50
        budgets = [bound for _, _, bound in engine.asked]
        assert budgets == list(range(50, 0, -7))
        text = tokenizer().decode(row["tokens", "full"][row["masks", "all_assistant_mask"]])
        assert text == "x" * 50

    run_skipping(main())


def test_an_answer_aborted_behind_its_stop_token_is_over():
    async def main():
        engine = WildEngine(lambda key, turn: "abcd")

        async def sample(ids, **more):
            found = await type(engine).sample(engine, ids, **more)
            return type(found)(found.ids, found.log_probs, "aborted", found.version)

        engine.sample = sample
        (batch,) = await drained(collector_of(engine))
        assert len(engine.asked) == 1
        assert tasks_of([batch]) == ["t0"]

    run_skipping(main())


def test_waits_behind_empty_aborts_are_patient():
    """An engine that loads weights for half a minute may refuse requests as aborted meanwhile."""

    async def main():
        loop = asyncio.get_running_loop()
        engine = WildEngine(looks(0), fate=lambda key: "empty" if loop.time() < 30 else "ok")
        assert len(await drained(collector_of(engine, on_failure="raise"))) == 1

    run_skipping(main())
