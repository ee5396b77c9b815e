"""Read prompts from the rows of a batch, and write answers, in the form of TorchRL's wrappers."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_agentic.tensors import column_tensor
from torchrl_agentic.transforms.token_rows import TokenRow, read_rows, write_rows
from torchrl_agentic.transforms.turn_tokenizer import TOKENS

Answer: TypeAlias = Mapping[str, TokenRow]
"""Entries that a policy writes into a row, by key: "tokens", "masks" and "log_probs"."""
KINDS: Mapping[str, Any] = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs}
"""TorchRL's class of each entry of an answer."""
_NOT_PADDED = NonTensorData(False)


def prompt_rows(td: TensorDictBase) -> list[TokenRow]:
    """Return the prompts of the rows of a flattened batch.

    Args:
        td: The batch, [*B].

    Raises:
        KeyError: If it has no ("tokens", "prompt").
    """
    rows = read_rows(td, "tokens")
    if rows is None:
        raise KeyError(f"the batch has no {TOKENS}: add a TurnTokenizer to the environment")
    return rows


def write_prompts(td: TensorDictBase, rows: Sequence[TokenRow]) -> None:
    """Write prompts into the rows of a flattened batch.

    Args:
        td: The batch, [*B].
        rows: One per row, with the ids of its prompt, [P].
    """
    write_rows(td, "tokens", rows)
    masks = [torch.ones_like(row.tensors["prompt"], dtype=torch.bool) for row in rows]
    write_rows(td, "masks", [TokenRow({"all_attention_mask": mask}) for mask in masks])


def answered(prompt: TokenRow, ids: list[int], log_probs: Sequence[float] | None) -> Answer:
    """Return an answer in the form of TorchRL's wrappers.

    Args:
        prompt: Row with the ids of the prompt, int64, [P].
        ids: Ids of the answer, [R].
        log_probs: Log-probability of each id of the answer, in nats, or None if they are unknown.
    """
    before = prompt.tensors["prompt"]
    response = column_tensor("q", ids, before.device)
    full = torch.cat([before, response])
    tokens = {"prompt": before, "response": response, "full": full, "padded": _NOT_PADDED}
    answer = {
        "tokens": TokenRow(tokens, {"prompt": prompt.ids("prompt"), "response": ids}),
        "masks": TokenRow({"all_attention_mask": torch.ones_like(full, dtype=torch.bool)}),
    }
    if log_probs is not None:
        known = column_tensor("f", log_probs, before.device)
        answer["log_probs"] = TokenRow({"response": known})
    return answer


def write_answers(td: TensorDictBase, answers: Sequence[Answer]) -> TensorDictBase:
    """Write answers into the rows of a flattened batch.

    Args:
        td: The batch, [*B].
        answers: One per row.
    """
    for key, kind in KINDS.items():
        if answers and key in answers[0]:
            write_rows(td, key, [answer[key] for answer in answers], kind)
    return td
