"""`AgentCollector` over vLLM beside lock-step, with tools that take 0.1 s and whose 99th percentile is 3 s.

128 trajectories of 1 to 8 turns. Each answer has exactly 48 tokens and calls a tool. Lock-step is
`agent_policy` over `vllm.LLM` in an environment of 64 rows, then 128; the collector has as many trajectories
at once. Only one vLLM runs at a time: lock-step first, then the collector. `.venv-vllm` has vLLM.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import EndTrajectory, Tool, ToolCompose, TurnTokenizer
from torchrl_agentic.collectors import AgentCollector, Task
from torchrl_agentic.engines import Engine, Sampled, VLLMEngine
from torchrl_agentic.errors import StopSignal
from torchrl_agentic.messages import JSON, ParsedCall, ParseResult, content_text
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.base import Tools
from torchrl_agentic.rollout import agent_policy
from torchrl_agentic.testing.tiny import TINY, load_tiny, tiny_questions
from torchrl_agentic.tools.row_data import local_name

Benchmark = Callable[..., Any]
ROWS, COUNT, TURNS, SIZE = 64, 128, 8, 48
MEDIAN_S, TAIL, LONGEST_S = 0.1, 30.0, 20.0
ARGS = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 256}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: `make test-vllm`"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(900),
]


def naps_of(number: int) -> list[float]:
    """Return the seconds that the tool takes in each turn of a trajectory but the last."""
    rng = random.Random(number)
    sigma = math.log(TAIL) / 2.326
    return [
        min(LONGEST_S, MEDIAN_S * math.exp(rng.gauss(0, sigma))) for _ in range(rng.randint(0, TURNS - 1))
    ]


ANSWERS = sum(len(naps_of(number)) + 1 for number in range(COUNT))


class Anything(ToolCallParser):
    """Reads any text as one call."""

    name: ClassVar[str] = "anything"

    def parse(
        self, response: str | Mapping[str, JSON], *, tools: Tools | None = None, turn: int = 0
    ) -> ParseResult:
        """Read one call."""
        text = response if isinstance(response, str) else content_text(response.get("content"))
        return ParseResult("", (ParsedCall("work", {}, f"call_{turn}_0", span=(0, len(text))),), text)

    def render_call(self, call: ParsedCall) -> str:
        """Write nothing."""
        return ""


class Work(Tool):
    """A tool that waits as planned, and ends the trajectory in its last turn.

    Args:
        number_of: Returns the number of a trajectory by its name.
        waits: Whether it waits.
    """

    name, description = "work", "Wait for a service."
    input_schema: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}}

    def __init__(self, number_of: Callable[[str], int], *, waits: bool = True) -> None:
        self._number_of, self._waits = number_of, waits

    async def run(self, args: Mapping[str, Any], ctx: Any) -> str:
        """Wait."""
        naps = naps_of(self._number_of(ctx.trajectory))
        if ctx.turn >= len(naps):
            raise StopSignal("done")
        if self._waits:
            await asyncio.sleep(naps[ctx.turn])
        return "ok"


def exact(tokenizer: Any) -> dict[str, Any]:
    """Return sampling parameters with which an answer ends with its last possible token, not before."""
    return {
        "min_tokens": SIZE - 1,
        "logit_bias": {tokenizer.eos_token_id: 100.0, tokenizer.pad_token_id: -100.0},
    }


class Open(Engine):
    """An engine that is asked only for the rows whose trajectories have not ended.

    Args:
        engine: The engine.
        first: Number of the trajectory in the first row.
        stop_id: The answer of the other rows.
    """

    def __init__(self, engine: VLLMEngine, first: int, stop_id: int) -> None:
        self._engine, self._first, self._stop_id = engine, first, stop_id
        self._turns: dict[str, int] = {}  # by trajectory, in the order of the rows
        self.tokens = 0

    async def sample(self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: Any = None) -> Sampled:
        """Sample an answer if the trajectory of the row is open."""
        turn = self._turns[key] = self._turns.get(key, -1) + 1
        if len(naps_of(self._first + list(self._turns).index(key))) < turn:
            return Sampled([self._stop_id], [0.0])
        found = await self._engine.sample(ids, max_tokens=max_tokens, key=key)
        self.tokens += len(found.ids)
        return found

    async def update(self, weights: Any) -> int:
        """Load new weights."""
        return await self._engine.update(weights)

    async def close(self) -> None:
        """Close the engine, and leave vLLM open."""
        await self._engine.close()


def lock_step(llm: Any, tokenizer: Any, rows: int) -> tuple[float, float]:
    """Run all trajectories in lock-step, as many batches as it takes.

    Args:
        llm: The engine.
        tokenizer: Its tokenizer.
        rows: Number of rows of a batch.

    Returns:
        Seconds, and seconds of processor time.
    """
    questions = tiny_questions(COUNT)
    seconds = cpu = 0.0
    tokens = 0
    for first in range(0, COUNT, rows):
        compose = ToolCompose(
            [Work(lambda name, first=first: first + int(local_name(name).split(".")[0]))],
            Anything(),
            per_call_timeout=None,
        )
        turns = TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable")
        env = TransformedEnv(
            ChatEnv(batch_size=(rows,)), Compose(compose, EndTrajectory(max_turns=TURNS), turns)
        )
        vllm = VLLMEngine(llm, tokenizer=tokenizer, sampling=exact(tokenizer))
        engine = Open(vllm, first, tokenizer.eos_token_id)
        policy = agent_policy(engine, tokenizer, max_new_tokens=SIZE)
        queries = [NonTensorData(question["query"]) for question in questions[first : first + rows]]
        query = TensorDict({"query": LazyStackedTensorDict.lazy_stack(queries)}, batch_size=[rows])
        start, own = time.perf_counter(), time.process_time()
        td = env.reset(query)
        for _ in range(TURNS):
            step = env.step(policy(td))
            if bool(step["next", "done"].all()):
                break
            td = env.step_mdp(step)
        seconds, cpu = seconds + time.perf_counter() - start, cpu + time.process_time() - own
        tokens += engine.tokens
        env.close()
    assert tokens == ANSWERS * SIZE
    return seconds, cpu


@dataclass(frozen=True)
class Run:
    """Times of a run of the collector, and of the engine alone right before it, in seconds."""

    seconds: float
    cpu_s: float
    alone_s: float
    alone_cpu_s: float

    @property
    def share(self) -> float:
        """Speed, as a share of that of the engine alone."""
        return self.alone_s / self.seconds

    def __str__(self) -> str:
        return (
            f"{ANSWERS * SIZE / self.seconds:,.0f} tokens/s in {self.seconds:.1f} s, {self.cpu_s:.1f} s "
            f"of CPU; the engine alone {self.alone_s:.1f} and {self.alone_cpu_s:.1f} s: {self.share:.0%}"
        )


async def collect(engine: Any, tokenizer: Any, *, in_flight: int, waits: bool) -> Run:
    """Collect all trajectories, after the engine alone right before.

    Args:
        engine: The engine.
        tokenizer: Its tokenizer.
        in_flight: Number of trajectories at once.
        waits: Whether the tool waits.
    """
    alone, alone_cpu = await engine_alone(engine, in_flight)
    compose = ToolCompose(
        [Work(lambda name: int(name.partition("/")[0]), waits=waits)], Anything(), per_call_timeout=None
    )
    questions = tiny_questions(COUNT)
    collector = AgentCollector(
        compose,
        engine=engine,
        tokenizer=tokenizer,
        tasks=[Task(str(i), [{"role": "user", "content": q["query"]}]) for i, q in enumerate(questions)],
        groups_per_batch=16,
        max_in_flight=in_flight,
        max_staleness=None,
        max_turns=TURNS,
        max_new_tokens=SIZE,
        tokenizer_options={"tokenization_sanity_check_mode": "disable"},
    )

    tokens = 0
    start, own = time.perf_counter(), time.process_time()
    async for batch in collector:
        for row in batch.tensordicts:
            mask = row["masks", "all_assistant_mask"]
            assert row["log_probs", "full"].isnan().equal(~mask)
            tokens += int(mask.sum())
    seconds, cpu = time.perf_counter() - start, time.process_time() - own
    await collector.aclose()
    assert tokens == ANSWERS * SIZE
    return Run(seconds, cpu, alone, alone_cpu)


async def engine_alone(engine: Any, in_flight: int) -> tuple[float, float]:
    """Sample as many answers, at most `in_flight` at once, to prompts that grow as well.

    Args:
        engine: The engine.
        in_flight: Number of requests at once.

    Returns:
        Seconds, and seconds of processor time.
    """
    numbers = iter(range(COUNT))
    prompts = {number: [7 + number % 50] * 60 for number in range(COUNT)}

    async def one_after_another() -> None:
        for number in numbers:
            prompt = prompts[number]
            for _ in range(len(naps_of(number)) + 1):
                found = await engine.sample(prompt, max_tokens=SIZE, key=f"alone{number}")
                prompt = [*prompt, *found.ids, *[9] * 12]

    start, own = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
    return time.perf_counter() - start, time.process_time() - own


def test_unequal_trajectories(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    """Print the figures of lock-step, and of the collector with slow tools and with fast ones."""
    benchmark.group = f"vLLM: {COUNT} trajectories of 1 to {TURNS} turns"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # no compiler runs while time is measured
    from vllm import LLM

    tokenizer = load_tiny()[1]
    beside: dict[int, float] = {}
    llm = LLM(str(TINY), **ARGS)
    try:
        llm.generate([{"prompt_token_ids": [5] * 50}] * 4, use_tqdm=False)
        for rows in (ROWS, COUNT):
            beside[rows], cpu = lock_step(llm, tokenizer, rows)
            rate = ANSWERS * SIZE / beside[rows]
            print(
                f"\nlock-step, {rows} rows: {rate:,.0f} tokens/s in {beside[rows]:.1f} s, {cpu:.1f} s of CPU"
            )
    finally:
        llm.llm_engine.engine_core.shutdown()

    async def run() -> None:
        sampling = exact(tokenizer)
        engine = VLLMEngine.from_model(TINY, tokenizer=tokenizer, engine_args=ARGS, sampling=sampling)
        try:
            await engine_alone(engine, 64)
            for in_flight in (ROWS, COUNT):
                found = await collect(engine, tokenizer, in_flight=in_flight, waits=True)
                gain = beside[in_flight] / found.seconds
                print(f"collector, {in_flight} at once: {found}; {gain:.1f} × lock-step")
            rounds = [await collect(engine, tokenizer, in_flight=COUNT, waits=False) for _ in range(3)]
            print("collector, tools take no time:", *rounds, sep="\n  ")
            print(f"  median {statistics.median(found.share for found in rounds):.0%} of the engine alone")
        finally:
            await engine.close()

    benchmark.pedantic(lambda: asyncio.run(run()), rounds=1)
