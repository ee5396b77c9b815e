"""`max_in_flight="auto"` beside fixed numbers, on engines whose KV cache is full before their places are.

The loads are those of `collector_load.py`. The engine is `SimulatedEngine` with 256 places, on the skipping
clock. A preempted request is computed again at 25,000 tokens/s, while nothing is decoded; `preempted` is the
share of the engine's busy time that this takes, from the first request on. The tasks do not end, as in a
training run; the rate is that of the trajectories after the first `WARM_UP`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from collector_load import HEAVY, Answers, Load, Measured, collect

from torchrl_agentic.testing import EngineLoad, SimulatedEngine, run_skipping

Benchmark = Callable[..., Any]
FIXED = (16, 24, 32, 48, 64, 128, 256, 512, 1024)
WARM_UP, TRAJECTORIES = 1_024, 1_024
LOADS = {
    "heavy tools": HEAVY,
    "long answers": Load(size=400.0),
    "no tool time": Load(median_s=0.0),
    "slow tools": Load(median_s=2.0, longest_s=60.0),
}
pytestmark = pytest.mark.timeout(7200)


def measured(
    load: Load, kv_tokens: int | None, in_flight: int | Literal["auto"]
) -> tuple[Measured, EngineLoad]:
    """Run a stream of trajectories on `AgentCollector`, and return all figures."""
    engine = SimulatedEngine(Answers(load, WARM_UP + TRAJECTORIES), kv_tokens=kv_tokens)

    async def run() -> tuple[Measured, EngineLoad]:
        found = await collect(load, engine, TRAJECTORIES, warm_up=WARM_UP, max_in_flight=in_flight)
        return found, engine.load()

    return run_skipping(run())


@pytest.mark.parametrize("kv_tokens", [30_000, 100_000, None])
@pytest.mark.parametrize("name", LOADS)
def test_auto_beside_fixed_numbers(benchmark: Benchmark, name: str, kv_tokens: int | None) -> None:
    """Tokens per second of the stream, and preempted work of the whole run."""
    benchmark.group = "collector: max_in_flight with a KV limit"

    def run(in_flight: int | Literal["auto"]) -> tuple[Measured, EngineLoad]:
        return measured(LOADS[name], kv_tokens, in_flight)

    auto, use = benchmark.pedantic(lambda: run("auto"), rounds=1)
    lines = [f"auto  {auto.rate:8,.0f} tokens/s, preempted {use.preempted_share:.2%}"]
    rates: dict[int, float] = {}
    for number in FIXED:
        found, of_fixed = run(number)
        rates[number] = found.rate
        lines.append(f"{number:4}  {found.rate:8,.0f} tokens/s, preempted {of_fixed.preempted_share:.2%}")
    best = max(rates, key=rates.__getitem__)
    ratio = auto.rate / rates[best]
    benchmark.extra_info.update(
        {
            "tokens per second": auto.rate,
            "preempted share": use.preempted_share,
            "best fixed number": best,
            "beside the best fixed number": ratio,
        }
    )
    print(
        f"\n{name}, KV cache of {'any size' if kv_tokens is None else f'{kv_tokens:,} tokens'}\n  "
        + "\n  ".join(lines)
        + f"\n  auto / best fixed number ({best}): {ratio:.3f} (reach 0.95); preempted reach 1 %"
    )
    assert ratio >= 0.95
    assert use.preempted_share <= 0.01
