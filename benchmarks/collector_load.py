"""A made-up workload of agents: lengths of answers, times of tools, and both ways to run it on one engine.

`Load` decides, by the number of a trajectory, how many turns it has, how long its answers are, and how long
its tools take. `collect` runs it on `AgentCollector`, and `LockStep` is the policy of an environment that
runs it; both over the engine that `SimulatedEngine` describes, in time of which only computing is real.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torchrl.envs import Compose

from torchrl_agentic import EndTrajectory, ToolCompose, TurnTokenizer, tool
from torchrl_agentic.collectors import AgentCollector, Task
from torchrl_agentic.rollout.answer_rows import Answer, answered
from torchrl_agentic.rollout.bounded_sampler import BoundedSampler
from torchrl_agentic.rollout.policies import FullSequence, TokensToHistory
from torchrl_agentic.testing import SimulatedEngine, load_tiny
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.token_rows import TokenRow

TOKENIZER = load_tiny()[1]
EOS: int = TOKENIZER.eos_token_id
STEP_S, PER_SEQUENCE_S, CONCURRENT = 0.008, 4e-5, 256  # defaults of SimulatedEngine
TO_P99 = 2.326  # standard deviations from the median to the 99th percentile


def encoded(text: str) -> list[int]:
    """Return the ids of a text."""
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


FILL = encoded("so ")[:1]


@dataclass(frozen=True)
class Plan:
    """One trajectory.

    Attributes:
        sizes: Tokens of each answer, the stop token included.
        naps: Seconds of the tool after each answer but the last.
    """

    sizes: tuple[int, ...]
    naps: tuple[float, ...]


@dataclass(frozen=True)
class Load:
    """A distribution of trajectories.

    Attributes:
        median_s: Median time of a tool, in seconds.
        tail: 99th percentile of this time, as a multiple of the median.
        longest_s: Bound on this time, in seconds.
        least_turns: Least number of answers in a trajectory.
        most_turns: Largest number of answers in a trajectory.
        size: Median number of tokens of an answer.
        spread: Standard deviation of the logarithm of this number.
    """

    median_s: float = 0.3
    tail: float = 30.0
    longest_s: float = 29.0
    least_turns: int = 1
    most_turns: int = 16
    size: float = 80.0
    spread: float = 0.7

    def plan(self, number: int) -> Plan:
        """Return a trajectory; the same for each number."""
        rng = random.Random(number)
        turns = rng.randint(self.least_turns, self.most_turns)
        sizes = (round(self.size * math.exp(rng.gauss(0, self.spread))) for _ in range(turns))
        sigma = math.log(self.tail) / TO_P99
        naps = (self.median_s * math.exp(rng.gauss(0, sigma)) for _ in range(turns - 1))
        return Plan(
            tuple(min(1024, max(32, size)) for size in sizes), tuple(min(self.longest_s, nap) for nap in naps)
        )

    def answer(self, number: int, turn: int) -> list[int]:
        """Return the ids of an answer: text, a call unless it is the last one, and the stop token."""
        plan = self.plan(number)
        call: list[int] = []
        if turn < len(plan.naps):
            milliseconds = round(1000 * plan.naps[turn])
            arguments = f'{{"name": "work", "arguments": {{"ms": {milliseconds}}}}}'
            call = encoded(f"<tool_call>\n{arguments}\n</tool_call>")
        return FILL * (plan.sizes[turn] - len(call) - 1) + call + [EOS]


HEAVY = Load()
"""Tools of 0.3 s, with a 99th percentile of 9 s."""


@tool
async def work(ms: int) -> str:
    """Wait for a service.

    Args:
        ms: Milliseconds.
    """
    if ms:
        await asyncio.sleep(ms / 1000)
    return f"waited for {ms} ms"


def number_of(name: str) -> int:
    """Return the number of a trajectory of a collector by its name."""
    return int(name.partition("/")[0])


class Answers:
    """The answers of a load, as `SimulatedEngine` takes them.

    Args:
        load: The load.
        prepared: Number of trajectories whose answers are encoded now, so that no run pays for it.
    """

    def __init__(self, load: Load, prepared: int) -> None:
        self._load = load
        # In arrays, which the garbage collector need not visit.
        self._known = [
            tuple(array("q", load.answer(number, turn)) for turn in range(len(load.plan(number).sizes)))
            for number in range(prepared)
        ]

    def __call__(self, key: str, turn: int, prompt: object) -> list[int]:
        """Return the ids of an answer."""
        number = number_of(key)
        is_known = number < len(self._known)
        return self._known[number][turn].tolist() if is_known else self._load.answer(number, turn)


def tasks(first: int = 0, stop: int | None = None) -> Iterator[Task]:
    """Yield a task for each number."""
    for number in itertools.count(first) if stop is None else range(first, stop):
        yield Task(str(number), [{"role": "user", "content": f"q{number}"}])


@dataclass
class Measured:
    """Figures of a run.

    Attributes:
        seconds: Time that it took, waiting included.
        cpu_s: Processor time of the process.
        tokens: Sampled tokens.
        answers: Sampled answers.
        ended: Trajectories that ended.
    """

    seconds: float
    cpu_s: float
    tokens: int
    answers: int
    ended: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def ms_per_answer(self) -> float:
        """Processor time of an answer, in milliseconds."""
        return 1e3 * self.cpu_s / self.answers

    def __str__(self) -> str:
        return (
            f"{self.rate:,.0f} tokens/s, {self.ended} trajectories in {self.seconds:,.1f} s; "
            f"{self.ms_per_answer:.2f} ms of processor time per answer"
        )


def compose_of() -> ToolCompose:
    """Return the tools of both ways."""
    return ToolCompose([work], "hermes", per_call_timeout=None)


async def collect(
    load: Load,
    engine: SimulatedEngine,
    ended: int | None = None,
    *,
    warm_up: int = 0,
    on_batch: Callable[[Any], None] | None = None,
    beside: Callable[[AgentCollector], Coroutine[Any, Any, None]] | None = None,
    **options: Any,
) -> Measured:
    """Run a load on an `AgentCollector` on the running loop, by default one trajectory per group.

    Args:
        load: The load.
        engine: The engine.
        ended: Number of trajectories after which it ends; None: all tasks.
        warm_up: Number of trajectories at the beginning that do not count.
        on_batch: Called with each batch.
        beside: Called with the collector; runs beside it, until it ends.
        options: Further arguments of `AgentCollector`.
    """
    given = {"tasks": tasks(), "groups_per_batch": 16, "max_staleness": None, "max_turns": load.most_turns}
    collector = AgentCollector(
        Compose(compose_of(), EndTrajectory(max_turns=load.most_turns, when_no_calls=True)),
        engine=engine,
        tokenizer=TOKENIZER,
        **{**given, **options},
    )
    loop = asyncio.get_running_loop()
    other = None if beside is None else asyncio.create_task(beside(collector))
    start, cpu, before = loop.time(), time.process_time(), engine.load()
    count = skipped = 0
    async for batch in collector:
        if on_batch is not None:
            on_batch(batch)
        if skipped < warm_up:
            skipped += len(batch)
            start, cpu, before = loop.time(), time.process_time(), engine.load()
            continue
        count += len(batch)
        if ended is not None and count >= ended:
            break
    after = engine.load()
    found = Measured(
        loop.time() - start,
        time.process_time() - cpu,
        after.tokens - before.tokens,
        after.finished - before.finished,
        count,
    )
    if other is not None:
        other.cancel()
        await asyncio.wait([other])
    await collector.aclose()
    return found


async def engine_alone(load: Load, engine: SimulatedEngine, in_flight: int, ended: int) -> Measured:
    """Send the requests of a load to the engine without a collector: what the simulation itself costs.

    Args:
        load: The load.
        engine: The engine.
        in_flight: Number of trajectories at once.
        ended: Number of trajectories after which it ends.
    """
    loop = asyncio.get_running_loop()
    numbers = itertools.count()
    count = 0
    is_over = asyncio.Event()

    async def one_after_another() -> None:
        nonlocal count
        for number in numbers:
            prompt = FILL * 200
            plan = load.plan(number)
            for turn in range(len(plan.sizes)):
                found = await engine.sample(prompt, max_tokens=1024, key=f"{number}/{number}.0@alone")
                prompt = [*prompt, *found.ids]
                if turn < len(plan.naps):
                    await asyncio.sleep(plan.naps[turn])
            count += 1
            if count >= ended:
                is_over.set()

    start, cpu = loop.time(), time.process_time()
    running = [asyncio.create_task(one_after_another()) for _ in range(in_flight)]
    await is_over.wait()
    seconds, cpu = loop.time() - start, time.process_time() - cpu
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    done = engine.load()
    return Measured(seconds, cpu, done.tokens, done.finished, count)


def seconds_of(sizes: list[int]) -> float:
    """Return the seconds that the simulated engine takes for answers that are asked for at once."""
    waiting = list(sizes)
    due: list[float] = []
    progress = seconds = 0.0
    while waiting or due:
        while waiting and len(due) < CONCURRENT:
            heapq.heappush(due, progress + waiting.pop())
        end = heapq.heappop(due)
        seconds += (end - progress) * (STEP_S + PER_SEQUENCE_S * (len(due) + 1))
        progress = end
    return seconds


class LockStep(BoundedSampler):
    """A policy that samples the answers of a load, all rows at once, and counts the time of a turn.

    Its clock is processor time, plus what the engine takes for the rows together, plus the longest tool of
    each turn, since an environment waits for it.

    Args:
        load: The load.
    """

    def __init__(self, load: Load) -> None:
        super().__init__(max_new_tokens=1 << 20, length=None, log_probs=True)
        self.load = load
        self.waited_s = self.own_s = 0.0
        self.tokens = self.answers = 0
        self._places: list[tuple[int, int]] = []

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Find the place of each row in the load, and sample."""
        conversations = [prompt.messages for prompt in border.prompts(tensordict)]
        self._places = [(int(each[0]["content"][1:]), (len(each) - 1) // 2) for each in conversations]
        return super().forward(tensordict)

    def sample(self, prompts: Sequence[TokenRow], *more: object) -> list[Answer]:
        """Return an answer per row."""
        start = time.process_time()
        found = [self.load.answer(*place) for place in self._places]
        plans = [self.load.plan(number).naps for number, _ in self._places]
        naps = [naps[turn] for naps, (_, turn) in zip(plans, self._places, strict=True) if turn < len(naps)]
        self.waited_s += seconds_of([len(ids) for ids in found]) + max(naps, default=0.0)
        self.tokens += sum(map(len, found))
        self.answers += len(found)
        self.own_s += time.process_time() - start
        return [answered(row, list(ids), [-1.0] * len(ids)) for row, ids in zip(prompts, found, strict=True)]

    def policy(self) -> TensorDictSequential:
        """Return the whole policy."""
        return TensorDictSequential([self, TokensToHistory(TOKENIZER), FullSequence()])

    def transforms(self) -> list[Any]:
        """Return the transforms of the environment; the tool does not wait, since this clock counts it."""
        compose = ToolCompose([work_at_once], "hermes", per_call_timeout=None)
        return [
            compose,
            EndTrajectory(max_turns=self.load.most_turns, when_no_calls=True),
            TurnTokenizer(TOKENIZER, tools=compose.tools, tokenization_sanity_check_mode="disable"),
        ]


@tool(name="work")
async def work_at_once(ms: int) -> str:
    """Wait for a service.

    Args:
        ms: Milliseconds.
    """
    return f"waited for {ms} ms"
