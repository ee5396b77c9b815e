"""How much room a prompt leaves for an answer, and a sampler that keeps to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase

from torchrl_agentic.rollout.engine import write_answer
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.bounds import ROOM, TOKENS_LEFT
from torchrl_agentic.transforms.tokens import TOKENS


def context_length(model: Any) -> int | None:
    """Return how many tokens a model takes, prompt and answer together; None if it does not say.

    Args:
        model: A transformers model (`max_position_embeddings` of its configuration), a `vllm.LLM` or
            TorchRL's `AsyncVLLM` (`max_model_len`).
    """
    for owner, name in _places(model):
        found = getattr(owner, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def _places(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield the objects and attributes that may say it."""
    config = getattr(model, "config", None)
    if config is not None:
        text_config = getattr(config, "get_text_config", None)
        yield (text_config() if callable(text_config) else config), "max_position_embeddings"
    yield getattr(getattr(model, "llm_engine", None), "model_config", None), "max_model_len"
    yield getattr(model, "engine_args", None), "max_model_len"


class BoundedSampler(TensorDictModuleBase):
    """Sample answers that fit: a prompt that is too long gets an empty answer, and the model never sees it.

    Reads ("tokens", "prompt"), and ("agentic", "tokens_left") where `TurnTokenizer` has a bound. Writes what
    the sampler writes, and ("agentic", "room"), int64, [*B, 1]: how many tokens each prompt leaves, 0 or less
    if there is no room. `TurnTokenizer` and `EndTrajectory` truncate such rows.

    Args:
        sampler: What samples. Its `bounded(max_tokens)` is a context in which it stops after so many tokens.
        max_new_tokens: Bound of an answer.
        length: Tokens of prompt and answer that the model takes together; None if that is not known.
        log_probs: Whether empty answers have log-probabilities as others do.
        respects_length: Whether the sampler itself keeps to `length`, as vLLM does.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        max_new_tokens: int,
        length: int | None,
        log_probs: bool,
        respects_length: bool,
    ) -> None:
        super().__init__()
        self.in_keys: Any = list(sampler.in_keys)
        self.out_keys: Any = [*sampler.out_keys, ROOM]
        self.sampler = sampler
        self.max_new_tokens, self.length = max_new_tokens, length
        self.log_probs, self.respects_length = log_probs, respects_length

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample in each row that has room."""
        td, rows = border.leaves(tensordict)
        groups: dict[int, list[TensorDictBase]] = {}
        for row in rows:
            groups.setdefault(self._tokens(row), []).append(row)
        if set(groups) == {self.max_new_tokens}:
            return self.sampler(td)
        for tokens, some in groups.items():
            if tokens <= 0:
                for row in some:
                    write_answer(row, row.get(TOKENS), [], [] if self.log_probs else None)
                continue
            with self.sampler.bounded(tokens):
                said = self.sampler(lazy_stack(some))
            for row, answered in zip(some, border.leaves(said)[1], strict=True):
                row.update(answered)
        return td

    def _tokens(self, row: TensorDictBase) -> int:
        """Return how many tokens may be sampled in a row, and note how much room it has."""
        left, length = row.get(TOKENS_LEFT, None), self.length
        of_bound = None if left is None else int(left)
        of_context = None if length is None else length - len(row.get(TOKENS))
        known = [room for room in (of_bound, of_context) if room is not None]
        if known:
            row.set(ROOM, torch.tensor([min(known)], device=row.device))
            if min(known) <= 0:
                return 0
        kept = known if not self.respects_length else [of_bound] if of_bound is not None else []
        return min([self.max_new_tokens, *kept])
