"""`engine_of`: make an engine of a model; `load_model`: load a model by its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

from torchrl_agentic.engines.base import ChatEngine, Engine
from torchrl_agentic.engines.duck_typed_engine import ensure_engine
from torchrl_agentic.engines.transformers_engine import TransformersEngine
from torchrl_agentic.engines.vllm_engine import VLLMEngine, is_vllm

EngineName = Literal["transformers", "vllm"]


DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Names of the dtypes of a model; "auto" is that of its checkpoint."""


def default_device() -> torch.device:
    """Return the device of a model that is loaded without one: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    path: str,
    engine: EngineName = "transformers",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        path: A folder, or a name on the Hugging Face hub.
        engine: Engine that runs the model: "transformers" or "vllm".
        device: Device of the model, such as "cuda:1"; None: `default_device()`. vLLM chooses its own.
        dtype: Data type of the weights, one of `DTYPES` or torch's; None: that of the checkpoint, but
            float32 on a CPU with "transformers".

    Raises:
        MissingExtra: If vLLM is not installed.
        OSError: If there is no such model.
        ValueError: If there is no such device or dtype.
    """
    name = str(dtype or "auto").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}; got {dtype!r}")
    if engine == "vllm" and device is not None:
        raise ValueError(
            f"vLLM chooses its device: leave out device={str(device)!r}, or set CUDA_VISIBLE_DEVICES"
        )
    chosen = _checked_device(device)
    if dtype is None and engine == "transformers" and chosen.type == "cpu":
        name = "float32"
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # the command line has a progress bar of its own
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(path, padding_side="left")
    if engine == "transformers":
        model = cast("Any", AutoModelForCausalLM).from_pretrained(path, dtype=name)
        return model.to(chosen).eval(), tokenizer
    return VLLMEngine.from_model(
        path, tokenizer=tokenizer, engine_args={"enforce_eager": True, "dtype": name}
    ).llm, tokenizer


def _checked_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return default_device()
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is one of torch, such as 'cpu' or 'cuda:1'; got {device!r}") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(chosen)!r}, but torch finds no CUDA device: use 'cpu'")
    return chosen


def engine_of(
    model: Any,
    tokenizer: Any,
    *,
    max_concurrent: int,
    temperature: float,
    constraint: Mapping[str, Any],
) -> Engine | ChatEngine:
    """Return an engine that samples from a model; an engine is returned as it is.

    Args:
        model: A transformers model; vLLM's `AsyncLLM` or `LLM`, or TorchRL's `AsyncVLLM`; or an engine.
        tokenizer: Tokenizer of the model.
        max_concurrent: Number of requests at once, for engines that are created here.
        temperature: Sampling temperature of engines that are created here.
        constraint: The `tool_choice` with its `parser` and `tools`, as in `agent_policy`.

    Raises:
        TypeError: If the model is of another type.
        ValueError: If a constraint on tool calls is not available.
    """
    if is_vllm(model):
        return VLLMEngine(model, tokenizer=tokenizer, temperature=temperature, **constraint)
    if constraint["tool_choice"] is not None:
        raise ValueError("structural tags need vLLM; other engines constrain answers by their own options")
    if isinstance(model, Engine | ChatEngine):
        return ensure_engine(model)
    if callable(getattr(model, "generate", None)) and hasattr(model, "get_input_embeddings"):
        seed = int(torch.randint(2**62, ()).item())  # so that torch.manual_seed makes runs repeat
        return TransformersEngine(
            model, tokenizer, temperature=temperature, max_concurrent=max_concurrent, seed=seed
        )
    raise TypeError(f"a transformers model, a vLLM engine or an Engine is needed; got {type(model).__name__}")
