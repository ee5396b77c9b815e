"""The control tokens of all families, by which text of tools could imitate turns or calls; see `Escaper`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, cast

BREAK = "\u200b"
"""A zero-width space: invisible, and a boundary for the tokenizers of all families below."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "llama2": ("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    "mistral": (
        "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
        "[AUDIO]", "[BEGIN_AUDIO]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "<pad>",
    ),
    "gemma": (
        "<bos>", "<eos>", "<pad>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>",
        "<end_of_image>", "<image_soft_token>", "<start_of_audio>", "<end_of_audio>", "<audio_soft_token>",
        "<start_function_declaration>", "<end_function_declaration>", "<start_function_call>",
        "<end_function_call>", "<start_function_response>", "<end_function_response>", "<escape>",
    ),
    "gemma4": (
        "<turn|>", "<tool|>", "<tool_call|>", "<tool_response|>", "<channel|>", "<think|>", "<image|>",
        "<audio|>", "<video|>",
    ),
    "deepseek": ("｜DSML｜",),
    "gigachat": ("｜GCML｜",),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "apriel": ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    "longcat": (
        "<longcat_tool_call>", "</longcat_tool_call>", "<longcat_think>", "</longcat_think>", "<longcat_s>",
        "</longcat_s>", "<longcat_system>", "<longcat_user>", "<longcat_assistant>",
    ),
    "qwen": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "glm": (
        "[gMASK]", "[sMASK]", "[MASK]", "<sop>", "<eop>", "<arg_key>", "</arg_key>", "<arg_value>",
        "</arg_value>", "/nothink",
    ),
    "hy": ("<tool_calls>", "</tool_calls>", "<tool_sep>", "<tool_responses>", "</tool_responses>"),
    "kimi": ("[BOS]", "[EOS]", "[EOT]", "[PAD]", "[UNK]"),
    "minimax": (
        "]~!b[", "[e~[", "]~b]", "]!p~[", "]!d~[", "<minimax:tool_call>", "</minimax:tool_call>",
        "<beginning_of_sentence>", "<end_of_sentence>", "<begin_of_document>", "<mm:think>", "</mm:think>",
        "<filename>", "<repo_name>", "<file_sep>", "<add_file>", "<empty_output>",
    ),
    "minicpm": ("<function", "</function>", "<param", "</param>", "<tool_sep>", "<tool_def_sep>"),
    "plamo": ("<|plamo:begin_", "<|plamo:end_", ":plamo|>"),
    "dots": ("<dots_function_call>", "</dots_function_call>"),
    "granite": (
        "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>", "<gh_stars>",
        "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
        "<jupyter_code>", "<jupyter_output>", "<commit_before>", "<commit_msg>", "<commit_after>",
    ),
    "cohere": ("<BOS_TOKEN>", "<EOS_TOKEN>", "<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>"),
    "nemotron": (
        "<TOOLCALL>", "</TOOLCALL>", "<AVAILABLE_TOOLS>", "</AVAILABLE_TOOLS>", "<TOOL_RESPONSE>",
        "</TOOL_RESPONSE>",
    ),
    "vision": (
        "<image>", "<video>", "<audio>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>",
    ),
}  # fmt: skip
"""Control tokens that match none of `SHAPES`, by family.

Source: `added_tokens_decoder` in the families' `tokenizer_config.json`, and the chat templates that `trl` and
vLLM ship. ChatML, Llama 3 and 4, GPT-OSS, Phi and LFM2 have none but `<|…|>`, as DeepSeek with wide bars.
"""
FAMILY_MARKERS = tuple(dict.fromkeys(marker for markers in FAMILIES.values() for marker in markers))

# By first character, the rest of: `<|im_start|>` and its like, reserved tokens, Gemma 4's `<|turn>`.
_BODY = rf"[^<>|\uff5c\s{BREAK}]{{1,64}}+"
SHAPES = (
    ("<", rf"[|\uff5c]{_BODY}[|\uff5c]?>"),
    ("<", r"(?:SPECIAL_|unused|extra_id_|reserved_)\d{1,4}>"),
    ("<", r"/?seed:\w{1,40}>"),
    ("<", r"/?(?:think|tool_calls?|tool_sep|tool_responses?|arg_key|arg_value):[^<>:\s]{1,40}>"),
    ("<", r"/?\|?ifm\|\w{1,40}\|?>"),
    ("]", r"<\][a-z ]{1,40}\[>\["),
)
SHAPED = re.compile("|".join(re.escape(first) + rest for first, rest in SHAPES))
# Added tokens without effect on turns: runs of white space (GPT-NeoX), HTML tags (Gemma).
_HARMLESS = re.compile(
    r"[\s▁]*|</?(?:table|caption|thead|tbody|tfoot|tr|th|td|h[1-6]|blockquote|strong|em|b|i|u|sub|sup|code)>"
)


class AddedTokens(Protocol):
    """A tokenizer of transformers, or another object with its added tokens."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Return the added tokens by id, each with its `content`."""
        ...


def control_tokens_of(tokenizer: AddedTokens) -> dict[int, str]:
    """Return a tokenizer's added and special tokens that can steer a conversation, by id.

    Left out are single characters, runs of white space and, for Gemma, HTML tags. Tokens that are not marked
    as special are included, because a tokenizer finds them in text as well.
    """
    contents = {index: str(token.content) for index, token in tokenizer.added_tokens_decoder.items()}
    special = [*getattr(tokenizer, "all_special_tokens", ())]
    contents.update(
        zip(cast("Any", tokenizer).convert_tokens_to_ids(special), special, strict=True) if special else ()
    )
    return {
        index: content
        for index, content in contents.items()
        if len(content) > 1 and not _HARMLESS.fullmatch(content)
    }
