"""Run whole conversations of a local model with tools: for tests, and for `examples/train_tiny.py`."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm import ChatEnv

from torchrl_agentic.messages import Message
from torchrl_agentic.rollout import agent_policy, chats_of, rollout
from torchrl_agentic.rollout.scripted import add_answers
from torchrl_agentic.testing.problems import SYSTEM
from torchrl_agentic.transforms import EndTrajectory, ToolCompose
from torchrl_agentic.transforms import history as border


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
    env = TransformedEnv(ChatEnv(batch_size=(len(queries),)), Compose(compose, ending))  # pyright: ignore[reportCallIssue]
    policy = agent_policy(
        model,
        tokenizer,
        compose.tools,
        mode="history",
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        return_log_probs=False,
    )
    prompted = list(first or ())

    def say(td: TensorDictBase) -> TensorDictBase:
        rows = border.leaves(policy(td))[1]
        for index, text in enumerate(prompted):
            if text is not None:
                (rows[index],) = border.leaves(
                    add_answers(lazy_stack([rows[index]]), [Message("assistant", text)])
                )[1]
        prompted.clear()
        return lazy_stack(rows)

    try:
        found = rollout(env, say, chats_of(queries, system), max_turns=max_turns)
        return [list(one.messages) for one in found]
    finally:
        env.close()
