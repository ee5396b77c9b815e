"""What stands around the generation: the prompt's ids before it, a message and log-probs behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.modules.llm.policies import TransformersWrapper

from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.base import Tools, specs_of
from torchrl_agentic.parsers.control_tokens import control_tokens_of, escaper
from torchrl_agentic.rollout.scripted import add_answers
from torchrl_agentic.rollout.vllm_sampler import (
    BoundedSampler,
    EngineSampler,
    context_length,
    is_engine,
    structural_tag,
)
from torchrl_agentic.tokens.chat_template import ChatTemplate
from torchrl_agentic.tokens.encoding import Encoder, Piece, escaped
from torchrl_agentic.tokens.ledger import PROMPT
from torchrl_agentic.tokens.writer import read_answer, stop_ids
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.turn_tokenizer import ATTENTION, TOKENS


class HistoryToTokens(TensorDictModuleBase):
    """Renders and encodes whole conversations, as prompts: for environments without a `TurnTokenizer`.

    The ids of earlier turns are made from their text, so they may be others than were sampled. In what tools
    wrote, control tokens are taken apart. Reads ("history", "prompt"); writes ("tokens", "prompt") and
    ("masks", "all_attention_mask").
    """

    def __init__(self, tokenizer: Any, tools: Tools = (), chat_template: str | None = None) -> None:
        super().__init__()
        self.in_keys: Any = [("history", "prompt")]
        self.out_keys: Any = [TOKENS, ATTENTION]
        self.encoder, self._control = (
            Encoder(tokenizer),
            escaper(tuple(control_tokens_of(tokenizer).values())),
        )
        self.template = ChatTemplate(
            tokenizer,
            chat_template=chat_template,
            tools=specs_of(tools),
            control=self._control,
            probe=False,
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the prompt of each row."""
        td, rows = border.leaves(tensordict)
        for row, conversation in zip(rows, border.prompts(td), strict=True):
            chat = [escaped(border.message_dict(one), self._control) for one in border.messages(conversation)]
            text = Piece(self.template.render(chat), PROMPT, is_trusted=True)
            ids = torch.tensor(self.encoder.encode([text]).ids, device=row.device)
            row.set(TOKENS, ids)
            row.set(ATTENTION, torch.ones_like(ids, dtype=torch.bool))
        return td


class TokensToHistory(TensorDictModuleBase):
    """Adds the sampled ids, up to the one that ends the answer, to the history as a message.

    An answer without such an end was cut off: it is not complete, and its calls do not run. Reads ("history",
    "prompt") and ("tokens", "response"); writes ("history", "response") and ("history", "full").
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        super().__init__()
        self.in_keys: Any = [("history", "prompt"), ("tokens", "response")]
        self.out_keys: Any = [("history", "response"), ("history", "full")]
        self.tokenizer, self.stops = tokenizer, frozenset(stop_ids(tokenizer, stop_token_ids))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Answer in each row."""
        td, rows = border.leaves(tensordict)
        answers = [
            read_answer(self.tokenizer, row.get(("tokens", "response")).tolist(), self.stops) for row in rows
        ]
        return add_answers(td, answers)


class FullSequence(TensorDictModuleBase):
    """Describe ("tokens", "full") to losses: which tokens this turn sampled, and with what log-probabilities.

    Reads ("tokens", "response") and ("tokens", "full"), and ("log_probs", "response") if asked to. Writes
    ("masks", "all_assistant_mask"), bool, true for the answer alone: earlier answers in the prompt belong to
    the steps that sampled them. Writes ("log_probs", "full"), in nats, NaN for the prompt.

    Args:
        log_probs: Whether to write log-probabilities.
    """

    def __init__(self, *, log_probs: bool = True) -> None:
        super().__init__()
        self.in_keys: Any = [("tokens", "response"), ("tokens", "full")]
        self.out_keys: Any = [("masks", "all_assistant_mask")]
        self.log_probs = log_probs
        if log_probs:
            self.in_keys.append(("log_probs", "response"))
            self.out_keys.append(("log_probs", "full"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write them in each row."""
        td, rows = border.leaves(tensordict)
        for row in rows:
            full, answer = row.get(("tokens", "full")), len(row.get(("tokens", "response")))
            start = len(full) - answer
            mask = torch.arange(len(full), device=full.device) >= start
            row.set(("masks", "all_assistant_mask"), mask)
            if self.log_probs:
                known = row.get(("log_probs", "response"))
                row.set(("log_probs", "full"), torch.cat([known.new_full((start,), torch.nan), known]))
        return td


Mode = Literal["tokens", "history"]


def agent_policy(
    model: Any,
    tokenizer: Any,
    tools: Tools = (),
    *,
    mode: Mode = "tokens",
    parser: ToolCallParser | str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_token_ids: Sequence[int] = (),
    tool_choice: Literal["auto", "required"] | None = None,
    parallel_tool_calls: bool = True,
    chat_template: str | None = None,
    generate_kwargs: Mapping[str, Any] | None = None,
    return_log_probs: bool = True,
    max_context: int | None = None,
) -> TensorDictSequential:
    """Make the policy of an agent on released TorchRL: for rollouts, collectors and `GRPOLoss`.

    With mode="tokens" it reads ("tokens", "prompt"), which `TurnTokenizer` writes, so that all turns keep
    the ids that were sampled. mode="history" is the fallback without `TurnTokenizer`: it renders the
    conversation anew each turn, so that the ids of earlier turns may be others than were sampled.

    Writes ("history", "response") and ("history", "full"), ragged, ("tokens", ...), ("masks",
    "all_attention_mask"), ("masks", "all_assistant_mask"), true for the tokens of this answer, and
    ("log_probs", "response") and "full": in nats, of the model's own distribution (temperature 1, whatever is
    sampled with), NaN for the prompt. So `GRPOLoss` takes the steps as they are, with masking_strategy "sft"
    or "rlhf".

    Args:
        model: a transformers model, a `vllm.LLM`, or TorchRL's `AsyncVLLM`. That one asks Ray for a GPU, but
            also runs without: after `ray.init(num_gpus=1)`, with vLLM for the CPU.
        tokenizer: its tokenizer, the same as `TurnTokenizer`'s.
        tools: for structural tags, and for the prompt in history mode: `compose.tools`.
        mode: "tokens" or "history", see above.
        parser: for structural tags; the same as `ToolCompose`'s.
        max_new_tokens: of one answer. What is cut off there is no complete message: its calls do not run.
        temperature: 0 for the likeliest token each time.
        top_p: sample from the likeliest tokens that have this probability together.
        stop_token_ids: what else than `eos_token` ends an answer; the same as `TurnTokenizer`'s.
        tool_choice: constrain the calls by a structural tag (vLLM only): "auto", or "required" for one at
            least. A complete call is then never malformed. The log-probs are those of the masked distribution
            it was sampled from: for a loss, let `training_policy` compute the model's own. None: the model
            writes what it likes.
        parallel_tool_calls: whether a constrained answer may hold several.
        chat_template: in history mode, instead of the tokenizer's own.
        generate_kwargs: more for `model.generate`, or for vLLM's `SamplingParams`.
        return_log_probs: whether they are wanted.
        max_context: Tokens of prompt and answer together that the model takes; by default what the model
            says: vLLM's `max_model_len`, a configuration's `max_position_embeddings`. A row whose prompt
            leaves no room gets an empty answer, and `TurnTokenizer` or `EndTrajectory` truncates it.

    Raises:
        ValueError: the pad token ends answers too; a structural tag is wanted where there is none.
        TypeError: the model is none of these.
        MissingExtra: vLLM is not installed.
    """
    stops = stop_ids(tokenizer, stop_token_ids)
    if mode not in ("tokens", "history"):
        raise ValueError(f"mode is 'tokens' or 'history'; got {mode!r}")
    if isinstance(model, torch.nn.Module) and hasattr(model, "generate"):
        if tool_choice is not None:
            raise ValueError("structural tags need vLLM; transformers generates without constraints")
        options = {
            "tokenizer": tokenizer,
            "input_mode": "tokens",
            "return_log_probs": return_log_probs,
            "pad_output": False,
        }
        sampler = _transformers(model, options, stops, max_new_tokens, temperature, top_p, generate_kwargs)
    elif is_engine(model):
        sampling: dict[str, Any] = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "stop_token_ids": list(stops),
            **(generate_kwargs or {}),
        }
        if tool_choice is not None:
            sampling["structured_outputs"] = structural_tag(parser, tools, tool_choice, parallel_tool_calls)
        sampler = EngineSampler(model, tokenizer, return_log_probs=return_log_probs, **sampling)
    else:
        raise TypeError(f"a transformers model or a vLLM engine is needed; got {type(model).__name__}")
    length = context_length(model) if max_context is None else max_context
    sampler = BoundedSampler(
        sampler,
        max_new_tokens=max_new_tokens,
        length=length,
        log_probs=return_log_probs,
        respects_length=isinstance(sampler, EngineSampler),
    )
    modules: list[Any] = [sampler, TokensToHistory(tokenizer, stop_token_ids)]
    if mode == "history":
        modules.insert(0, HistoryToTokens(tokenizer, tools, chat_template))
    modules.append(FullSequence(log_probs=return_log_probs))
    return TensorDictSequential(modules)


def training_policy(model: Any, tokenizer: Any) -> TransformersWrapper:
    """Make what a loss evaluates: the log-probs of ("tokens", "full"), of each row, by a transformers model.

    For `GRPOLoss(training_policy(model, tokenizer), masking_strategy=...)`: "sft" for single turns, as
    collectors give them, "rlhf" for whole trajectories (`trajectory_batch`).

    Raises:
        ValueError: the pad token ends answers too.
    """
    stop_ids(tokenizer)
    options = {"input_mode": "tokens", "generate": False, "return_log_probs": True, "pad_output": False}
    wrapper = _Exact(model, tokenizer=tokenizer, pad_model_input=True, **options)
    wrapper.padding_value = tokenizer.pad_token_id
    return wrapper


class _Exact(TransformersWrapper):
    """A TransformersWrapper that keeps the log-prob of the first token; the released one writes 0 there."""

    @contextmanager
    def bounded(self, max_tokens: int) -> Iterator[None]:
        """Sample so many tokens at most, in this context."""
        kept = self.generate_kwargs["max_new_tokens"]
        self.generate_kwargs["max_new_tokens"] = max_tokens
        try:
            yield
        finally:
            self.generate_kwargs["max_new_tokens"] = kept

    @classmethod
    def _log_probs_generate(
        cls, tokens: Any, logits: Any, pad_val: float = -100, pad: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return chosen, logits


def _transformers(
    model: Any,
    options: Mapping[str, Any],
    stops: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    more: Mapping[str, Any] | None,
) -> _Exact:
    wrapper = _Exact(model, generate=True, **options)
    pad = options["tokenizer"].pad_token_id
    sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        # Without top_k=0 transformers samples from the 50 likeliest.
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    wrapper.generate_kwargs.update(
        sampling,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops),
        pad_token_id=pad,
        suppress_tokens=[pad],  # TorchRL would drop it from the middle of an answer
        **(more or {}),
    )
    wrapper.padding_value = pad  # TorchRL takes the BOS that some tokenizers put before it
    return wrapper
