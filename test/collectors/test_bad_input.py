"""Invalid tasks, and engines, tools, rewards and recorders that fail: an error or a stated result."""

import asyncio
import threading
from dataclasses import replace

import pytest
from helpers.collector_worlds import (
    CountedTool,
    WildEngine,
    collector_of,
    drained,
    looks,
    tasks_of,
    tokenizer,
)
from helpers.limit import limit

from torchrl_agentic import Task, ToolCompose, ToolResult
from torchrl_agentic.collectors import CollectorError, Score
from torchrl_agentic.engines import Sampled
from torchrl_agentic.records import Recording, TrajectoryHook
from torchrl_agentic.testing import run_skipping

GOOD = {"query": "hi"}


def run(engine=None, **more):
    """Return the batches and the figures of a collector on the skip clock."""

    async def main():
        collector = collector_of(engine or WildEngine(looks(0)), **more)
        return await drained(collector), collector.stats.snapshot()

    return run_skipping(main())


@pytest.mark.parametrize(
    "row",
    [
        3, {}, {"query": None}, {"messages": []}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 3}]}, {"messages": [{"role": "user", "content": b"hi"}]},
        Task("t", [{"role": "user", "content": "hi"}], data={3: "a column"}),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_that_is_no_task_is_dropped_and_counted(row):
    batches, figures = run(tasks=[GOOD, row, GOOD])
    assert tasks_of(batches) == ["0", "2"]
    assert figures["failures"] == {"task": 1}
    assert figures["events"]["dropped"] == 1


def test_rows_none_of_which_is_a_task_end_with_the_last_error():
    with pytest.raises(CollectorError, match="a row needs one of messages"):
        run(tasks=[{}, {}])


def test_endless_rows_none_of_which_is_a_task_end_too():
    with pytest.raises(CollectorError, match="a row needs one of messages"):
        run(tasks=iter(dict, None))


def test_tasks_that_raise_end_the_collector_with_their_error():
    def tasks():
        yield GOOD
        raise OSError("the disk is gone")

    with pytest.raises(CollectorError, match="the disk is gone"):
        run(tasks=tasks(), groups_per_batch=2)


def test_a_generator_that_blocks_stops_nobody():
    goes_on = threading.Event()

    def tasks():
        yield GOOD
        goes_on.wait(limit(20))
        yield GOOD

    collector = collector_of(WildEngine(looks(0)), tasks=tasks())
    with collector:
        assert tasks_of([next(iter(collector))]) == ["0"]
        goes_on.set()
        assert tasks_of([next(iter(collector))]) == ["1"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "NoneType instead of Sampled"),
        ("text", "str instead of Sampled"),
        (Sampled([5, 99_999], [-1.0, -1.0]), "is it the tokenizer of this model"),
        (Sampled([-1], [-1.0]), "is it the tokenizer of this model"),
        (Sampled([5] * 2000, [-1.0] * 2000), "at most 1024"),
        (Sampled([5, 6], [-1.0]), "2 ids and 1 log-prob"),
        (Sampled(None), "list of token ids"),
        (Sampled([1.5], [-1.0]), "list of token ids"),
        (Sampled([5], ["a"]), "list of log-prob"),
        (Sampled([5], [-1.0], "done"), "finish is one of"),
        (Sampled([5], [-1.0], "stop"), "stopped at id 5, which does not end an answer here"),
        (Sampled([5], [float("nan")], "length"), "not finite numbers up to 0"),
        (Sampled([5], [-float("inf")], "length"), "not finite numbers up to 0"),
        (Sampled([5], [0.5], "length"), "not finite numbers up to 0"),
        (Sampled([], [], "aborted"), "times without a token"),
        (RuntimeError("it broke"), "it broke"),
        (SystemExit(1), "SystemExit"),
        (asyncio.CancelledError(), "cancelled a request"),
    ],
    ids=str,
)
def test_an_engine_that_breaks_its_protocol_is_named_and_ends_the_collector(answer, message):
    engine = WildEngine(looks(0))

    async def sample(ids, **more):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    engine.sample = sample
    with pytest.raises(CollectorError, match=message):
        run(engine)


def test_an_engine_that_returns_nothing_makes_empty_answers():
    engine = WildEngine(looks(0))

    async def sample(ids, **more):
        return Sampled([], [], "stop")

    engine.sample = sample
    (batch,), _ = run(engine)
    assert not batch[0]["masks", "all_assistant_mask"].any()
    assert batch[0]["collector", "reason"] == "max_new_tokens"


def test_missing_log_probs_are_nan_and_told_once(caplog):
    engine = WildEngine(looks(1))

    async def sample(ids, **more):
        found = await WildEngine.sample(engine, ids, **more)
        return Sampled(found.ids, None, found.finish, found.version)

    engine.sample = sample
    batches, _ = run(engine, tools=[CountedTool()], tasks=2)
    assert all(batch[0]["log_probs", "full"].isnan().all() for batch in batches)
    assert caplog.text.count("returns no log-probabilities") == 1


def raises(trajectory):
    raise ValueError("no reward today")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (raises, "no reward today"),
        (lambda _: None, "TypeError"),
        (lambda _: "1.0", "a reward is a number"),
        (lambda _: float("nan"), "finite"),
        (lambda _: float("inf"), "finite"),
        (lambda _: 1e39, r"must be finite and at most 3\.4028e\+38 in size"),
        (
            lambda _: Score(0.0, parts={"perplexity": 1e39}),
            r"perplexity must be finite and at most 3\.4028e\+38",
        ),
    ],
)
def test_a_reward_that_is_no_number_is_a_failure_of_the_reward(reward, message):
    with pytest.raises(CollectorError, match=message):
        run(tasks=1, reward=reward, on_failure="raise")


def test_tool_rewards_that_float32_cannot_hold_are_a_failure_of_the_reward():
    class Rich(CountedTool):
        async def run(self, arguments, context):
            return replace(ToolResult.from_text(await super().run(arguments, context)), reward=3e38)

    with pytest.raises(CollectorError, match=r"tool_reward must be finite and at most 3\.4028e\+38 in size"):
        run(WildEngine(looks(2)), tools=[Rich()], tasks=1, on_failure="raise")


def test_one_failure_of_each_kind_is_replaced_and_told_apart():
    lost = iter(["lost"])
    bad = iter([None])
    engine = WildEngine(looks(1), fate=lambda key: next(lost, "ok"))
    batches, figures = run(
        engine, tools=[CountedTool()], tasks=3, engine_retries=0, reward=lambda _: next(bad, 1.0)
    )
    assert sorted(tasks_of(batches)) == ["t0", "t1", "t2"]  # the replaced one may leave later
    assert figures["failures"] == {"engine": 1, "reward": 1}
    assert figures["events"]["replaced"] == 2


def test_a_lost_engine_is_asked_again_within_one_trajectory():
    lost = iter(["lost", "lost"])
    batches, figures = run(WildEngine(looks(0), fate=lambda key: next(lost, "ok")))
    assert tasks_of(batches) == ["t0"]
    assert not figures["failures"]


@pytest.mark.parametrize("stuck", ["tool", "reward", "engine"])
def test_one_stuck_trajectory_harms_nobody_else(stuck):
    """The others end although the first attempt of t1 hangs; a timeout replaces it, and its place is free."""
    ended = []

    def hangs(key):
        return key.startswith("t1/1.0@")

    async def act(key):
        if stuck == "tool" and hangs(key):
            await asyncio.Event().wait()

    async def reward(trajectory):
        if stuck == "reward" and hangs(trajectory.name):
            await asyncio.Event().wait()
        ended.append(trajectory.task.name)
        return 1.0

    engine = WildEngine(looks(1), fate=lambda key: "hang" if stuck == "engine" and hangs(key) else "ok")
    compose = ToolCompose([CountedTool(act)], per_call_timeout=None)

    async def main():
        collector = collector_of(
            engine, transforms=compose, tokenizer=tokenizer(), tasks=4, groups_per_batch=4,
            max_in_flight=2, reward=reward, trajectory_timeout=1000.0,
        )  # fmt: skip
        return await drained(collector), collector.stats.snapshot()["failures"]

    batches, failures = run_skipping(main())
    assert ended == ["t0", "t2", "t3", "t1"]
    assert tasks_of(batches) == ["t0", "t1", "t2", "t3"]
    assert sum(failures.values()) == 1


def test_a_recorder_that_raises_harms_no_trajectory():
    class Torn(Recording):
        def record_turn(self, turn):
            raise OSError("the disk is full")

        def finish(self, reason):
            raise OSError("the disk is full")

    class Hook(TrajectoryHook):
        def begin(self, trajectory, row=0):
            return Torn()

    compose = ToolCompose([CountedTool()], recorder=Hook())

    async def main():
        return await drained(
            collector_of(WildEngine(looks(1)), transforms=compose, tokenizer=tokenizer(), tasks=2)
        )

    assert tasks_of(run_skipping(main())) == ["t0", "t1"]


def test_a_trajectory_that_ignores_its_cancellation_does_not_hold_the_shutdown():
    async def reward(trajectory):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() > 500:
                    raise

    async def main():
        collector = collector_of(WildEngine(looks(0)), reward=reward)
        loop = asyncio.get_running_loop()
        waits = asyncio.ensure_future(anext(aiter(collector)))
        await asyncio.sleep(1)
        await collector.aclose()
        assert loop.time() < 100
        with pytest.raises(CollectorError, match="shut down"):
            await waits
        await asyncio.sleep(1000)

    run_skipping(main())


class Torn(dict):
    """A message whose content is lost once it is read."""

    def items(self):
        raise RuntimeError("a torn row")

    keys = items


def test_a_message_that_cannot_be_copied_costs_its_group_only(caplog):
    task = Task("t", [Torn(role="user", content="hi")])
    batches, figures = run(tasks=[GOOD, task, GOOD], trajectory_timeout=50.0)
    assert tasks_of(batches) == ["0", "2"]
    assert figures["events"]["dropped"] == 1
    assert "a torn row" in caplog.text


async def test_endless_rows_that_are_dropped_let_other_tasks_run():
    dropped = []

    async def tasks():
        while True:
            yield 3

    collector = collector_of(
        WildEngine(looks(0)), tasks=tasks(), failure_hook=dropped.append, max_failures=None
    )
    async with collector:
        asking = asyncio.ensure_future(anext(aiter(collector)))
        while len(dropped) < 1000:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
