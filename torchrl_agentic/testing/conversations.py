"""Run whole conversations of a local model with tools: for tests, and for `examples/train_tiny.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl.envs import Compose

from torchrl_agentic.dispatch.event_loop import run
from torchrl_agentic.engines import Engine, OnIds, Sampled, TransformersEngine
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
    seed: int | None = None,
) -> list[list[Message]]:
    """Run a model with tools on questions, all at once, and return the conversations.

    A conversation ends with a message without tool calls.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        tools: Tools that it may call.
        queries: The questions.
        system: The system message.
        temperature: Sampling temperature; 0.0 takes the most likely token.
        max_turns: Upper bound on the model's messages per conversation.
        max_new_tokens: Upper bound on the tokens of a message.
        first: First message of the model for each question, in place of its own; None for its own.
        seed: Seed of sampling; None: not reproducible.
    """
    ending = EndTrajectory(when_no_calls=True, max_turns=max_turns)
    compose = ToolCompose(tools)
    transforms: list[Any] = [compose, ending]
    engine = _FirstAnswers(
        TransformersEngine(model, tokenizer, temperature=temperature, seed=seed), tokenizer, first or ()
    )
    try:
        found = rollout(
            Compose(*transforms),
            engine,
            tokenizer,
            tasks_of(queries, system),
            max_turns=max_turns,
            max_new_tokens=max_new_tokens,
            tokenizer_options={"tokenization_sanity_check_mode": "disable"},
        )
        return [list(one.messages) for one in found]
    finally:
        compose.close()
        run(engine.close())


class _FirstAnswers(Engine):
    """An engine whose first answers are given, as far as they are.

    Args:
        engine: Samples the others.
        tokenizer: Encodes the given ones.
        first: First answer to each task, or None for the engine's own.
    """

    def __init__(self, engine: TransformersEngine, tokenizer: Any, first: Sequence[str | None]) -> None:
        self.version, self.max_concurrent = 0, engine.max_concurrent
        self.context_length = engine.context_length
        self._engine, self._tokenizer = engine, tokenizer
        self._first = {str(place): text for place, text in enumerate(first) if text is not None}

    async def sample(
        self, ids: Sequence[int], *, max_tokens: int, key: str, on_ids: OnIds | None = None
    ) -> Sampled:
        """Return the given answer, or sample one."""
        text = self._first.pop(key.partition("/")[0], None)
        if text is None:
            return await self._engine.sample(ids, max_tokens=max_tokens, key=key, on_ids=on_ids)
        found = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return Sampled([*found, self._tokenizer.eos_token_id])

    async def update(self, weights: Any) -> int:
        """Update the engine."""
        self.version = await self._engine.update(weights)
        return self.version

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
