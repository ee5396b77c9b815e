"""Tokenizers made on the spot: no download, the control tokens of real families, every byte a token."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def byte_tokenizer(name: str = "tiny-chatml", *, added: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte and ChatML's control tokens.

    name: TorchRL chooses its chat template by it; "qwen" in it selects that of Qwen, else ChatML's. added:
    tokens that are in the vocabulary without being control tokens, as Qwen's `<tool_call>`.
    """
    pieces = [END_OF_TEXT, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner: Any = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(list(added))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=END_OF_TEXT,
        eos_token=END,
        additional_special_tokens=[START],
        name_or_path=name,
    )
