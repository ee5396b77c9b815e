"""Escape control tokens in text of tools, users and servers, so that it cannot imitate turns or calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Protocol, cast

from torchrl_agentic.messages import JSON

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
"""Control tokens that match none of `_SHAPES`, by family.

Source: `added_tokens_decoder` in the families' `tokenizer_config.json`, and the chat templates that `trl` and
vLLM ship. ChatML, Llama 3 and 4, GPT-OSS, Phi and LFM2 have none but `<|…|>`, as DeepSeek with wide bars.
"""
FAMILY_MARKERS = tuple(dict.fromkeys(marker for markers in FAMILIES.values() for marker in markers))

# By first character, the rest of: `<|im_start|>` and its like, reserved tokens, Gemma 4's `<|turn>`.
_BODY = rf"[^<>|\uff5c\s{BREAK}]{{1,64}}+"
_SHAPES = (
    ("<", rf"[|\uff5c]{_BODY}[|\uff5c]?>"),
    ("<", r"(?:SPECIAL_|unused|extra_id_|reserved_)\d{1,4}>"),
    ("<", r"/?seed:\w{1,40}>"),
    ("<", r"/?(?:think|tool_calls?|tool_sep|tool_responses?|arg_key|arg_value):[^<>:\s]{1,40}>"),
    ("<", r"/?\|?ifm\|\w{1,40}\|?>"),
    ("]", r"<\][a-z ]{1,40}\[>\["),
)
_SHAPED = re.compile("|".join(re.escape(first) + rest for first, rest in _SHAPES))
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


def escape_control_tokens(text: str, markers: Iterable[str] = FAMILY_MARKERS) -> str:
    """Return the text with a zero-width space after the first character of each marker.

    The text stays readable, but no tokenizer reads a control token out of it. Text without markers and text
    that is already escaped are returned unchanged.

    Args:
        text: Text of a tool, a page or a server.
        markers: Strings to escape: `control_tokens_of(tokenizer).values()` if the tokenizer is known. Strings
            with the shape of a control token, such as `<|…|>`, are always escaped.
    """
    return escaper(tuple(markers)).escape(text)


class Escaper:
    """A compiled `escape_control_tokens` for many texts.

    Args:
        markers: Strings to escape.
    """

    def __init__(self, markers: Iterable[str] = FAMILY_MARKERS) -> None:
        self.markers = tuple(dict.fromkeys(marker for marker in markers if marker))
        patterns: dict[str, tuple[str, str]] = {}
        others = [marker for marker in self.markers if not _SHAPED.fullmatch(marker)]
        for first in dict.fromkeys([*(first for first, _ in _SHAPES), *(marker[0] for marker in others)]):
            shapes = [shape for one, shape in _SHAPES if one == first]
            rests = [marker[1:] for marker in others if marker[0] == first]
            # A marker of one character would be found again before the break.
            rest = f"(?!{BREAK})" if "" in rests else f"(?:{'|'.join([*shapes, *_branches(rests)])})"
            if not shapes and "" not in rests:  # brackets are frequent; test the next character first
                rest = f"(?=[{''.join(sorted({re.escape(text[0]) for text in rests}))}]){rest}"
            patterns[first] = re.escape(first), rest
        # One search per first character: a pattern that begins with a literal skips to it at once.
        self._found = tuple((first, re.compile(head + rest)) for first, (head, rest) in patterns.items())
        # Match only the first character, so that overlapping markers are all found.
        self._firsts = re.compile("|".join(f"{head}(?={rest})" for head, rest in patterns.values()))

    def escape(self, text: str) -> str:
        """Return the text with its markers escaped."""
        for first, pattern in self._found:
            if first in text and pattern.search(text) is not None:
                return self._firsts.sub(_broken, text)
        return text

    def together(self, texts: Sequence[str]) -> list[str]:
        """Escape texts that may be joined without a gap, as they are or stripped of white space."""
        made = [self.escape(text) for text in texts]
        if any(self.escape(joined) != joined for joined in ("".join(made), "".join(map(str.strip, made)))):
            made[:-1] = [f"{text}{BREAK}" for text in made[:-1]]
        return made

    def json(self, value: JSON) -> JSON:
        """Return a JSON value with the markers in its strings and keys escaped."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            fields = cast("Mapping[str, JSON]", value)
            return {self.escape(key): self.json(item) for key, item in fields.items()}
        if isinstance(value, list | tuple):
            return [self.json(item) for item in cast("Sequence[JSON]", value)]
        return value


escaper = lru_cache(maxsize=64)(Escaper)
"""Return the cached escaper of a tuple of markers."""


def _branches(texts: Sequence[str]) -> list[str]:
    """Write texts as alternatives of a pattern that reads each character once."""
    if "" in texts:
        return [""]
    groups = [(first, [*group]) for first, group in groupby(sorted(texts), key=lambda text: text[0])]
    return [
        f"{re.escape(first)}(?:{'|'.join(_branches([text[1:] for text in group]))})"
        for first, group in groups
    ]


def _broken(match: re.Match[str]) -> str:
    return f"{match[0]}{BREAK}"
