"""Small tokenizers without a download, with the control tokens of real model families."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def byte_tokenizer(name: str = "tiny-chatml", *, added: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and ChatML's control tokens.

    Args:
        name: Name by which TorchRL chooses the chat template: Qwen's if it contains "qwen", else ChatML's.
        added: Tokens of the vocabulary that are not special tokens, such as Qwen's `<tool_call>`.
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


def chat_tokenizer(
    chat_template: str,
    *,
    eos: str,
    control: Sequence[str] = (),
    added: Sequence[str] = (),
    sentencepiece: bool = False,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a model's chat template and control tokens, and merges like a real one.

    Args:
        chat_template: The chat template.
        eos: Token that ends an answer.
        control: Additional special tokens.
        added: Tokens of the vocabulary that are not special tokens, such as Qwen's `<tool_call>`.
        sentencepiece: Keep spaces as `▁`, as Mistral and Llama 2 do, instead of splitting words into bytes,
            as Qwen and GPT do.
    """
    inner: Any = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if sentencepiece:
        alphabet = sorted({*map(chr, range(32, 127)), "▁", "\n"})
        inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([chat_template, *_SAMPLE], trainer)
    if sentencepiece:
        inner = _with_byte_fallback(inner)
    inner.add_special_tokens(list(dict.fromkeys([eos, *control])))
    inner.add_tokens([AddedToken(text, normalized=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=END_OF_TEXT,
        eos_token=eos,
        chat_template=chat_template,
        name_or_path="chat",
        clean_up_tokenization_spaces=False,
    )


def _with_byte_fallback(tokenizer: Any) -> Any:
    """Return a tokenizer that encodes characters outside the vocabulary as bytes."""
    data = json.loads(tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    for piece in ("<unk>", *(f"<0x{byte:02X}>" for byte in range(256))):
        vocabulary[piece] = len(vocabulary)
    data["model"] |= {"byte_fallback": True, "unk_token": "<unk>"}
    return Tokenizer.from_str(json.dumps(data))


# Words, numbers of up to three digits, signs, and runs of newlines and of spaces, as Qwen and Llama split.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SAMPLE = (
    "The tool said 42, so the answer is 42.\n\nThen it said 3.14159 and  two  spaces.\n\n\n",
    '{"name": "python", "arguments": {"code": "print(6 * 7)\\n"}}\n',
    "Traceback (most recent call last):\n    raise ValueError('no')\nValueError: no\n",
)
