"""A tokenizer for each chat template that trl ships, with the tokens that end its answers."""

import functools
import importlib.util
import re
from pathlib import Path

from helpers.model_families import QWEN_TOKENS, trl_template

from torchrl_agentic.testing import chat_tokenizer

NAMES = sorted(
    path.stem
    for path in (Path(importlib.util.find_spec("trl").origin).parent / "chat_templates").glob("*.jinja")
)
ENDS = (
    "<|return|>", "<|eot_id|>", "<|im_end|>", "<turn|>", "<end_of_turn>", "<|eot|>", "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|end|>", "</s>",
)  # fmt: skip
"""Tokens of which the first that a template mentions ends its answers; GLM's mentions none."""
STOPS = {
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|call|>",),
    "llama3_1": ("<|eom_id|>",),
    "llama3_2": ("<|eom_id|>",),
    **dict.fromkeys(
        ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"), ("<|tool_response>",)
    ),
}
"""Further tokens that end the answers of a model, those of its generation_config.json."""
_CONTROL = re.compile(
    r"<\|[A-Za-z_\"]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<[a-z]+_of_[a-z]+>|\[/?[A-Z_]{3,}\]|<sop>|\[gMASK\]|</s>"
    r"|<｜[^｜]+｜>"
)


def end_of(name):
    """Return the text of the token that ends the answers of a template."""
    return next((end for end in ENDS if end in trl_template(name)), "<|endofanswer|>")


def stops_of(name):
    """Return the texts of the other tokens that end the answers of a template."""
    return next((stops for known, stops in STOPS.items() if name in (known, f"{known}_training")), ())


def stop_ids_of(name):
    """Return the ids of `stops_of`."""
    return tokenizer_of(name).convert_tokens_to_ids(list(stops_of(name)))


@functools.cache
def tokenizer_of(name):
    """Return a tokenizer with a template, its control tokens and its end token."""
    source, end = trl_template(name), end_of(name)
    added = tuple(tag for tag in QWEN_TOKENS if tag in source)
    control = [one for one in dict.fromkeys(_CONTROL.findall(source)) if one not in (*added, end)]
    control = dict.fromkeys((*stops_of(name), *control, "<bos>"))
    tokenizer = chat_tokenizer(source, eos=end, control=tuple(control), added=added)
    tokenizer.bos_token = "<bos>"
    return tokenizer
