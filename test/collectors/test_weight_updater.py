"""A weight updater of TorchRL loads weights while the collector samples nothing."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from helpers.limit import limit

from torchrl_agentic import ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector, Task
from torchrl_agentic.collectors.requests import Requests
from torchrl_agentic.engines import Sampled, ScriptedEngine
from torchrl_agentic.errors import InfrastructureError
from torchrl_agentic.testing import load_tiny
from torchrl_agentic.tokens.ledger import TokenLedger

TOKENIZER = load_tiny()[1]


@tool
def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word


class Counting(ScriptedEngine):
    """Knows how many requests it works on, and with which weights."""

    running, weights = 0, 0

    async def sample(self, ids: Sequence[int], **options: Any) -> Sampled:
        self.running += 1
        try:
            return await super().sample(ids, **options)
        finally:
            self.running -= 1


class Updater:
    """Loads weights in its own way."""

    def __init__(self, engine: Counting) -> None:
        self.engine = engine
        self.running: list[int] = []

    def push_weights(self, weights: int) -> None:
        self.running.append(self.engine.running)
        self.engine.weights = weights


@pytest.mark.parametrize("on_update", ["resume", "finish"])
def test_a_weight_updater_loads_weights_while_nothing_is_sampled(on_update: Any):
    engine = Counting([["an answer of some length"] * 4], TOKENIZER, token_s=0.001, piece_tokens=1)
    updater = Updater(engine)
    tasks = [Task(f"task-{n}", [{"role": "user", "content": "Hello"}]) for n in range(6)]
    collector = AgentCollector(
        ToolCompose([look_up]),
        engine=engine,
        tokenizer=TOKENIZER,
        tasks=tasks,
        group_size=2,
        max_staleness=2,
        on_update=on_update,
        weight_updater=updater,
    )
    loaded: list[int] = []
    with collector:
        for number, _ in enumerate(collector, 1):
            collector.update_policy_weights_(weights=number)
            loaded.append(engine.weights)
    assert loaded == [1, 2, 3, 4, 5, 6]
    assert updater.running == [0] * 6
    assert engine.version == 6


async def test_an_updater_that_fails_stops_requests_until_an_update_succeeds():
    class Failing(Updater):
        def push_weights(self, weights: int) -> None:
            if weights < 0:
                raise RuntimeError("the link broke")
            super().push_weights(weights)

    engine = Counting([["an answer"] * 4], TOKENIZER)
    updater = Failing(engine)
    requests = Requests(engine, is_pushed=True, retries=0)
    ledger = TokenLedger()
    ledger.add_prompt([5])
    with pytest.raises(RuntimeError, match="the link broke"):
        await requests.update(-1, lambda: updater.push_weights(-1))
    with pytest.raises(InfrastructureError, match="the engine may have part of them: the link broke"):
        await requests.sample(ledger, max_tokens=4, key="a")
    await requests.update(1, lambda: updater.push_weights(1))
    assert (await requests.sample(ledger, max_tokens=4, key="a"))[0]


async def test_a_push_runs_to_its_end_although_its_caller_is_cancelled():
    engine = Counting([["an answer"] * 4], TOKENIZER)
    requests = Requests(engine, is_pushed=True)
    ledger = TokenLedger()
    ledger.add_prompt([5])
    begun, goes_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def push() -> None:
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait(limit(20))
        assert not engine.running

    updating = asyncio.create_task(requests.update(1, push))
    await begun.wait()
    updating.cancel()
    await asyncio.wait({updating})
    sampling = asyncio.create_task(requests.sample(ledger, max_tokens=4, key="a"))
    await asyncio.sleep(0)
    assert not engine.running
    goes_on.set()
    assert (await sampling)[0]
    assert engine.version == 1
