"""The cost of a turn of a whole environment, and of what a collector does with it, as conversations grow.

The file runs against any commit whose `agent_policy` takes an `Engine`: copy it into an older checkout, and
`compare.py` measures both. Take processor time (`--benchmark-timer=time.process_time`), which other programs
change least.
"""

from __future__ import annotations

import gc
import pickle
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.chat_envs import dataset_env
from rig import noop
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic import EndTrajectory, ToolCompose, TurnTokenizer
from torchrl_agentic.engines import Engine, Sampled
from torchrl_agentic.rollout import agent_policy
from torchrl_agentic.testing import ScriptedPolicy
from torchrl_agentic.testing.tiny import load_tiny
from torchrl_agentic.transforms.history import as_history

with warnings.catch_warnings():  # TorchRL warns of classes of its own as they are defined
    warnings.filterwarnings("ignore", "Creating .*WeightUpdater", DeprecationWarning)
    from torchrl.collectors.llm import LLMCollector

torch.set_num_threads(1)  # processor time counts the threads of torch that wait
Benchmark = Callable[..., Any]
CALL = '<tool_call>\n{"name": "noop", "arguments": {"a": 1}}\n</tool_call>'


class Instant(Engine):
    """An engine that answers every prompt at once, with the same ids."""

    def __init__(self, ids: list[int]) -> None:
        self._answer = Sampled(ids, [-0.5] * len(ids))

    async def sample(self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: Any = None) -> Sampled:
        """Return the answer."""
        return self._answer

    async def update(self, weights: Any) -> int:
        """Ignore weights."""
        return self.version

    async def close(self) -> None:
        """Close nothing."""


class Talk:
    """An environment, a policy that calls a tool which does nothing in every turn, and the current batch."""

    def __init__(
        self, rows: int, messages: int = 1, *, tokens: bool, content: str = "", turns: int = 10_000
    ) -> None:
        compose = ToolCompose([noop], "hermes")
        transforms: list[Any] = [compose, EndTrajectory(max_turns=turns)]
        self.policy: Any = ScriptedPolicy([[CALL] * turns])
        if tokens:
            tokenizer = load_tiny()[1]
            ids = tokenizer(f"{CALL}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
            transforms.append(
                TurnTokenizer(tokenizer, tools=compose.tools, tokenization_sanity_check_mode="disable")
            )
            self.policy = agent_policy(Instant(ids), tokenizer)
        self.env = TransformedEnv(ChatEnv(batch_size=(rows,)), Compose(*transforms))
        chat = [
            {"role": ("user", "assistant")[index % 2], "content": content or f"message {index}"}
            for index in range(messages)
        ]
        query = TensorDict({}, batch_size=[rows]).set("query", as_history([chat] * rows))
        self.td: TensorDictBase = self.env.reset(query)

    def answer(self) -> None:
        """Let the policy answer."""
        self.td = self.policy(self.td)

    def step(self) -> None:
        """Take the step with the answer, to the root of the next turn."""
        self.td = self.env.step_mdp(self.env.step(self.td))

    def rollout(self, turns: int) -> TensorDictBase:
        """Return the steps of as many turns, [B, T]."""
        return self.env.rollout(
            turns, policy=self.policy, auto_reset=False, tensordict=self.td, break_when_any_done=False
        )


@pytest.mark.parametrize("messages", [9, 41, 99])
@pytest.mark.parametrize("which", ["ToolCompose", "ToolCompose, TurnTokenizer"])
def test_turn(benchmark: Benchmark, which: str, messages: int) -> None:
    """`env.step` and `step_mdp`; the conversation grows by two messages with each round."""
    benchmark.group = f"turn: 64 rows, {messages} messages"
    talk = Talk(64, messages - 6, tokens="TurnTokenizer" in which)
    benchmark.pedantic(talk.step, setup=talk.answer, rounds=5, warmup_rounds=1)
    talk.env.close()


@pytest.mark.parametrize("tokens", [1_000, 44_000])
def test_policy(benchmark: Benchmark, tokens: int) -> None:
    """All of a policy but the engine: reading the prompts, writing tokens, masks and messages."""
    benchmark.group = f"turn: policy, 64 rows, {tokens:,} tokens each"
    talk = Talk(64, tokens=True, content="tool " * tokens)
    assert len(talk.td[0]["tokens", "prompt"]) > tokens
    talk.answer()
    benchmark.pedantic(talk.answer, setup=talk.step, rounds=5)
    talk.env.close()


@pytest.mark.parametrize("tokens", [False, True])
def test_rollout(benchmark: Benchmark, tokens: bool) -> None:
    benchmark.group = "turn: env.rollout, 16 rows × 20 turns"
    talks: list[Talk] = []

    def fresh() -> None:
        talks.append(Talk(16, tokens=tokens))

    benchmark.pedantic(lambda: talks[-1].rollout(20), setup=fresh, rounds=3, warmup_rounds=1)
    for talk in talks:
        talk.env.close()


@pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing:FutureWarning")
def test_collector(benchmark: Benchmark) -> None:
    """A batch of `LLMCollector`: 64 rows of 40 turns, so 2,560 steps."""
    rows, turns = 64, 40
    benchmark.group = f"turn: LLMCollector, {rows} rows × {turns} turns"
    env = dataset_env(rows, ToolCompose([noop], "hermes"), EndTrajectory(max_turns=turns), queries=rows * 9)
    collector = LLMCollector(
        env,
        policy=ScriptedPolicy([[CALL] * turns]),
        dialog_turns_per_batch=rows * turns,
        total_dialog_turns=rows * turns * 8,
    )
    batches = iter(collector)
    benchmark.pedantic(lambda: next(batches), rounds=1)
    benchmark.extra_info["steps per second"] = rows * turns / benchmark.stats.stats.median
    collector.shutdown()


@pytest.mark.parametrize("tokens", [False, True])
def test_pickle(benchmark: Benchmark, tokens: bool) -> None:
    """A rollout of 64 rows and 40 turns: the time to pickle it, the size of its pickle, the memory it holds.

    `tracemalloc` does not see the tensors, so the memory is measured without tokens.
    """
    benchmark.group = "turn: pickle.dumps of a rollout, 64 rows × 40 turns"
    talk = Talk(64, tokens=tokens)
    if not tokens:
        gc.collect()
        tracemalloc.start()
    steps = talk.rollout(40)
    if not tokens:
        gc.collect()
        benchmark.extra_info["MB held"] = tracemalloc.get_traced_memory()[0] / 1e6
        tracemalloc.stop()
    written = benchmark.pedantic(lambda: pickle.dumps(steps), rounds=1)
    benchmark.extra_info["MB pickled"] = len(written) / 1e6
    print(f"tokens={tokens}:", {name: round(size, 1) for name, size in benchmark.extra_info.items()})
    talk.env.close()
