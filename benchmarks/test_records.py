"""The cost of recording a rollout of no-op tools, compared with the same rollout without a recorder."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig import message, noop
from tensordict import TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import EndTrajectory, Recorder, RecordTransform, ToolCompose
from torchrl_agentic.records import SUFFIXES, Dump, read_records
from torchrl_agentic.testing import ScriptedPolicy

Benchmark = Any
ROWS, TURNS, CALLS, ROUNDS = 64, 4, 4, 7


def rollout(recorder: Recorder | None) -> Callable[[], None]:
    """Create a function that rolls out 64 rows over 4 turns with 4 calls each."""
    end = EndTrajectory(max_turns=TURNS)
    behind = [] if recorder is None else [RecordTransform()]
    compose = ToolCompose([noop], "xml", recorder=recorder)
    env = TransformedEnv(ChatEnv(batch_size=(ROWS,)), Compose(compose, end, *behind))
    start = TensorDict({"query": ["What is the capital?"] * ROWS}, batch_size=[ROWS])

    def roll() -> None:
        policy = ScriptedPolicy([[message(CALLS)] * TURNS] * ROWS)
        td = env.reset(start.clone())
        for turn in range(TURNS):
            step = env.step(policy(td))
            if turn < TURNS - 1:
                td = env.step_mdp(step)
        if recorder is not None:
            recorder.flush()

    return roll


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_rollout(benchmark: Benchmark, suffix: str, tmp_path: Path) -> None:
    """Measure until all records are in the file. Each round starts with a run without a recorder."""
    benchmark.group = f"records: {ROWS} rows, {TURNS} turns of {CALLS} calls"
    bare, seconds = rollout(None), list[float]()

    def run_bare() -> None:
        began = time.perf_counter()
        bare()
        seconds.append(time.perf_counter() - began)

    with Recorder(tmp_path, suffix=suffix) as recorder:
        benchmark.pedantic(rollout(recorder), setup=run_bare, rounds=ROUNDS, warmup_rounds=1)
    recorded = benchmark.stats.stats.data
    ratios = [one / other for one, other in zip(recorded, seconds[-ROUNDS:], strict=True)]
    benchmark.extra_info["times the same unrecorded"] = round(statistics.median(ratios), 3)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    with Recorder(folder) as recorder:
        roll = rollout(recorder)
        for step in range(20):
            recorder.step = step
            roll()
    return folder


@pytest.mark.parametrize("which", ["json, line by line", "read_records", "Dump, summaries"])
def test_reading_a_dump(benchmark: Benchmark, which: str, dump: Path) -> None:
    """Compare reading a dump with `json.loads` of its lines."""
    benchmark.group = "records: reading 1,280 trajectories"

    def by_json() -> None:
        for path in dump.iterdir():
            with path.open() as lines:
                for line in lines:
                    json.loads(line)

    def summaries() -> None:
        with Dump(dump) as opened:
            for file in opened.files:
                file.scan()
                for index in range(len(file)):
                    file.summary(index)

    runs = {"json, line by line": by_json, "Dump, summaries": summaries}
    benchmark(runs.get(which, lambda: list(read_records(dump))))
