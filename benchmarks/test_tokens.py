"""The cost of the next prompt: proportional to the new tokens, not to all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.model_families import FAMILIES

from torchrl_agentic.tokens.writer import ChatEncoder, TokenWriter

WORDS = "The tool said 42, so the answer is 42. "
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ANSWER = {"role": "assistant", "content": WORDS * 2 + CALL}


def _spec() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": "f", "description": WORDS, "parameters": parameters}}


def _conversation(messages: int) -> list[dict[str, Any]]:
    """Return a conversation that is `messages` long before the next answer."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": WORDS}]
    for index in range((messages - 1) // 2):
        chat.append(ANSWER)
        chat.append({"role": "tool", "content": WORDS * 2, "tool_call_id": f"call_{index}_0"})
    return chat


@pytest.mark.parametrize("messages", [4, 10, 20, 40, 80])
@pytest.mark.parametrize("which", ["TokenWriter", "all tokenized again"])
def test_turn(benchmark: Any, which: str, messages: int) -> None:
    benchmark.group = f"tokens: the next prompt, {messages} messages before"
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    encoder = ChatEncoder(tokenizer, tools=[_spec()], tokenization_sanity_check_mode="disable")
    first = encoder.begin(_conversation(messages))
    sampled = [*tokenizer(ANSWER["content"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    result = {"role": "tool", "content": WORDS * 2, "tool_call_id": "call_99_0"}
    chat = [*first.messages, ANSWER, result]

    def turn() -> torch.Tensor:
        """Write the tokens of one turn, as `TurnTokenizer` does; a TensorDict keeps those before it."""
        writer = TokenWriter(encoder, preceding=first.size, next_call=99)
        writer.add_sampled(sampled)
        writer.add_messages(ANSWER, [result])
        return torch.tensor(writer.ids)

    if which == "TokenWriter":
        benchmark(turn)
    else:
        benchmark(
            lambda: torch.tensor(
                tokenizer.apply_chat_template(
                    chat, tools=[_spec()], add_generation_prompt=True, return_dict=False
                )
            )
        )
