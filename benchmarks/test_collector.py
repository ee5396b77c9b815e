"""How busy `AgentCollector` keeps an engine, and what its event loop costs.

Trajectories have 1 to 16 turns with answers of about 80 tokens; a tool takes 0.3 s, its 99th percentile 9 s.
The engine is `SimulatedEngine`, at most 14,035 tokens/s. Waiting takes no time, computing takes its own. Each
benchmark prints its figures; `test_collector_vllm.py` has those of a real engine.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collector_load import HEAVY, Answers, Load, LockStep, Measured, collect, engine_alone, number_of, tasks
from helpers.admission_runs import flat, simulate
from helpers.chat_envs import collate
from torch.utils.data import DataLoader
from torchrl.envs.llm import DatasetChatEnv

from torchrl_agentic.collectors import AgentCollector
from torchrl_agentic.collectors.admission import GroupAdmission
from torchrl_agentic.testing import SimulatedEngine, run_skipping

with warnings.catch_warnings():  # TorchRL warns of classes of its own as they are defined
    warnings.filterwarnings("ignore", "Creating .*WeightUpdater", DeprecationWarning)
    from torchrl.collectors.llm import LLMCollector

torch.set_num_threads(1)  # processor time counts the threads of torch that wait
Benchmark = Callable[..., Any]
BEFORE_MS = 52.0
"""Processor time of an answer at 1 to 48 turns in lock-step at commit 427ad79, on a loaded machine."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:frames_per_batch:UserWarning"),
    pytest.mark.timeout(900),
]


def once(benchmark: Benchmark, run: Callable[[], Measured]) -> Measured:
    """Run once, and keep the figures."""
    found: Measured = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info["tokens per second"] = found.rate
    benchmark.extra_info["ms per answer"] = found.ms_per_answer
    return found


def lock_step(load: Load, rows: int, ended: int) -> Measured:
    """Run a load on `LLMCollector` until so many trajectories have ended; ended rows begin another one."""
    sampler = LockStep(load)
    loader = DataLoader([{"query": f"q{number}"} for number in range(100_000)], collate_fn=collate)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(rows,))
    for transform in sampler.transforms():
        env.append_transform(transform)
    collector = LLMCollector(
        env, policy=sampler.policy(), dialog_turns_per_batch=1, yield_completed_trajectories=True
    )
    start, count = time.process_time(), 0
    for batch in collector:
        count += sum(bool(row["next", "done"].any()) for row in batch.unbind(0))
        if count >= ended:
            break
    cpu = time.process_time() - start - sampler.own_s
    collector.shutdown()
    return Measured(cpu + sampler.waited_s, cpu, sampler.tokens, sampler.answers, count)


def collected(
    load: Load, ended: int | None, *, counts_cpu: bool = True, prepared: int = 10_000, **options: Any
) -> Measured:
    """Run a load on `AgentCollector`."""
    engine = SimulatedEngine(Answers(load, prepared))
    return run_skipping(collect(load, engine, ended, **options), counts_cpu=counts_cpu)


@pytest.mark.parametrize("ended", [1_000])
def test_a_stream_of_trajectories(benchmark: Benchmark, ended: int) -> None:
    """64 trajectories at once: tokens per second beside `LLMCollector` with 64 rows."""
    benchmark.group = "collector: a stream, 64 trajectories at once"
    found = once(benchmark, lambda: collected(HEAVY, ended, max_in_flight=64))
    beside = lock_step(HEAVY, 64, ended)
    print(
        f"\nAgentCollector: {found}\nLLMCollector:   {beside}\nratio {found.rate / beside.rate:.1f} (reach 8)"
    )


def test_a_busy_engine(benchmark: Benchmark) -> None:
    """`max_in_flight="auto"`: tokens per second beside the engine with all places taken."""
    benchmark.group = 'collector: max_in_flight="auto"'
    saturated = SimulatedEngine(Answers(HEAVY, 0)).saturated_tokens_per_s
    found = once(benchmark, lambda: collected(HEAVY, 3_000, warm_up=1_000))
    print(
        f"\nAgentCollector: {found}\n{found.rate / saturated:.1%} of {saturated:,.0f} tokens/s (reach 90 %)"
    )


def test_the_cost_of_an_answer(benchmark: Benchmark) -> None:
    """Trajectories of 1 to 48 turns, 16 at once, tools that take no time: processor time per answer."""
    benchmark.group = "collector: processor time, 1 to 48 turns"
    load = Load(median_s=0.0, most_turns=48)
    found = once(
        benchmark, lambda: collected(load, None, counts_cpu=False, tasks=tasks(0, 64), max_in_flight=16)
    )
    beside = lock_step(load, 16, 64)
    print(
        f"\nAgentCollector: {found}\nLLMCollector:   {beside}\n"
        f"1/{BEFORE_MS / found.ms_per_answer:.0f} of {BEFORE_MS} ms (reach 1/50), "
        f"1/{beside.ms_per_answer / found.ms_per_answer:.1f} of LLMCollector"
    )


class Noted(Answers):
    """Answers that note the processor time at which each is asked for."""

    def __init__(self, load: Load, prepared: int) -> None:
        super().__init__(load, prepared)
        self.asked: dict[int, list[float]] = {}

    def __call__(self, key: str, turn: int, prompt: object) -> list[int]:
        """Return the ids of an answer."""
        self.asked.setdefault(number_of(key), []).append(time.process_time())
        return super().__call__(key, turn, prompt)


def test_the_48th_turn(benchmark: Benchmark) -> None:
    """One trajectory at a time, answers of one length: processor time of the 48th turn and of the 1st."""
    benchmark.group = "collector: processor time of the 48th turn"
    load = Load(median_s=0.0, least_turns=49, most_turns=49, spread=0.0)
    answers = Noted(load, 24)

    def run() -> Measured:
        engine = SimulatedEngine(answers)
        return run_skipping(collect(load, engine, tasks=tasks(0, 24), max_in_flight=1))

    once(benchmark, run)
    turns = [
        [later - asked for asked, later in itertools.pairwise(times)]
        for number, times in answers.asked.items()
        if number  # the first one warms up
    ]
    first, last = (statistics.median(each[turn] for each in turns) for turn in (0, 47))
    print(f"\nfirst {1e3 * first:.2f} ms, 48th {1e3 * last:.2f} ms, ratio {last / first:.2f} (reach 1.5)")


def test_a_thousand_trajectories(benchmark: Benchmark) -> None:
    """1,024 at once: processor time as a share of the time, and that of the simulation alone."""
    benchmark.group = "collector: one loop, 1,024 trajectories at once"
    found = once(
        benchmark, lambda: collected(HEAVY, 3_000, warm_up=1_000, counts_cpu=False, max_in_flight=1_024)
    )
    engine = SimulatedEngine(Answers(HEAVY, 10_000))
    alone = run_skipping(engine_alone(HEAVY, engine, 1_024, 3_000))
    share, own = found.cpu_s / found.seconds, alone.cpu_s / alone.seconds
    print(
        f"\nAgentCollector: {found}\nonly the simulation: {alone}\n"
        f"{share:.1%} of a core at {found.rate:,.0f} tokens/s (reach 25 %), with {own:.1%} of the simulation"
    )


def test_an_update_every_two_seconds(benchmark: Benchmark) -> None:
    """All tokens reach the ledgers, once and in order, under the version that sampled them."""
    benchmark.group = "collector: a weight update every 2 s"
    count = 1_500
    answers = Answers(HEAVY, count)
    mixed, kept = 0, Counter[int]()

    def check(batch: Any) -> None:
        nonlocal mixed
        for row in batch.tensordicts:
            number = int(row["query"][1:])
            mask = row["masks", "all_assistant_mask"]
            planned = [
                ids
                for turn in range(len(HEAVY.plan(number).sizes))
                for ids in answers(f"{number}/", turn, ())
            ]
            assert row["tokens", "full"][mask].tolist() == planned, "a token is lost, or was sampled twice"
            versions = row["collector", "policy_version"]
            assert (versions[~mask] == -1).all()
            assert (versions[mask] >= 0).all()
            assert (versions[mask].diff() >= 0).all(), "versions rise"
            assert row["log_probs", "full"].isnan().equal(~mask)
            mixed += len(set(versions[mask].tolist())) > 1
            kept[number] += 1

    async def update(collector: AgentCollector) -> None:
        while True:
            await asyncio.sleep(2.0)
            await collector.update_weights(None)

    def run(**options: Any) -> Measured:
        engine = SimulatedEngine(answers)
        options = {"tasks": tasks(0, count), "max_in_flight": 256, **options}
        return run_skipping(collect(HEAVY, engine, count, **options))

    plain = run()
    found = once(benchmark, lambda: run(on_batch=check, beside=update))
    assert kept == Counter(range(count)), "each trajectory leaves once"
    assert mixed > count / 2
    print(
        f"\nwith updates: {found}\nwithout:      {plain}\n"
        f"throughput {found.rate / plain.rate - 1:+.1%} (reach -5 %), 0 tokens lost, 0 wrong ledgers, "
        f"{mixed} of {count} trajectories over several versions"
    )


def test_a_hundred_thousand_groups(benchmark: Benchmark) -> None:
    """Ages, and durations of the groups that were trained on beside as many that were offered."""
    benchmark.group = "collector: admission of 100,000 groups"
    groups, staleness = 100_000, 1
    run = benchmark.pedantic(lambda: simulate(GroupAdmission(8, staleness), groups, in_flight=16), rounds=1)
    left = flat(run.batches)
    above = sum(age > staleness for age in run.ages)
    assert sorted(left) == list(range(groups)), "each group leaves once"
    assert not run.restarted
    assert above == 0
    trained = list(itertools.accumulate(run.durations[number] for number in left))
    offered = list(itertools.accumulate(run.durations))
    bias = [trained[n] / offered[n] - 1 for n in range(groups // 10, groups)]
    print(
        f"\n{above} groups above the bound; mean duration of those trained on beside those offered: "
        f"{min(bias):+.2%} to {max(bias):+.2%}, {statistics.fmean(bias):+.3%} on average, after 10,000"
    )
