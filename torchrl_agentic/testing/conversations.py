"""Run whole conversations of a local model with tools: for tests, and for `examples/train_tiny.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrl.envs import Compose

from torchrl_agentic.dispatch import event_loop
from torchrl_agentic.engines.base import Engine, OnIds, Sampled
from torchrl_agentic.engines.duck_typed_engine import EngineWrapper
from torchrl_agentic.engines.transformers_engine import TransformersEngine
from torchrl_agentic.messages import Message
from torchrl_agentic.rollout import rollout, tasks_of
from torchrl_agentic.testing.problems import SYSTEM
from torchrl_agentic.transforms import EndTrajectory, ToolCompose


def converse(
    model: Any,
    tokenizer: Any,
    tools: Sequence[Any],
    queries: Sequence[str],
    *,
    system: str = SYSTEM,
    temperature: float = 0.0,
    max_turns: int = 5,
    max_new_tokens: int = 96,
    first: Sequence[str | None] | None = None,
) -> list[list[Message]]:
    """Run a model with tools on questions, all at once, and return the conversations.

    A conversation ends with a message without tool calls.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        tools: Tools that it may call.
        queries: The questions.
        system: The system message.
        temperature: Sampling temperature, with torch's global generator; 0.0 takes the most likely token.
        max_turns: Upper bound on the model's messages per conversation.
        max_new_tokens: Upper bound on the tokens of a message.
        first: First message of the model for each question, in place of its own; None for its own.
    """
    compose = ToolCompose(tools)
    ending = EndTrajectory(when_no_calls=True, max_turns=max_turns)
    seed = int(torch.randint(2**62, ()).item())
    sampler = TransformersEngine(model, tokenizer, temperature=temperature, seed=seed)
    engine = sampler if first is None else _Prompted(sampler, tokenizer, first)
    try:
        found = rollout(
            Compose(compose, ending),  # pyright: ignore[reportCallIssue]
            engine,
            tokenizer,
            tasks_of(queries, system),
            max_in_flight=max(1, len(queries)),
            max_turns=max_turns,
            max_new_tokens=max_new_tokens,
        )
        return [list(one.messages) for one in found]
    finally:
        event_loop.run(engine.close())


class _Prompted(EngineWrapper, Engine):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Answers the first request of some trajectories with a given text, and samples all others."""

    def __init__(self, engine: TransformersEngine, tokenizer: Any, first: Sequence[str | None]) -> None:
        super().__init__(engine)
        self._tokenizer = tokenizer
        self._first = {str(number): text for number, text in enumerate(first) if text is not None}

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Return the given message, or sample one."""
        text = self._first.pop(key.partition("/")[0], None)
        if text is None:
            return await self.target.sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)
        given = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Sampled(given[:max_tokens], finish="stop" if len(given) <= max_tokens else "length")
