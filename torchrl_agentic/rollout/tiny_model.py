"""A language model of 2 million parameters that calls a Python tool; it is part of the package.

It answers arithmetic word problems: it calls `python` with an expression, and repeats the result. Whole loops
run with it as with a large model of Qwen's family, in seconds and without a download.
`examples/train_tiny.py` trained it; README.md in its folder lists its abilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

TINY = Path(__file__).parent / "tiny"
"""The model's folder, as Hugging Face's `from_pretrained` and vLLM take it."""


def load_tiny(
    device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, *, folder: Path = TINY
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Load the model, ready to generate, and its tokenizer.

    Args:
        device: Device of the model.
        dtype: Data type of its weights.
        folder: Folder of the model; `examples/train_tiny.py` writes others.
    """
    tokenizer = cast("Any", PreTrainedTokenizerFast).from_pretrained(
        folder, local_files_only=True, padding_side="left"
    )
    # TorchRL chooses a chat template by this name; a folder below /home/llama would get the wrong one.
    tokenizer.name_or_path = "torchrl-agentic-tiny"
    model = cast("Any", Qwen2ForCausalLM).from_pretrained(folder, local_files_only=True, dtype=dtype)
    return model.to(device).eval(), tokenizer
