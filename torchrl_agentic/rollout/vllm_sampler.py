"""Sample from prompt ids with vLLM, within the context length."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.parsers import ToolCallParser, get_parser
from torchrl_agentic.parsers.base import Tools
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.specs import ROOM, TOKENS_LEFT
from torchrl_agentic.transforms.turn_tokenizer import ATTENTION, TOKENS

_FORBID = -100.0
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
            "logit_bias": _without_padding(engine, tokenizer.pad_token_id),
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
        td, rows = border.leaves(tensordict)
        prompts = [row.get(TOKENS) for row in rows]
        asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        found = self.engine.generate(asked, self.sampling, use_tqdm=False)
        for row, prompt, request in zip(rows, prompts, found, strict=True):
            (answer,) = request.outputs
            ids, each = list(answer.token_ids), answer.logprobs
            known = None if each is None else [e[token].logprob for token, e in zip(ids, each, strict=True)]
            write_answer(row, prompt, ids, known)
        return td


def write_answer(
    row: TensorDictBase, prompt: torch.Tensor, ids: Sequence[int], log_probs: Sequence[float] | None
) -> None:
    """Write an answer into a row as TorchRL's wrappers do.

    Args:
        row: The row, [].
        prompt: Ids of the prompt, int64, [P].
        ids: Ids of the answer, [R].
        log_probs: Log-probability of each id of the answer, in nats, or None if they are unknown.
    """
    response = torch.tensor(ids, dtype=prompt.dtype, device=prompt.device)
    full = torch.cat([prompt, response])
    tokens = {"prompt": prompt, "response": response, "full": full, "padded": _NOT_PADDED}
    _write(row, "tokens", Tokens, tokens)
    _write(row, "masks", Masks, {"all_attention_mask": torch.ones_like(full, dtype=torch.bool)})
    if log_probs is not None:
        known = torch.tensor(log_probs, dtype=torch.float32, device=prompt.device)
        _write(row, "log_probs", LogProbs, {"response": known})


def is_engine(model: Any) -> bool:
    """Check whether a model is a `vllm.LLM` or an `AsyncVLLM`, without importing vLLM."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}
    return bool(kinds & {("vllm", "LLM"), ("torchrl", "AsyncVLLM")})


def structural_tag(
    parser: ToolCallParser | str | None,
    tools: Tools,
    tool_choice: Literal["auto", "required"],
    parallel: bool,
) -> Any:
    """Return the constraint on tool calls as vLLM's `structured_outputs`.

    Args:
        parser: The format of the calls, or its name.
        tools: Tools that may be called.
        tool_choice: "auto", or "required" for at least one call.
        parallel: Allow several calls in an answer.

    Raises:
        ValueError: If there is no parser, or its format has no structural tag.
        MissingExtra: If vLLM is not installed.
    """
    if parser is None:
        raise ValueError("tool_choice needs parser=, the format in which the model calls tools")
    tag = get_parser(parser).structural_tag(tools, tool_choice=tool_choice, parallel=parallel)
    if tag is None:
        raise ValueError(
            f"the format {get_parser(parser).name!r} has no structural tag; leave tool_choice out"
        )
    try:
        from vllm.sampling_params import StructuredOutputsParams  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtra("Generating with vLLM", "vllm", "vllm") from None
    return StructuredOutputsParams(structural_tag=json.dumps(tag))


def _write(row: TensorDictBase, key: str, kind: Any, fields: dict[str, Any]) -> None:
    row.set(key, kind._from_tensordict(TensorDict(fields, device=row.device)))


def _without_padding(engine: Any, pad: int) -> dict[int, float] | None:
    """Return a bias that forbids the pad token, which losses drop; None if the model has no such token."""
    config = getattr(getattr(engine, "llm_engine", None), "model_config", None)
    return {pad: _FORBID} if config is None or pad < config.get_vocab_size() else None


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
                sampled = self.sampler(lazy_stack(some))
            for row, answered in zip(some, border.leaves(sampled)[1], strict=True):
                row.update(answered)
        return td

    def _tokens(self, row: TensorDictBase) -> int:
        """Return how many tokens may be sampled in a row, and write how much room it has."""
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
