"""Does the next prompt cost what is new in it, or what is old?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.families import FAMILIES
from tensordict import TensorDict

from torchrl_agentic.tokens.ledger import TokenLedger
from torchrl_agentic.transforms import TurnTokenizer

WORDS = "The tool said 42, so the answer is 42. "
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def _spec() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": "f", "description": WORDS, "parameters": parameters}}


def _conversation(turns: TurnTokenizer, messages: int) -> tuple[list[dict[str, Any]], TensorDict]:
    """Make a conversation that is `messages` long before the next answer, and its row."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": WORDS}]
    for index in range((messages - 1) // 2):
        chat.append({"role": "assistant", "content": WORDS * 2 + CALL})
        chat.append({"role": "tool", "content": WORDS * 2, "tool_call_id": f"call_{index}_0"})
    ledger = TokenLedger()
    ledger.add_prompt(turns._prompt_ids(chat, turns.template))
    row = TensorDict({})
    turns._write(row, None, ledger)
    return chat, row


@pytest.mark.parametrize("messages", [4, 10, 20, 40, 80])
@pytest.mark.parametrize("which", ["TurnTokenizer", "all tokenized again"])
def test_turn(benchmark: Any, which: str, messages: int) -> None:
    benchmark.group = f"tokens: the next prompt, {messages} messages before"
    tokenizer = FAMILIES["qwen2_5"].tokenizer()
    turns = TurnTokenizer(tokenizer, tools=[_spec()], tokenization_sanity_check_mode="disable")
    chat, root = _conversation(turns, messages)
    answer = turns.encoder._backend.encode(WORDS * 2 + CALL, add_special_tokens=False).ids
    sampled = torch.tensor([*answer, tokenizer.eos_token_id])
    root["tokens", "full"] = torch.cat([root["tokens", "prompt"], sampled])
    chat = [*chat, {"role": "assistant", "content": WORDS * 2 + CALL}]
    chat.append({"role": "tool", "content": WORDS * 2, "tool_call_id": "call_99_0"})
    if which == "TurnTokenizer":
        benchmark(lambda: turns._continue(root, TensorDict({}), chat[:-1], chat[-1:], False))
    else:
        benchmark(
            lambda: torch.tensor(
                tokenizer.apply_chat_template(
                    chat, tools=[_spec()], add_generation_prompt=True, return_dict=False
                )
            )
        )
