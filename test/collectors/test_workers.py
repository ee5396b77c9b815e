"""Trajectories on workers: the protocol over workers of the same process, which die as a test wants."""

import asyncio
import io
import re
import threading
import traceback

import pytest
import torch
from helpers.collector_worlds import (
    WildEngine,
    World,
    check_nothing_left,
    collector_of,
    drained,
    encoded,
    looks,
    names_of,
    rows_of,
    run_schedules,
    tokenizer,
)
from helpers.vision_processors import qwen
from helpers.worker_tools import HeldTool, PlainTool, SharedTool
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchrl.envs import Compose

from torchrl_agentic import (
    EndTrajectory,
    ImagePart,
    RateLimiter,
    Recorder,
    RecordTransform,
    Task,
    ToolCompose,
    ToolResult,
    read_records,
    tool,
)
from torchrl_agentic.collectors import AgentCollector, Branching, CollectorError
from torchrl_agentic.collectors.remote_run import STOP_LIMIT_S
from torchrl_agentic.collectors.workers import choose_worker
from torchrl_agentic.engines import ChatEngine, Sampled, ScriptedEngine
from torchrl_agentic.messages import Message
from torchrl_agentic.testing import InProcessWorkers, run_skipping


class PromptEngine(WildEngine):
    """Answers by the number of results in the prompt, so that an answer may be sampled again.

    The second request sets `arrived`, and waits for `gate`.
    """

    def __init__(self, turns):
        super().__init__(looks(turns))
        self.turns, self.gate, self.arrived = turns, asyncio.Event(), asyncio.Event()

    async def sample(self, ids, *, max_tokens, key, on_ids=None):
        self.asked.append((key, len(ids), max_tokens))
        if len(self.asked) == 2:
            self.arrived.set()
            await self.gate.wait()
        turn = tokenizer().decode(ids).count("found")
        found = list(encoded(looks(self.turns)(key, turn)))
        return Sampled(found, [-1.0] * len(found), "stop", self.version)


def equal(first, second):
    """Return whether two rows are equal but for their times."""
    keys = set(first.keys(True, True)) - {("collector", "seconds"), ("agentic", "tool_seconds")}
    assert keys == set(second.keys(True, True)) - {("collector", "seconds"), ("agentic", "tool_seconds")}
    for key in keys:
        one, other = first[key], second[key]
        if isinstance(one, torch.Tensor):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), key
        else:
            assert one == other, key


@pytest.mark.parametrize("seed", range(5))
def test_rows_equal_those_of_the_own_process_whatever_is_aborted(seed):
    def fate(key):
        counts[key] = counts.get(key, 0) + 1
        return ("ok", "abort", "ok", "empty")[(seed + counts[key] * len(key)) % 4]

    async def main(workers):
        counts.clear()
        engine = WildEngine(looks(seed % 4), fate=fate, piece=1 + seed % 7)
        more = {"group_size": 1 + seed % 3, "speculate": seed % 2 == 1, "reward": lambda found: found.n_calls}
        return await drained(
            collector_of(engine, tools=[SharedTool()], tasks=3, name="x", workers=workers, **more)
        )

    counts = {}
    local, remote = (
        {row["collector", "name"]: row for row in rows_of(run_skipping(main(workers)))}
        for workers in (None, InProcessWorkers(2))
    )
    assert local.keys() == remote.keys() != set()
    for name, row in local.items():
        equal(row, remote[name])


@pytest.mark.parametrize("loses", [False, True])
def test_everything_is_accounted_for_on_random_schedules(loses):
    async def lose(odds, workers):
        while loses:
            await asyncio.sleep(30 * odds.slow * odds.rng.random())
            if workers.hosts:
                await workers.lose(odds.rng.choice(sorted(workers.hosts)))

    world = World(SharedTool())
    more = {"world": world, "beside": lose}

    def workers(odds):
        room = odds.rng.choice([None, None, 2])
        return InProcessWorkers(odds.rng.randint(1, 3), max_trajectories=room, max_restarts=10_000)

    run_skipping(run_schedules(range(12), workers=workers, **more))


@pytest.mark.parametrize("moment", ["engine", "tool"])
def test_a_trajectory_of_a_dead_worker_begins_again_with_its_key_and_another_name(moment):
    async def main():
        engine, look, workers = PromptEngine(2), HeldTool(), InProcessWorkers(1)
        if moment == "engine":
            look.gate.set()
        else:
            engine.gate.set()
        collector = collector_of(engine, tools=[look], tasks=1, name="x", workers=workers)
        batches = asyncio.create_task(drained(collector))
        await (engine if moment == "engine" else look).arrived.wait()
        await workers.lose(0)
        await asyncio.sleep(1)
        engine.gate.set()
        (batch,) = await batches
        return batch, engine, look, collector.stats.snapshot()

    batch, engine, look, figures = run_skipping(main())
    assert names_of(batch) == ["t0/0.0@x+1"]
    assert {key for key, *_ in engine.asked} == {"t0/0.0@x"}
    assert (figures["events"], figures["failures"]) == ({"restarted": 1}, {})
    assert set(look.ran.values()) == {1}  # no call ran twice under one name
    assert look.is_all_closed


def picture(color):
    data = io.BytesIO()
    Image.new("RGB", (56, 56), color).save(data, "png")
    return ImagePart(data.getvalue(), "image/png")


class Look(PlainTool):
    """Shows a picture; the second call waits."""

    def __init__(self):
        super().__init__()
        self.input_schema = {"type": "object", "properties": {}}
        self.n_calls = 0

    async def run(self, args, ctx):
        self.n_calls += 1
        if self.n_calls == 2:
            self.arrived.set()
            await self.gate.wait()
        return ToolResult((picture("red"),))


class Seeing(ScriptedEngine):
    """Counts the images that it gets, and their placeholders; asks for two pictures."""

    takes_media = True

    def __init__(self, processor):
        self.pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
        super().__init__(lambda key, turn, ids: call if self.count(ids) < 2 else "done", processor.tokenizer)
        self.seen = []

    def count(self, ids):
        """Return the number of images in a prompt; 56 pixels are 4 patches of 28 x 28."""
        return list(ids).count(self.pad) // 4

    async def sample(self, ids, *, max_tokens, key, on_ids=None, media=None):
        self.seen.append((self.count(ids), len((media or {}).get("image", []))))
        return await super().sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)


def test_an_engine_gets_each_image_once_though_the_worker_dies():
    async def main():
        processor, look, workers = qwen("qwen2_5_vl"), Look(), InProcessWorkers(1)
        engine = Seeing(processor)
        collector = AgentCollector(
            ToolCompose([look], media=True),
            engine=engine,
            tokenizer=processor.tokenizer,
            tokenizer_options={"processor": processor},
            tasks=[Task("t", [{"role": "user", "content": "Look."}])],
            workers=workers,
            max_staleness=None,
        )
        batches = asyncio.create_task(drained(collector))
        await look.arrived.wait()
        await workers.lose(0)
        await batches
        return engine.seen, collector.stats.snapshot()

    seen, figures = run_skipping(main())
    assert figures["events"] == {"restarted": 1}
    assert [n_images for _, n_images in seen] == [n_pads for n_pads, _ in seen]
    assert seen[-1] == (2, 2)


@pytest.mark.parametrize("ends", [False, True], ids=["timeout", "shutdown"])
def test_a_worker_that_freezes_is_replaced_when_a_trajectory_on_it_is_cancelled(ends):
    async def main():
        seen, workers = asyncio.Event(), InProcessWorkers(1)

        async def act(key):
            seen.set()
            await asyncio.sleep(1)

        collector = collector_of(
            WildEngine(looks(2)),
            tools=[SharedTool(act)],
            tasks=2,
            name="x",
            workers=workers,
            trajectory_timeout=10.0,
        )
        batches = asyncio.create_task(drained(collector))
        await seen.wait()
        await workers.freeze(0)
        async with asyncio.timeout(10 + 3 * STOP_LIMIT_S):
            if ends:
                await collector.aclose()
                with pytest.raises(CollectorError, match="shut down"):
                    await batches
                return [], collector.stats.snapshot(), workers.started
            return rows_of(await batches), collector.stats.snapshot(), workers.started

    rows, figures, started = run_skipping(main())
    if not ends:
        assert len(rows) == 2
        assert set(figures["failures"]) == {"timeout"}
        assert started == 2


def test_a_trajectory_may_take_long_to_close_while_others_report():
    async def main():
        workers = InProcessWorkers(1)

        async def act(key):
            if not key.startswith("t0/0.0@"):
                await asyncio.sleep(1)
                return
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(2 * STOP_LIMIT_S)

        collector = collector_of(
            WildEngine(looks(2)),
            tools=[SharedTool(act)],
            tasks=200,
            name="x",
            workers=workers,
            trajectory_timeout=10.0,
            max_in_flight=2,
        )
        return len(rows_of(await drained(collector))), collector.stats.snapshot()["events"], workers.started

    assert run_skipping(main()) == (200, {"replaced": 1}, 1)


def test_a_trajectory_that_ends_its_workers_again_and_again_fails():
    async def main():
        workers = InProcessWorkers(1, max_restarts=100)

        async def die(key):
            if key.startswith("t1/"):
                asyncio.get_running_loop().create_task(workers.lose(0))
                await asyncio.Event().wait()

        collector = collector_of(
            WildEngine(looks(1)),
            tools=[SharedTool(die)],
            tasks=2,
            name="x",
            workers=workers,
            max_replacements=0,
            max_in_flight=1,
        )
        return await drained(collector), collector.stats.snapshot(), workers.started

    batches, figures, started = run_skipping(main())
    assert len(rows_of(batches)) == 1
    assert figures["events"] == {"restarted": 3, "dropped": 1}
    assert started == 5


def test_a_worker_that_keeps_dying_ends_the_collector():
    async def main():
        async def wait(key):
            await asyncio.Event().wait()

        workers = InProcessWorkers(1, max_restarts=2)
        collector = collector_of(WildEngine(looks(1)), tools=[SharedTool(wait)], workers=workers)

        async def lose():
            while True:
                if workers.hosts:
                    await workers.lose(0)
                await asyncio.sleep(1)

        losing = asyncio.create_task(lose())
        try:
            return await drained(collector)
        finally:
            losing.cancel()

    with pytest.raises(CollectorError, match="worker 0 died 3 times in a row"):
        run_skipping(main())


def test_workers_that_cannot_start_end_the_collector_with_one_error(caplog):
    class Broken(InProcessWorkers):
        async def start(self, number, spec):
            raise OSError("no such image")

    collector = collector_of(
        WildEngine(looks(1)), tools=[PlainTool()], workers=Broken(2), tasks=32, reward=lambda one: 0.0
    )
    with pytest.raises(CollectorError, match=r"worker \d failed: OSError\('no such image'\)") as caught:
        run_skipping(drained(collector))
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("OSError: no such image") == 1
    assert shown.count("in enter") <= 1
    assert not caplog.records


def test_a_limiter_holds_over_all_workers():
    async def main():
        inside = most = 0

        async def act(key):
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

        compose = ToolCompose([SharedTool(act)], rate_limits={"look": RateLimiter(max_concurrent=2)})
        collector = collector_of(
            WildEngine(looks(2)),
            transforms=compose,
            tokenizer=tokenizer(),
            tasks=4,
            group_size=3,
            workers=InProcessWorkers(3),
        )
        return len(rows_of(await drained(collector))), most

    assert asyncio.run(main()) == (12, 2)


def looking():
    """Return transforms, with a lock that cannot be pickled."""
    lock = threading.Lock()

    @tool
    def look(key: str) -> str:
        """Look something up.

        Args:
            key: A key.
        """
        with lock:
            return f"found {key}"

    return ToolCompose([look])


def test_transforms_that_cannot_be_pickled_come_from_a_function():
    given = {"tokenizer": tokenizer(), "workers": InProcessWorkers(2)}
    with pytest.raises(TypeError, match="Pass a function without arguments"):
        collector_of(WildEngine(looks(1)), transforms=looking(), **given)
    (batch,) = run_skipping(drained(collector_of(WildEngine(looks(1)), transforms=looking, **given)))
    assert batch[0]["agentic", "n_calls"].item() == 1


def test_a_limiter_of_each_worker_alone_is_refused():
    def made():
        return ToolCompose([PlainTool.opened()], rate_limits={"look": RateLimiter(max_concurrent=2)})

    with pytest.raises(ValueError, match="write ClusterRateLimiter"):
        collector_of(
            WildEngine(looks(1)), transforms=made, tokenizer=tokenizer(), workers=InProcessWorkers(2)
        )


def test_a_task_that_cannot_be_pickled_is_dropped():
    asked = [{"role": "user", "content": "q"}]
    tasks = [
        Task("bad", asked, data={"lock": threading.Lock()}),
        Task("good", asked, answer=threading.Lock(), data={"copyreg": re.compile("a")}),
    ]
    collector = collector_of(
        WildEngine(looks(1)), tools=[PlainTool.opened()], tasks=tasks, workers=InProcessWorkers(1)
    )
    (batch,) = run_skipping(drained(collector))
    assert names_of(batch)[0].startswith("good/")
    assert collector.stats.snapshot()["failures"] == {"task": 1}


def test_waiting_for_a_worker_takes_no_time_of_a_trajectory():
    collector = collector_of(
        WildEngine(looks(1), delay=lambda key: 0.1),
        tools=[SharedTool()],
        tasks=12,
        workers=InProcessWorkers(1, max_trajectories=1),
        trajectory_timeout=5.0,
        max_staleness=None,
    )
    rows = rows_of(run_skipping(drained(collector)))
    assert len(rows) == 12
    assert collector.stats.snapshot()["failures"] == {}


def test_what_is_no_workers_is_refused():
    with pytest.raises(TypeError, match="workers is RayWorkers"):
        collector_of(WildEngine(looks(1)), tools=[PlainTool.opened()], workers=8)
    with pytest.raises(ValueError, match="count"):
        InProcessWorkers(0)
    with pytest.raises(ValueError, match="exclude each other"):
        collector_of(
            WildEngine(looks(1)), tools=[PlainTool.opened()], workers=InProcessWorkers(1),
            branching=Branching(),
        )  # fmt: skip


class Chat(ChatEngine):
    """An engine that takes messages."""

    version, max_concurrent = 0, 4

    def __init__(self):
        self.heard = []

    async def chat(self, messages, *, tools, max_tokens, key):
        self.heard.append(([dict(message) for message in messages], list(tools)))
        turn = sum(message["role"] == "assistant" for message in messages)
        return Message("assistant", looks(2)(key, turn))

    async def update(self, weights):
        return 0

    async def close(self):
        pass


def test_an_engine_that_takes_messages_hears_the_whole_conversation():
    async def main(workers):
        engine = Chat()
        compose = ToolCompose([PlainTool.opened()])
        collector = AgentCollector(
            compose,
            engine=engine,
            tasks=[Task("t", [{"role": "user", "content": "q"}])],
            name="x",
            workers=workers,
        )
        return await asyncio.to_thread(lambda: list(collector.trajectories())), engine.heard

    (local, heard_here), (remote, heard) = (asyncio.run(main(w)) for w in (None, InProcessWorkers(1)))
    assert heard == heard_here
    assert [message.text for message in remote[0][0].messages] == [m.text for m in local[0][0].messages]


def test_the_collector_records_what_runs_on_workers(tmp_path):
    def recorded(folder, workers):
        with Recorder(folder) as recorder:
            compose = ToolCompose([PlainTool.opened()], recorder=recorder)
            transforms = Compose(compose, EndTrajectory(when_no_calls=True), RecordTransform(tokens=True))
            collector = collector_of(
                WildEngine(looks(2)),
                transforms=transforms,
                tokenizer=tokenizer(),
                tasks=2,
                name="x",
                workers=workers,
                reward=lambda found: 1.0,
            )
            run_skipping(drained(collector))
        return sorted(read_records(folder), key=lambda record: record.trajectory)

    local, remote = recorded(tmp_path / "a", None), recorded(tmp_path / "b", InProcessWorkers(2))
    assert len(local) == len(remote) == 2
    for one, other in zip(local, remote, strict=True):
        assert [m.text for m in one.messages] == [m.text for m in other.messages]
        assert (one.rewards, one.termination_reason, one.tokens) == (
            other.rewards,
            other.termination_reason,
            other.tokens,
        )


def test_a_shutdown_at_any_moment_leaves_nothing_open():
    async def main():
        for moment in range(12):
            engine, look = WildEngine(looks(2), delay=lambda key: 0.01), SharedTool()
            collector = collector_of(
                engine, tools=[look], tasks=None, workers=InProcessWorkers(2), max_in_flight=4
            )
            batches = asyncio.create_task(drained(collector))
            await asyncio.sleep(moment * 0.013)
            await collector.aclose()
            with pytest.raises(CollectorError, match="shut down"):
                await batches
            for _ in range(5):
                await asyncio.sleep(0)
            check_nothing_left(collector, engine, look)

    run_skipping(main())


@given(
    st.dictionaries(st.integers(0, 8), st.integers(0, 5)),
    st.dictionaries(st.integers(0, 8), st.integers(0, 5)),
    st.none() | st.integers(1, 5),
)
def test_the_least_loaded_worker_gets_a_trajectory(loads, of_group, room):
    found = choose_worker(loads, of_group, room)
    free = {one for one, load in loads.items() if room is None or load < room}
    assert (found is None) == (not free)
    if found is not None:
        assert found in free
        assert loads[found] == min(loads[one] for one in free)
        alike = [one for one in free if loads[one] == loads[found]]
        assert of_group.get(found, 0) == min(of_group.get(one, 0) for one in alike)


def test_members_of_a_group_are_spread():
    async def main():
        where = []
        workers = InProcessWorkers(3)

        async def act(key):
            where.append(tuple(workers.hosts[number].running for number in sorted(workers.hosts)))
            await asyncio.sleep(1)

        collector = collector_of(
            WildEngine(looks(1)),
            tools=[SharedTool(act)],
            tasks=2,
            group_size=6,
            max_in_flight=6,
            workers=workers,
        )
        await drained(collector)
        return where

    assert run_skipping(main())[-1] == (2, 2, 2)
