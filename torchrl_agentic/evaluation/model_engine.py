"""`engine_of` makes an engine of what users call a model, and `load_model` loads one by its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

from torchrl_agentic.engines.base import ChatEngine, Engine
from torchrl_agentic.engines.lock_step import LockStep
from torchrl_agentic.engines.transformers_engine import TransformersEngine
from torchrl_agentic.engines.vllm_engine import VLLMEngine
from torchrl_agentic.rollout.policies import agent_policy

EngineName = Literal["transformers", "vllm"]


def load_model(path: str, engine: EngineName = "transformers") -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        engine: Engine that runs the model: "transformers", in float32 on the CPU, or "vllm".

    Raises:
        MissingExtra: If vLLM is not installed.
        OSError: If there is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command line has a progress bar of its own
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(path, padding_side="left")
    if engine == "transformers":
        model = cast("Any", AutoModelForCausalLM).from_pretrained(path, dtype="auto")
        return model.float().eval(), tokenizer
    return VLLMEngine.from_model(
        path, tokenizer=tokenizer, engine_args={"enforce_eager": True}
    ).llm, tokenizer


def engine_of(
    model: Any,
    tokenizer: Any,
    *,
    max_new_tokens: int,
    max_concurrent: int,
    temperature: float,
    constraint: Mapping[str, Any],
) -> Engine | ChatEngine:
    """Return an engine over a model, or the model if it is one.

    Args:
        model: A transformers model; vLLM's `AsyncLLM` or `LLM`, or TorchRL's `AsyncVLLM`; or an engine.
        tokenizer: Tokenizer of the model.
        max_new_tokens: Upper bound on the tokens of an answer, for engines that work in lock-step.
        max_concurrent: Number of requests at once, for engines that are created here.
        temperature: Sampling temperature of engines that are created here.
        constraint: The `tool_choice` with its `parser` and `tools`, as in `agent_policy`.

    Raises:
        TypeError: If the model is of another type.
        ValueError: If a constraint on tool calls is not available.
    """
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}
    if kinds & {("vllm", "AsyncLLM"), ("torchrl", "AsyncVLLM")}:
        return VLLMEngine(model, tokenizer=tokenizer, temperature=temperature, **constraint)
    if ("vllm", "LLM") in kinds:  # which works on one batch at a time
        policy = agent_policy(
            model, tokenizer, max_new_tokens=max_new_tokens, temperature=temperature, **constraint
        )
        return LockStep(policy, tokenizer, max_concurrent=max_concurrent)
    if constraint["tool_choice"] is not None:
        raise ValueError("structural tags need vLLM; other engines constrain answers by their own options")
    if isinstance(model, Engine | ChatEngine):
        return model
    if callable(getattr(model, "generate", None)) and hasattr(model, "get_input_embeddings"):
        seed = int(torch.randint(2**62, ()).item())  # so that torch.manual_seed makes runs repeat
        return TransformersEngine(
            model, tokenizer, temperature=temperature, max_concurrent=max_concurrent, seed=seed
        )
    raise TypeError(f"a transformers model, a vLLM engine or an Engine is needed; got {type(model).__name__}")
