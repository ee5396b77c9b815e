"""Hours of failures on the skip clock: seeded, in the same order on every run."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from soak.accounts import Accounts, Census, CountedEngine, CountedTool
from soak.readings import Reading, take_last
from soak.watch import Feed, Watch
from torchrl_agentic import RateLimiter, ToolCompose, ToolError, tool
from torchrl_agentic.collectors import AgentCollector, Task
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import SimulatedEngine, load_tiny, run_skipping

TOKENIZER = load_tiny()[1]
TRAJECTORY_TIMEOUT_S = 300.0


@functools.lru_cache(4_096)
def encoded(text: str) -> tuple[int, ...]:
    """Return the ids of an answer, with the stop token."""
    return (*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id)


@dataclass(frozen=True, slots=True)
class Plan:
    """Length and size of a soak test.

    Attributes:
        seconds: Simulated seconds after which the tasks end.
        period_s: Simulated seconds between two readings.
        groups_per_batch: Number of groups in a batch.
        training_s: Least and largest number of seconds between a batch and the update behind it.
    """

    seconds: float
    period_s: float
    groups_per_batch: int = 16
    training_s: tuple[float, float] = (20.0, 120.0)


class World:
    """Engine, tools and rewards that fail at random, by the names of trajectories and calls.

    Args:
        plan: Length and size of the test.
        seed: Seed of everything random.
        accounts: The books.
    """

    def __init__(self, plan: Plan, seed: int, accounts: Accounts) -> None:
        self.plan, self.seed, self.accounts = plan, seed, accounts
        self.simulated = SimulatedEngine(self._answer, max_concurrent=32, update_s=2.0)
        self.engine = CountedEngine(self.simulated, accounts, TOKENIZER.eos_token_id)
        self.limiter = RateLimiter(max_concurrent=24)
        self.rng = random.Random(seed)

    def _rng(self, *what: object) -> random.Random:
        return random.Random(repr((self.seed, *what)))

    def _answer(self, key: str, turn: int, prompt: Sequence[int]) -> Sequence[int]:
        rng = self._rng("turns", key)
        if turn >= rng.choice([0, 1, 2, 3, 5, 8]):
            return encoded(f"The answer is {turn}.")
        rng = self._rng("answer", key, turn)
        text = "so " * rng.randrange(40)
        for number in range(rng.choice([1, 1, 1, 2, 4])):
            arguments: dict[str, Any] = {"key": f"{key}#{turn}.{number}"}
            name = rng.choice(["look"] * 16 + ["add"] * 2 + ["unknown"])
            if name == "add":
                arguments = {"a": turn, "b": rng.choice([number, "nothing"])}
            call = json.dumps({"name": name, "arguments": arguments})
            text += f"<tool_call>\n{call if rng.random() < 0.97 else call[:-3]}\n</tool_call>\n"
        return encoded(text)

    async def act(self, key: str) -> None:
        """Be quick or slow, fail, crash or hang: a call of the tool."""
        rng = self._rng("call", key)
        await asyncio.sleep(rng.lognormvariate(0.0, 1.5))
        fate = rng.random()
        if fate < 0.02:
            raise ToolError("no such thing")
        if fate < 0.03:
            raise ValueError("a crash")
        if fate < 0.04:
            raise InfrastructureError("the service is down")
        if fate < 0.055:
            await asyncio.Event().wait()

    async def reward(self, trajectory: Any) -> float:
        """Take a while and return a number; sometimes raise, return nonsense or hang."""
        rng = self._rng("reward", trajectory.name)
        await asyncio.sleep(rng.expovariate(1.0))
        fate = rng.random()
        if fate < 0.01:
            raise ValueError("the judge is down")
        if fate < 0.013:
            return float("nan")
        if fate < 0.015:
            await asyncio.Event().wait()
        self.accounts.reward(trajectory)
        return rng.random()

    def task_of(self, number: int) -> Any:
        """Return a task; a few rows are none."""
        if self._rng("row", number).random() < 0.01:
            return {"nothing": number}
        return Task(str(number), [{"role": "user", "content": f"q{number}"}], answer=str(number))

    async def lose_engine(self) -> None:
        """Lose all requests of the engine every few minutes, until cancelled."""
        while True:
            await asyncio.sleep(self.rng.uniform(60, 600))
            self.simulated.lose_requests()

    def collector(self, feed: Feed, name: str) -> AgentCollector:
        """Return a collector of this world.

        Args:
            feed: Its tasks.
            name: Last part of the names of its trajectories.
        """

        @tool
        def add(a: int, b: int) -> str:
            """Add two numbers."""
            return str(a + b)

        look = CountedTool(self.accounts, self.act)
        compose = ToolCompose(
            [look, add, Census(self.accounts)],
            "hermes",
            per_call_timeout=20.0,
            rate_limits={"look": self.limiter},
            recorder=self.accounts.turn,
            tokenizer=TOKENIZER,
        )
        return AgentCollector(
            compose,
            engine=self.engine,
            tokenizer=TOKENIZER,
            tasks=feed,
            group_size=3,
            groups_per_batch=self.plan.groups_per_batch,
            max_in_flight="auto",
            max_turns=8,
            max_new_tokens=400,
            reward=self.reward,
            trajectory_timeout=TRAJECTORY_TIMEOUT_S,
            max_replacements=1,
            engine_retries=0,
            speculate=True,
            name=name,
            failure_hook=self.accounts.failed,
            max_failures=None,
        )

    def gauges(self) -> dict[str, int]:
        """Return what must be 0 while the collector is idle."""
        limiter = self.limiter.stats()
        return {"limiter slots": limiter.in_flight, "waiting calls": limiter.waiting}


async def run(plan: Plan, folder: Path, name: str, *, seed: int = 0) -> tuple[Watch, Reading]:
    """Run one collector from its begin to its end.

    Args:
        plan: Length and size of the test.
        folder: Where the program creates its temporary folders.
        name: Last part of the names of its trajectories.
        seed: Seed of everything random.

    Returns:
        The readings, and another one after the collector was closed.
    """
    accounts = Accounts()
    world = World(plan, seed, accounts)
    feed = Feed(accounts, world.task_of)
    collector = world.collector(feed, name)
    watch = Watch(
        f"{plan.seconds / 3600:g} simulated hours",
        accounts,
        feed,
        folder,
        groups_per_batch=plan.groups_per_batch,
        idle_limit_s=20 * TRAJECTORY_TIMEOUT_S,
        gauges=world.gauges,
    )
    losing = asyncio.create_task(world.lose_engine())
    watching = asyncio.create_task(watch.run(collector, seconds=plan.seconds, period_s=plan.period_s))
    async with collector:
        async for batch in collector:
            accounts.batch(batch)
            await asyncio.sleep(world.rng.uniform(*plan.training_s))
            await collector.update_weights()
        watch.check(collector)
    losing.cancel()
    await asyncio.wait((losing, watching))
    watching.result()
    await world.engine.close()
    del collector, world, feed, batch, watching
    return watch, await take_last(plan.seconds, folder)


def soak(folder: Path, plan: Plan, *, seed: int = 0) -> list[str]:
    """Run a plan, after a short run that fills what is kept on purpose.

    Args:
        folder: Where the program creates its temporary folders.
        plan: Length and size of the test.
        seed: Seed of everything random.

    Returns:
        A line for each thing that is wrong.
    """

    async def both() -> list[str]:
        said: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context)))
        first = min(600.0, plan.seconds / 4)
        _, before = await run(replace(plan, seconds=first, period_s=first), folder, "first", seed=seed + 1)
        watch, after = await run(plan, folder, "soak", seed=seed)
        return [*watch.verdict(before, after), *said]

    return run_skipping(both())
