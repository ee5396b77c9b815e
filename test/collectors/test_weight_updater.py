"""A weight updater of TorchRL loads weights while the collector samples nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from torchrl_agentic import ToolCompose, tool
from torchrl_agentic.collectors import AgentCollector, Task
from torchrl_agentic.engines import Sampled, ScriptedEngine
from torchrl_agentic.testing import load_tiny

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
