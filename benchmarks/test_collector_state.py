"""What the state of a running collector costs: its time, its size, the pause of the loop, and its turns."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collector_load import Answers, Load, collect, tasks
from helpers.collector_worlds import call, collector_of, encoded, numbered_tasks

from torchrl_agentic import tool
from torchrl_agentic.collectors.trajectory_run import TrajectoryRun
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.testing import SimulatedEngine, run_skipping

torch.set_num_threads(1)
Benchmark = Callable[..., Any]
TRAJECTORIES, TOKENS, TURNS = 256, 10_000, 5


@tool
async def look(n: int) -> str:
    """Look a number up.

    Args:
        n: The number.
    """
    return f"saw {n}"


class Talker(Engine):
    """Answers with long texts and a call, and never with the last one."""

    def __init__(self) -> None:
        self.version, self.max_concurrent, self.n_hung = 0, TRAJECTORIES, 0
        self.said = encoded("so " * (TOKENS // TURNS // 3 - 50) + call("look", n=1))
        self.all_hang = asyncio.Event()

    async def sample(self, ids: Any, *, max_tokens: int, key: str, on_ids: Any = None) -> Sampled:
        """Return the next answer."""
        if len(ids) > TOKENS * (TURNS - 0.5) / TURNS:
            self.n_hung += 1
            if self.n_hung == TRAJECTORIES:
                self.all_hang.set()
            await asyncio.Event().wait()
        return Sampled(self.said, [-0.123456789] * len(self.said), "stop", 0)

    async def update(self, weights: Any) -> int:
        """Ignore weights."""
        return self.version

    async def close(self) -> None:
        """Close nothing."""


async def pauses_of(is_over: asyncio.Event) -> float:
    """Return the longest time in which the event loop did nothing else, in seconds."""
    longest, last = 0.0, time.perf_counter()
    while not is_over.is_set():
        await asyncio.sleep(0)
        longest, last = max(longest, (now := time.perf_counter()) - last), now
    return longest


def test_the_state_of_256_trajectories(benchmark: Benchmark) -> None:
    """256 trajectories of 10,000 tokens run; another thread takes the state, saves it, and loads it again."""

    async def scenario() -> dict[str, float]:
        engine = Talker()
        options: dict[str, Any] = {"group_size": 8, "groups_per_batch": 32, "max_in_flight": TRAJECTORIES}
        options |= {"max_new_tokens": TOKENS, "tools": [look]}
        collector = collector_of(engine, tasks=numbered_tasks(32), **options)
        found: dict[str, float] = {}
        async with collector:
            waiting = asyncio.ensure_future(anext(aiter(collector)))
            await engine.all_hang.wait()
            is_over = asyncio.Event()
            watching = asyncio.create_task(pauses_of(is_over))
            start = time.perf_counter()
            state = await asyncio.to_thread(collector.state_dict)
            found["s for the state"] = time.perf_counter() - start
            is_over.set()
            found["s in which the loop paused at most"] = await watching
            ledgers = [one["state"]["ledger"] for group in state["groups"] for one in group["running"]]
            found["tokens"] = sum(size for ledger in ledgers for *_, size in ledger["runs"])
            start, file = time.perf_counter(), io.BytesIO()
            torch.save(state, file)
            found["s to save"], found["MB"] = time.perf_counter() - start, file.tell() / 1e6
            file.seek(0)
            start = time.perf_counter()
            loaded = torch.load(file, weights_only=True)
            other = collector_of(Talker(), tasks=numbered_tasks(32), **options)
            found["s to unpickle"], start = time.perf_counter() - start, time.perf_counter()
            other.load_state_dict(loaded)
            found["s to load"] = time.perf_counter() - start
            waiting.cancel()
            await asyncio.wait({waiting})
        return found

    found = benchmark.pedantic(lambda: asyncio.run(scenario()), rounds=1)
    benchmark.extra_info.update(found)
    print("\n" + ", ".join(f"{value:.3g} {name}" for name, value in found.items()))


def test_the_mark_of_a_turn(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a turn costs, and the part of it that makes a state possible."""
    own = getattr(TrajectoryRun, "_mark_turn")  # noqa: B009
    spent, n_turns = 0.0, 0

    def timed(run: Any, speaker: Any) -> None:
        nonlocal spent, n_turns
        start = time.thread_time()
        own(run, speaker)
        spent, n_turns = spent + time.thread_time() - start, n_turns + 1

    def run() -> Any:
        load = Load(median_s=0.0, most_turns=48)
        engine = SimulatedEngine(Answers(load, 64))
        return run_skipping(collect(load, engine, tasks=tasks(0, 64), max_in_flight=16))

    monkeypatch.setattr(TrajectoryRun, "_mark_turn", timed)
    measured = benchmark.pedantic(run, rounds=1)
    figures = {"us per mark": spent / n_turns * 1e6, "us per turn": measured.ms_per_answer * 1e3}
    benchmark.extra_info.update(figures)
    print("\n" + ", ".join(f"{value:.3g} {name}" for name, value in figures.items()))
