"""Sample from prompt ids with vLLM, within the context length."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_agentic.engines.vllm_engine import saved_generation_config, without_padding
from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.tensors import column_tensor
from torchrl_agentic.transforms.token_rows import (
    ROOM,
    TOKENS_LEFT,
    TokenRow,
    read_rows,
    write_rows,
)
from torchrl_agentic.transforms.turn_tokenizer import ATTENTION, TOKENS

_NOT_PADDED = NonTensorData(False)


class EngineSampler(TensorDictModuleBase):
    """Samples an answer to each prompt with a vLLM engine; writes the keys of `TransformersWrapper`.

    TorchRL's `vLLMWrapper` ignores `stop_token_ids` and `structured_outputs`, lets the engine score every
    prompt again, and takes many times as long to read the output.

    Reads ("tokens", "prompt"); writes "tokens", ("masks", "all_attention_mask") and ("log_probs",
    "response"), in nats, the stop token included.

    Args:
        engine: A `vllm.LLM`, or TorchRL's `AsyncVLLM`.
        tokenizer: The tokenizer of the model.
        return_log_probs: Write log-probabilities.
        sampling: Arguments of `vllm.SamplingParams`; they take precedence over those that this class sets.

    Raises:
        MissingExtra: If vLLM is not installed.
    """

    def __init__(
        self, engine: Any, tokenizer: Any, *, return_log_probs: bool = True, **sampling: Any
    ) -> None:
        super().__init__()
        try:
            from vllm import SamplingParams  # pyright: ignore[reportMissingImports]  only in .venv-vllm
        except ImportError:
            raise MissingExtra("Generating with vLLM", "vllm", "vllm") from None
        self.in_keys: Any = [TOKENS]
        self.out_keys: Any = ["tokens", ATTENTION]
        if return_log_probs:
            self.out_keys.append(("log_probs", "response"))
        self.engine = engine
        own: dict[str, Any] = {
            "detokenize": False,  # the message is made from the ids, once
            "logprobs": 0 if return_log_probs else None,
            "logit_bias": without_padding(tokenizer.pad_token_id, _vocab_size(engine)),
        }
        self.sampling = SamplingParams(**{**own, **sampling})

    @contextmanager
    def bounded(self, max_tokens: int) -> Generator[None]:
        """Bound the number of sampled tokens in this context."""
        kept = self.sampling
        self.sampling = kept.clone()
        self.sampling.max_tokens = max_tokens
        try:
            yield
        finally:
            self.sampling = kept

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample an answer in each row of a batch, [*B]."""
        rows = prompt_rows(tensordict)
        asked = [{"prompt_token_ids": row.ids("prompt")} for row in rows]
        found = self.engine.generate(asked, self.sampling, use_tqdm=False)
        answers: list[Answer] = []
        for request in found:
            (answer,) = request.outputs
            ids, each = list(answer.token_ids), answer.logprobs
            known = None if each is None else [e[token].logprob for token, e in zip(ids, each, strict=True)]
            answers.append(answered(rows[len(answers)], ids, known))
        return write_answers(tensordict, answers)


Answer = Mapping[str, TokenRow]
"""What a policy writes into a row, by key: "tokens", "masks" and "log_probs"."""
_KINDS: Mapping[str, Any] = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs}


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
    for key, kind in _KINDS.items():
        if answers and key in answers[0]:
            write_rows(td, key, [answer[key] for answer in answers], kind)
    return td


def is_engine(model: Any) -> bool:
    """Check whether a model is a `vllm.LLM` or an `AsyncVLLM`, without importing vLLM."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}
    return bool(kinds & {("vllm", "LLM"), ("torchrl", "AsyncVLLM")})


def _vocab_size(engine: Any) -> int | None:
    """Return how many ids the model of an engine has; None if it is unknown."""
    config = getattr(getattr(engine, "llm_engine", None), "model_config", None)
    return None if config is None else config.get_vocab_size()


def context_length(model: Any) -> int | None:
    """Return how many tokens a model takes, prompt and answer together; None if it is unknown.

    Args:
        model: A transformers model (`max_position_embeddings` of its configuration), a `vllm.LLM` or
            TorchRL's `AsyncVLLM` (`max_model_len`).
    """
    for owner, name in _places(model):
        found = getattr(owner, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None


def generation_config(model: Any) -> Any:
    """Return the `generation_config` of a model, an object or a mapping; None if it is unknown.

    Args:
        model: A transformers model, a `vllm.LLM` or TorchRL's `AsyncVLLM`.
    """
    found = getattr(model, "generation_config", None)
    if found is not None:
        return found
    config = getattr(getattr(model, "llm_engine", None), "model_config", None)
    if config is not None:
        return config.try_get_generation_config()
    args = getattr(model, "engine_args", None)
    return None if args is None else saved_generation_config(args.model)


def _places(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield the objects and attributes that may hold the context length."""
    config = getattr(model, "config", None)
    if config is not None:
        text_config = getattr(config, "get_text_config", None)
        yield (text_config() if callable(text_config) else config), "max_position_embeddings"
    yield getattr(getattr(model, "llm_engine", None), "model_config", None), "max_model_len"
    yield getattr(model, "engine_args", None), "max_model_len"


class BoundedSampler(TensorDictModuleBase):
    """Samples answers that fit: a prompt that is too long gets an empty answer and never reaches the model.

    Reads ("tokens", "prompt"), and ("agentic", "tokens_left") if `TurnTokenizer` has a bound. Writes the keys
    of the sampler, and ("agentic", "room"), int64, [*B, 1]: how many tokens each prompt leaves, 0 or less if
    there is no room. `TurnTokenizer` and `EndTrajectory` truncate such rows.

    Args:
        sampler: Module that samples. `bounded(max_tokens)` is a context in which it stops after that many
            tokens.
        max_new_tokens: Upper bound on the tokens of an answer.
        length: Number of tokens that the model takes, prompt and answer together; None if it is unknown.
        log_probs: Write log-probabilities of empty answers, as for other answers.
        respects_length: The sampler itself keeps to `length`, as vLLM does.
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
        """Sample in each row of a batch, [*B], that has room."""
        rows = prompt_rows(tensordict)
        lengths = [len(row.tensors["prompt"]) for row in rows]
        by_bound: dict[int, list[int]] = {}
        for index, bound in enumerate(self._bounds(tensordict, lengths)):
            by_bound.setdefault(bound, []).append(index)
        answers: dict[int, Answer] = {}
        for bound, some in by_bound.items():
            prompts = [rows[index] for index in some]
            if bound <= 0:
                found = [answered(prompt, [], [] if self.log_probs else None) for prompt in prompts]
            elif bound == self.max_new_tokens:
                found = self._sample(prompts, tensordict.device)
            else:
                with self.sampler.bounded(bound):
                    found = self._sample(prompts, tensordict.device)
            answers.update(zip(some, found, strict=True))
        return write_answers(tensordict, [answers[index] for index in range(len(rows))])

    def _sample(self, prompts: Sequence[TokenRow], device: torch.device | None) -> list[Answer]:
        """Run the sampler on a batch that holds nothing but prompts."""
        td = TensorDict({}, batch_size=[len(prompts)], device=device)
        write_rows(td, "tokens", [prompt.keep(lambda name: name == "prompt") for prompt in prompts])
        masks = [torch.ones_like(prompt.tensors["prompt"], dtype=torch.bool) for prompt in prompts]
        write_rows(td, "masks", [TokenRow({"all_attention_mask": mask}) for mask in masks])
        sampled = self.sampler(td)
        found = {key: rows for key in _KINDS if (rows := read_rows(sampled, key)) is not None}
        return [{key: rows[index] for key, rows in found.items()} for index in range(len(prompts))]

    def _bounds(self, tensordict: TensorDictBase, lengths: Sequence[int]) -> list[int]:
        """Return how many tokens may be sampled in each row, and write how much room each has."""
        left = tensordict.get(TOKENS_LEFT, None)
        of_bound = None if left is None else left.reshape(-1).tolist()
        of_context = None if self.length is None else [self.length - length for length in lengths]
        known = [rooms for rooms in (of_bound, of_context) if rooms is not None]
        if not known:
            return [self.max_new_tokens] * len(lengths)
        rooms = list(map(min, *known)) if len(known) > 1 else known[0]
        shape = (*tensordict.batch_size, 1)
        tensordict.set(ROOM, torch.tensor(rooms, device=tensordict.device).reshape(shape))
        kept = known if not self.respects_length else [of_bound] if of_bound is not None else []
        return [
            0 if room <= 0 else min([self.max_new_tokens, *(rooms[index] for rooms in kept)])
            for index, room in enumerate(rooms)
        ]
