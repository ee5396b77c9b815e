"""What a collector's own process pays per answer of a trajectory on a worker, and how far that scales.

10,000 trajectories are in flight over 8 Ray actors, over a simulated engine that has a place for each. The
machine need not have 8 cores: the processor time of each process is measured, and exact mean value analysis
of a closed network (10,000 trajectories, a driver, 8 workers with a core each, answers and tools as delays)
gives the throughput that they have with a core each. The simulated engine lives in the process of the
collector; its own time, measured without a collector, is subtracted: a real engine has its own processor.

An engine for each worker, with 1,250 sequences at once, needs `TURN_S` for an answer by the model of
`SimulatedEngine`. Faster turns show where the process of the collector becomes the bottleneck.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import ray
from collector_load import PER_SEQUENCE_S, STEP_S, TOKENIZER, Answers, Load, compose_of, tasks
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory
from torchrl_agentic.collectors import AgentCollector, RayWorkers
from torchrl_agentic.testing import SimulatedEngine

WORKERS, IN_FLIGHT = 8, 10_000
DELAY_S = 10.0
"""Seconds of an answer in the measured run, about as fast as two cores allow; batches are larger with 8."""
MEASURED_S = 60.0
TICK = os.sysconf("SC_CLK_TCK")

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Generator[None]:
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.getcwd()])}}
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env=here,
        object_store_memory=200 << 20,
    )
    yield
    ray.shutdown()


def cpu_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def worker_pids() -> list[int]:
    """Return the processes of the actors."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"_RayWorker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def throughput(customers: int, think_s: float, demands: list[float]) -> float:
    """Return the throughput of a closed network of queues and a delay, by exact mean value analysis.

    Args:
        customers: Number of trajectories in flight.
        think_s: Seconds of the delay, per turn.
        demands: Seconds of processor time that a turn takes at each queue, on average over all turns.
    """
    waiting = [0.0] * len(demands)
    rate = 0.0
    for count in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, waiting, strict=True)]
        rate = count / (think_s + sum(times))
        waiting = [rate * seconds for seconds in times]
    return rate


LOAD = Load(median_s=0.0, size=80.0)
SIZES = [size for number in range(1_000) for size in LOAD.plan(number).sizes]
TURN_S = sum(SIZES) / len(SIZES) * (STEP_S + PER_SEQUENCE_S * IN_FLIGHT / WORKERS)
"""Mean seconds of an answer of an engine that works on 1,250 sequences at once; tools take no time here."""
REACH = 0.85


def new_engine() -> SimulatedEngine:
    """Return an engine with a place for each trajectory."""
    return SimulatedEngine(
        Answers(LOAD, 2 * IN_FLIGHT),
        step_s=DELAY_S / 100,
        per_sequence_s=0.0,
        max_concurrent=IN_FLIGHT,
        piece_tokens=1024,
    )


async def engine_s() -> float:
    """Return the processor time that an answer takes in the engine itself."""
    engine, prompt = new_engine(), [1] * 300

    async def trajectory(number: int) -> None:
        for _ in LOAD.plan(number).sizes:
            await engine.sample(prompt, max_tokens=1024, key=f"{number}/0.0")

    running = [asyncio.create_task(trajectory(number)) for number in range(IN_FLIGHT)]
    await asyncio.sleep(2 * DELAY_S)
    before = engine.load().finished, time.process_time()
    await asyncio.sleep(2 * DELAY_S)
    after = engine.load().finished, time.process_time()
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    return (after[1] - before[1]) / (after[0] - before[0])


async def measured() -> tuple[float, float, int]:
    """Return seconds of the driver and of all workers per answer, and the number of answers."""
    load, engine = LOAD, new_engine()
    collector = AgentCollector(
        Compose(compose_of(), EndTrajectory(max_turns=load.most_turns, when_no_calls=True)),
        engine=engine,
        tokenizer=TOKENIZER,
        tasks=tasks(),
        groups_per_batch=16,
        max_staleness=None,
        max_turns=load.most_turns,
        max_in_flight=IN_FLIGHT,
        workers=RayWorkers(WORKERS, cpus_per_worker=1),
    )

    async def drain() -> None:
        async for _ in collector:
            pass

    draining = asyncio.create_task(drain())
    async with collector:
        while collector.stats.snapshot()["engine"]["requests"] < 0.95 * IN_FLIGHT:
            await asyncio.sleep(1)
            if draining.done():
                draining.result()
        pids = worker_pids()
        assert len(pids) == WORKERS
        before = engine.load().finished, time.process_time(), sum(map(cpu_s, pids))
        await asyncio.sleep(MEASURED_S)
        after = engine.load().finished, time.process_time(), sum(map(cpu_s, pids))
    await asyncio.wait([draining])
    answers = after[0] - before[0]
    return (after[1] - before[1]) / answers, (after[2] - before[2]) / answers, answers


def test_ten_thousand_trajectories_on_eight_workers(benchmark: Any) -> None:
    """Share of linear throughput."""
    benchmark.group = "workers: 10,000 trajectories in flight"
    of_engine = asyncio.run(engine_s())
    with_engine, worker_s, answers = benchmark.pedantic(lambda: asyncio.run(measured()), rounds=1)
    driver_s = with_engine - of_engine
    benchmark.extra_info |= {"driver ms": 1e3 * driver_s, "worker ms": 1e3 * worker_s}
    print(
        f"\n{answers} answers; processor time per answer: driver {1e3 * driver_s:.3f} ms (and the engine "
        f"{1e3 * of_engine:.3f} ms), worker {1e3 * worker_s:.3f} ms; with a core each:"
    )
    shares: list[float] = []
    for turn_s in (TURN_S, TURN_S / 2, TURN_S / 4):
        eight = throughput(IN_FLIGHT, turn_s, [driver_s, *[worker_s / WORKERS] * WORKERS])
        one = throughput(IN_FLIGHT // WORKERS, turn_s, [driver_s, worker_s])
        shares.append(eight / (WORKERS * one))
        benchmark.extra_info[f"share at {turn_s:.1f} s"] = shares[-1]
        print(
            f"{turn_s:.1f} s per turn: one worker {one:,.0f} answers/s, eight {eight:,.0f}, "
            f"{shares[-1]:.0%} of linear (reach {REACH:.0%})"
        )
    assert shares[0] >= REACH
