"""After Ctrl-C one iterates on and has every batch; a collector that was closed says why."""

import asyncio
import os
import signal
import sys
import threading

import pytest
from helpers.collector_worlds import (
    CountedTool,
    WildEngine,
    collector_of,
    drained,
    looks,
    numbered_tasks,
    tasks_of,
    tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_agentic import Recorder, ToolCompose
from torchrl_agentic.collectors import CollectorError, TaskStream
from torchrl_agentic.testing import run_skipping

NAMES = ["t0", "t1", "t2", "t3"]


@pytest.fixture(autouse=True)
def _interrupts_raise():
    """Background jobs of shells ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def made(act=None, **more):
    """Return a collector of four groups, one per batch."""
    given = {"tools": [CountedTool(act)], "tasks": 4, "reward": lambda one: 1.0, "max_staleness": 0, **more}
    return collector_of(WildEngine(looks(1)), **given)


def collected(collector, into):
    """Add the batches of a collector to a list; return True if it was interrupted."""
    try:
        for batch in collector:
            into.append(batch)
    except KeyboardInterrupt:
        return True
    return False


def test_a_loop_that_was_interrupted_while_it_waited_goes_on_without_a_loss():
    async def act(key):
        if key.startswith("t2/"):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.3)

    batches = []
    with made(act) as collector:
        assert collected(collector, batches)
        assert not collected(collector, batches)
    assert tasks_of(batches) == NAMES


def test_a_loop_that_was_interrupted_in_its_body_goes_on_with_the_next_batch():
    batches = []
    with made() as collector:
        try:
            for batch in collector:
                batches.append(batch)
                os.kill(os.getpid(), signal.SIGINT)
                threading.Event().wait(30)
        except KeyboardInterrupt:
            assert tasks_of(batches) == ["t0"]
        assert not collected(collector, batches)
    assert tasks_of(batches) == NAMES


def interrupted_at(number, work):
    """Call a function, and interrupt it at a call of a function that it makes on this thread; None: never.

    Python looks for signals when a function begins, so that this is where Ctrl-C may arrive.
    """
    left = [number]

    def count(frame, event, arg):
        if event == "call" and left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                left[0] = None
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return work()
    finally:
        sys.setprofile(before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine that never began
@settings(deadline=None)
@given(st.lists(st.integers(0, 30) | st.integers(0, 3000), min_size=1, max_size=4), st.booleans())
def test_no_batch_is_lost_wherever_the_interrupts_arrive(places, is_stream):
    tasks = numbered_tasks(4)
    heard = []
    collector = made(
        tasks=TaskStream(tasks, epochs=1, seed=None) if is_stream else tasks,
        post_collect_hook=lambda batch: heard.append(tasks_of([batch])[0]),
    )
    batches, states = [], []
    with collector:
        for place in places:
            try:
                interrupted_at(place, lambda: collected_batches(collector, batches))
            except KeyboardInterrupt:
                states.append((tasks_of(batches), collector.state_dict()))
        assert not collected(collector, batches)
    assert tasks_of(batches) == NAMES
    assert sorted(set(heard)) == NAMES
    for done, state in states:
        again = made(tasks=TaskStream(tasks, epochs=1, seed=None) if is_stream else tasks)
        again.load_state_dict(state)
        with again:
            assert done + tasks_of(list(again)) == NAMES


def collected_batches(collector, into):
    """Add the batches of a collector to a list."""
    for batch in collector:
        into.append(batch)


def test_an_interrupted_hook_gets_its_batch_again_and_the_record_has_it_once(tmp_path):
    heard = []

    def hook(batch):
        heard.append(tasks_of([batch])[0])
        if len(heard) == 2:
            raise KeyboardInterrupt

    with Recorder(tmp_path) as recorder:
        transforms = ToolCompose([CountedTool()], recorder=recorder)
        collector = made(post_collect_hook=hook, tools=(), transforms=transforms, tokenizer=tokenizer())
        batches = []
        with collector:
            assert collected(collector, batches)
            assert collector.state_dict()["batches"] == 1
            assert not collected(collector, batches)
    assert heard == ["t0", "t1", "t1", "t2", "t3"]
    assert tasks_of(batches) == NAMES
    lines = "".join(path.read_text() for path in tmp_path.rglob("*group*") if path.is_file())
    assert lines.count('"t1"') == 1


def test_async_for_goes_on_after_its_task_was_cancelled():
    async def main():
        collector = made(lambda key: asyncio.sleep(10.0))
        batches = []
        async with collector:
            n_cancelled = 0
            while len(batches) < 4:
                try:
                    async with asyncio.timeout(3.0):
                        async for batch in collector:
                            batches.append(batch)
                except TimeoutError:
                    n_cancelled += 1
        return batches, n_cancelled

    batches, n_cancelled = run_skipping(main())
    assert tasks_of(batches) == NAMES
    assert n_cancelled > 4


def leave(collector):
    with collector:
        next(iter(collector))


def leave_unused(collector):
    with collector:
        pass


def leave_async(collector):
    async def main():
        async with collector:
            pass

    asyncio.run(main())


@pytest.mark.parametrize(
    "close",
    [leave, leave_unused, leave_async, lambda one: one.shutdown()],
    ids=["used", "unused", "async", "shutdown"],
)
def test_a_collector_that_was_closed_too_early_says_so_to_every_reader(close):
    collector = made()
    close(collector)
    for read in (list, lambda one: list(one.trajectories()), lambda one: asyncio.run(drained(one))):
        with pytest.raises(CollectorError, match=r"was shut down.*Create a new AgentCollector"):
            read(collector)


@pytest.mark.parametrize("n_tasks", [0, 4])
def test_a_collector_whose_tasks_have_ended_stays_at_its_end(n_tasks):
    with made(tasks=n_tasks) as collector:
        assert len(list(collector)) == n_tasks
        assert list(collector) == []
    assert list(collector) == []
    collector.shutdown()
    assert list(collector) == list(collector.trajectories()) == []


def test_an_error_that_ended_a_collector_is_raised_again_with_its_cause():
    def hook(batch):
        raise LookupError("of the hook")

    collector = made(post_collect_hook=hook)
    with collector, pytest.raises(LookupError):
        list(collector)
    for _ in range(2):
        with pytest.raises(CollectorError, match="of the hook") as caught:
            list(collector)
        assert isinstance(caught.value.__cause__, LookupError)
