"""Policies for TorchRL's collectors: from prompt ids to a sampled message with log-probabilities."""

# TensorDict border: TensorDict and TorchRL annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.modules.llm.policies import TransformersWrapper

from torchrl_agentic.engines.base import Engine
from torchrl_agentic.engines.duck_typed_engine import ensure_engine
from torchrl_agentic.engines.sampling import TEMPERATURE, Sampling
from torchrl_agentic.engines.transformers_engine import most_likely
from torchrl_agentic.engines.vllm_engine import VLLMEngine, is_vllm
from torchrl_agentic.parsers import ToolCallParser
from torchrl_agentic.parsers.base import Tools, escaper, specs_of
from torchrl_agentic.parsers.control_tokens import control_tokens_of
from torchrl_agentic.rollout.answer_rows import KINDS, Answer, prompt_rows, write_answers, write_prompts
from torchrl_agentic.rollout.bounded_sampler import BoundedSampler, EngineSampler
from torchrl_agentic.rollout.scripted import add_answers
from torchrl_agentic.tokens.chat_template import ChatTemplate
from torchrl_agentic.tokens.encoding import Encoder, escaped
from torchrl_agentic.tokens.writer import read_answer, stop_ids
from torchrl_agentic.transforms import history as border
from torchrl_agentic.transforms.token_rows import TokenRow, read_rows
from torchrl_agentic.transforms.turn_tokenizer import ATTENTION, TOKENS

logger = logging.getLogger(__name__)


class HistoryToTokens(TensorDictModuleBase):
    """Renders and encodes whole conversations as prompts, in environments without a `TurnTokenizer`.

    The ids of earlier turns are re-created from their text, so they may differ from the sampled ones. Control
    tokens in tool results are escaped. Reads ("history", "prompt"); writes ("tokens", "prompt"), int64, [T],
    and ("masks", "all_attention_mask"), bool, [T].

    Args:
        tokenizer: A fast tokenizer of transformers with a chat template.
        tools: Tools that the template shows.
        chat_template: Replaces the tokenizer's own template.
    """

    def __init__(self, tokenizer: Any, tools: Tools = (), chat_template: str | None = None) -> None:
        super().__init__()
        self.in_keys: Any = [("history", "prompt")]
        self.out_keys: Any = [TOKENS, ATTENTION]
        self.encoder = Encoder(tokenizer)
        self._control = escaper(tuple(control_tokens_of(tokenizer).values()))
        self.template = ChatTemplate(
            tokenizer,
            chat_template=chat_template,
            tools=specs_of(tools),
            control=self._control,
            probe=False,
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the prompt of each row of a batch, [*B]."""
        tokens: list[TokenRow] = []
        for conversation in border.prompts(tensordict):
            chat = [escaped(one.for_template(), self._control) for one in conversation.messages]
            ids = self.encoder.encode_text(self.template.render(chat))
            tokens.append(TokenRow({"prompt": torch.tensor(ids, device=tensordict.device)}, {"prompt": ids}))
        write_prompts(tensordict, tokens)
        return tensordict


class TokensToHistory(TensorDictModuleBase):
    """Adds the sampled ids, up to the first stop token, to the history as a message.

    An answer without a stop token was cut off: it is incomplete, and its calls do not run. Reads ("history",
    "prompt") and ("tokens", "response"); writes ("history", "response") and ("history", "full").

    Args:
        tokenizer: The tokenizer of the model.
        stop_token_ids: Ids that end an answer besides `eos_token`.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        super().__init__()
        self.in_keys: Any = [("history", "prompt"), ("tokens", "response")]
        self.out_keys: Any = [("history", "response"), ("history", "full")]
        self.tokenizer, self.stops = tokenizer, frozenset(stop_ids(tokenizer, stop_token_ids))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the answer of each row of a batch, [*B]."""
        rows = prompt_rows(tensordict)
        answers = [read_answer(self.tokenizer, row.ids("response"), self.stops) for row in rows]
        return add_answers(tensordict, answers)


class FullSequence(TensorDictModuleBase):
    """Writes the mask and the log-probabilities of ("tokens", "full"), [T], as losses take them.

    Reads ("tokens", "response") and ("tokens", "full"), and ("log_probs", "response") if `log_probs` is true.
    Writes ("masks", "all_assistant_mask"), bool, [T], true only for this turn's answer: earlier answers in
    the prompt belong to the steps that sampled them. Writes ("log_probs", "full"), [T], in nats, NaN for the
    prompt.

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
        """Write them in each row of a batch, [*B]."""
        answers: list[Answer] = []
        tokens, masks = prompt_rows(tensordict), read_rows(tensordict, "masks")
        log_probs = read_rows(tensordict, "log_probs")
        for index, row in enumerate(tokens):
            full = row.tensors["full"]
            start = len(full) - len(row.tensors["response"])
            mask = TokenRow({"all_assistant_mask": torch.arange(len(full), device=full.device) >= start})
            answer = {"masks": mask if masks is None else masks[index].merged(mask)}
            if self.log_probs and log_probs is not None:
                known = log_probs[index].tensors["response"]
                whole = torch.cat([known.new_full((start,), torch.nan), known])
                answer["log_probs"] = log_probs[index].merged(TokenRow({"full": whole}))
            answers.append(answer)
        return write_answers(tensordict, answers)


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
    """Return the policy of an agent for rollouts, collectors and `GRPOLoss`.

    With mode="tokens" it reads ("tokens", "prompt"), which `TurnTokenizer` writes, so that all turns keep the
    sampled ids. mode="history" is the fallback without `TurnTokenizer`: it renders the conversation anew each
    turn, so the ids of earlier turns may differ from the sampled ones.

    Writes ("history", "response") and ("history", "full"), ragged; ("tokens", ...); ("masks",
    "all_attention_mask"); ("masks", "all_assistant_mask"), true for the tokens of this answer; and
    ("log_probs", "response") and "full", in nats, of the distribution that was sampled from (after
    `temperature` and `top_p`; of the model itself at temperature 0), NaN for the prompt. `GRPOLoss` over
    `training_policy(..., temperature=...)` takes the steps as they are, with masking_strategy "sft" or
    "rlhf". vLLM must have been started with `logprobs_mode="processed_logprobs"`, otherwise its
    log-probabilities are those at temperature 1.

    Args:
        model: A transformers model; a `vllm.LLM`, an `AsyncLLM`, or TorchRL's `AsyncVLLM`; or any `Engine`,
            whose rows are sampled at the same time, and which has `temperature`, `top_p`, `tool_choice` and
            `generate_kwargs` of its own. `AsyncVLLM` asks Ray for a GPU, but also runs without one after
            `ray.init(num_gpus=1)`, with vLLM for the CPU.
        tokenizer: The tokenizer of the model, the same as `TurnTokenizer`'s.
        tools: Tools for structural tags, and for the prompt in history mode: `compose.tools`.
        mode: "tokens" or "history", see above.
        parser: Format of tool calls for structural tags, the same as `ToolCompose`'s.
        max_new_tokens: Upper bound on the tokens of one answer. An answer that is cut off is incomplete, and
            its calls do not run.
        temperature: Sampling temperature; 0 takes the most likely token each time.
        top_p: Sample from the most likely tokens that have this probability together.
        stop_token_ids: Ids that end an answer besides `eos_token` and those of the model's
            `generation_config`. All of them are the attribute `stop_token_ids` of the policy: give that to
            `TurnTokenizer`.
        tool_choice: Constrain calls by a structural tag (only vLLM): "auto", or "required" for at least one
            call. A complete call is then never malformed. The log-probabilities are those of the masked
            distribution; for a loss, let `training_policy` compute the model's own. None: no constraint.
        parallel_tool_calls: Allow several calls in a constrained answer.
        chat_template: Replaces the tokenizer's own template in history mode.
        generate_kwargs: Additional arguments of `model.generate`, or of vLLM's `SamplingParams`.
        return_log_probs: Write log-probabilities.
        max_context: Number of tokens that the model takes, prompt and answer together; by default read from
            the model: vLLM's `max_model_len`, or `max_position_embeddings` of the configuration. A row whose
            prompt leaves no room gets an empty answer, and `TurnTokenizer` or `EndTrajectory` truncates it.

    Returns:
        A module that takes and returns a batch, [*B]; its attribute `sampling` is the distribution that it
        samples from.

    Raises:
        ValueError: If the pad token also ends answers, a structural tag is not available, or an engine has an
            option of its own.
        TypeError: If the model is of another type.
        MissingExtra: If vLLM is not installed.
    """
    if mode not in ("tokens", "history"):
        raise ValueError(f"mode is 'tokens' or 'history'; got {mode!r}")
    shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "log_probs": return_log_probs}
    if isinstance(model, torch.nn.Module) and hasattr(model, "generate"):
        if tool_choice is not None:
            raise ValueError("structural tags need vLLM; transformers generates without constraints")
        stops = stop_ids(
            tokenizer, stop_token_ids, generation_config=getattr(model, "generation_config", None)
        )
        options = {
            "tokenizer": tokenizer,
            "input_mode": "tokens",
            "return_log_probs": return_log_probs,
            "pad_output": False,
        }
        wrapper = _transformers(model, options, stops, max_new_tokens, temperature, top_p, generate_kwargs)
        length = context_length(model) if max_context is None else max_context
        sampler: Any = GenerateSampler(wrapper, length=length, **shared)
        chosen = Sampling.of(wrapper.generate_kwargs, is_processed=True)
    else:
        if is_vllm(model):
            engine = VLLMEngine(
                model,
                tokenizer=tokenizer,
                temperature=temperature,
                top_p=top_p,
                stop_token_ids=stop_token_ids,
                log_probs=return_log_probs,
                sampling=generate_kwargs,
                tool_choice=tool_choice,
                parser=parser,
                tools=tools,
                parallel_tool_calls=parallel_tool_calls,
            )
        else:
            options = {"temperature": temperature, "top_p": top_p, "tool_choice": tool_choice}
            engine = _given_engine(model, {**options, "generate_kwargs": generate_kwargs or None})
        stops = stop_ids(tokenizer, (*stop_token_ids, *engine.stop_token_ids))
        length = engine.context_length if max_context is None else max_context
        sampler = EngineSampler(engine, stop_token_ids=stops, length=length, **shared)
        chosen = engine.sampling
    modules: list[Any] = [sampler, TokensToHistory(tokenizer, stops)]
    if mode == "history":
        modules.insert(0, HistoryToTokens(tokenizer, tools, chat_template))
    modules.append(FullSequence(log_probs=return_log_probs))
    policy: Any = TensorDictSequential(modules)
    policy.sampling = chosen
    policy.stop_token_ids = stops
    return policy


_OWN_OPTIONS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "tool_choice": None,
    "generate_kwargs": None,
}
"""Options of `agent_policy` that an engine has itself, with their defaults."""


def _given_engine(model: Any, options: Mapping[str, Any]) -> Engine:
    """Return the engine given to `agent_policy`; raise ValueError for options that the engine has itself."""
    try:
        engine = ensure_engine(model)
    except TypeError as error:
        raise TypeError(f"a transformers model, a vLLM engine or an Engine is needed: {error}") from None
    if not isinstance(engine, Engine):
        raise TypeError(f"a policy needs an engine that samples tokens; {engine.describe()} answers messages")
    for name, value in options.items():
        if value != _OWN_OPTIONS[name]:
            raise ValueError(
                f"{engine.describe()} has {name} of its own: set it there, not in agent_policy(); got "
                f"{value!r}"
            )
    return engine


def context_length(model: Any) -> int | None:
    """Return how many tokens a transformers model takes, prompt and answer together; None if it is unknown.

    Args:
        model: The model; its configuration has `max_position_embeddings`.
    """
    config = getattr(model, "config", None)
    if config is None:
        return None
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def training_policy(model: Any, tokenizer: Any, *, temperature: float = 1.0) -> TransformersWrapper:
    """Return the module that a loss evaluates: the log-probabilities of ("tokens", "full") of each row.

    For `GRPOLoss(training_policy(model, tokenizer), masking_strategy=...)`: "sft" for single turns, as
    collectors return them, "rlhf" for whole trajectories (`trajectory_batch`).

    The policy that samples, the one that is trained, and the reference of a KL divergence must have the same
    temperature, otherwise the loss compares different distributions. A warning is logged if a batch with
    ("collector", "temperature") was sampled at another one.

    Args:
        model: A transformers model.
        tokenizer: The tokenizer of the model.
        temperature: Temperature of the policy, that of the engine which samples: the logits are divided by
            it.

    Raises:
        ValueError: If the pad token also ends answers, or the temperature is not above 0.
    """
    stop_ids(tokenizer)
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature must be above 0, that at which the tokens were sampled; got {temperature}"
        )
    wrapper = _Exact(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
        pad_model_input=True,
    )
    wrapper.padding_value = tokenizer.pad_token_id
    wrapper.temperature = temperature
    return wrapper


class _Exact(TransformersWrapper):
    """A TransformersWrapper with the log-probabilities of the distribution that was sampled from.

    TorchRL's has those at temperature 1, and writes 0 for the first token.
    """

    temperature: float = 1.0
    """Temperature of the policy that is evaluated."""
    _has_warned: bool = False

    def get_new_version(self, **options: Any) -> _Exact:
        """Return a copy with other options; see `TransformersWrapper`."""
        made = super().get_new_version(**options)
        made.temperature, made.padding_value = self.temperature, self.padding_value
        return made

    def forward(self, tensordict: TensorDictBase, **options: Any) -> TensorDictBase:
        """Evaluate the policy, or sample from it; see `TransformersWrapper`."""
        if not self.generate and not self._has_warned:
            self._has_warned = _warn_of_another_temperature(tensordict, self.temperature)
        return super().forward(tensordict, **options)

    def _compute_log_probs_from_model_output(self, model_output: Any, *args: Any, **options: Any) -> Any:
        if self.temperature != 1:
            model_output = {"logits": model_output["logits"].float() / self.temperature}
        return super()._compute_log_probs_from_model_output(model_output, *args, **options)

    @contextmanager
    def bounded(self, max_tokens: int) -> Generator[None]:
        """Bound the number of sampled tokens in this context."""
        kept = self.generate_kwargs["max_new_tokens"]
        self.generate_kwargs["max_new_tokens"] = max_tokens
        try:
            yield
        finally:
            self.generate_kwargs["max_new_tokens"] = kept

    def _log_probs_generate(  # pyright: ignore[reportIncompatibleMethodOverride]  TorchRL's needs no options
        self, tokens: Any, logits: Any, pad_val: float = -100, pad: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = self.generate_kwargs
        kept = logits.float()
        if options["do_sample"]:
            kept = most_likely(kept / options["temperature"], top_k=options["top_k"], top_p=options["top_p"])
        return kept.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1), logits


class GenerateSampler(BoundedSampler):
    """Samples with `TransformersWrapper`, in one batch for all rows with the same bound.

    Args:
        wrapper: The wrapper.
        options: Additional arguments of `BoundedSampler`.
    """

    def __init__(self, wrapper: _Exact, **options: Any) -> None:
        super().__init__(**options)
        self.wrapper = wrapper

    def sample(
        self,
        prompts: Sequence[TokenRow],
        bounds: Sequence[int],
        names: Sequence[str | None],
        device: torch.device | None,
    ) -> list[Answer]:
        """Sample an answer to each prompt.

        Args:
            prompts: Rows with the ids of prompts, [P] each.
            bounds: Upper bound on the tokens of each answer, 1 or more.
            names: Ignored.
            device: Device of the batch.
        """
        answers: dict[int, Answer] = {}
        for bound in dict.fromkeys(bounds):
            some = [index for index, each in enumerate(bounds) if each == bound]
            with self.wrapper.bounded(bound):
                found = self._generate([prompts[index] for index in some], device)
            answers.update(zip(some, found, strict=True))
        return [answers[index] for index in range(len(prompts))]

    def _generate(self, prompts: Sequence[TokenRow], device: torch.device | None) -> list[Answer]:
        """Run the wrapper on a batch that holds nothing but prompts."""
        td = TensorDict({}, batch_size=[len(prompts)], device=device)
        write_prompts(td, [prompt.keep(lambda name: name == "prompt") for prompt in prompts])
        sampled = self.wrapper(td)
        found = {key: rows for key in KINDS if (rows := read_rows(sampled, key)) is not None}
        return [{key: rows[index] for key, rows in found.items()} for index in range(len(prompts))]


def _warn_of_another_temperature(batch: TensorDictBase, temperature: float) -> bool:
    """Warn if a batch was sampled at another temperature than that of the policy; return whether it was."""
    sampled_at = batch.get(TEMPERATURE, None)
    if sampled_at is None:
        return False
    others = {round(value, 6) for value in sampled_at.flatten().tolist()} - {round(temperature, 6)}
    if others:
        logger.warning(
            "a batch was sampled at temperature %g, but the policy of the loss has temperature %g: "
            "training_policy(..., temperature=%g) makes them agree",
            *(min(others), temperature, min(others)),
        )
    return bool(others)


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
        # Without top_k=0 transformers samples from the 50 most likely tokens.
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    wrapper.generate_kwargs.update(
        sampling,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops),
        pad_token_id=pad,
        suppress_tokens=[pad],  # TorchRL would drop it from the middle of an answer
        **(more or {}),
    )
    wrapper.padding_value = pad  # TorchRL would take the BOS that some tokenizers write before it
    return wrapper
