"""Find out whether the prompt opens a thought, so that an answer begins inside one."""

from __future__ import annotations

from typing import Any

QUESTION = {"role": "user", "content": "hello"}
"""The message with which chat templates are tried."""


def generation_prompt(tokenizer: Any, **template_kwargs: Any) -> str:
    """Return the text that a chat template appends to a conversation for the model to continue.

    Args:
        tokenizer: One with a chat template.
        **template_kwargs: Options of the template, such as `enable_thinking`.

    Raises:
        Exception: Whatever the template raises.
    """

    def write(**options: Any) -> str:
        return tokenizer.apply_chat_template([QUESTION], tokenize=False, **template_kwargs, **options)

    before, with_prompt = write(add_generation_prompt=False), write(add_generation_prompt=True)
    return with_prompt[len(before) :] if with_prompt.startswith(before) else with_prompt


def is_open(text: str, think: tuple[str, str]) -> bool:
    """Return whether the last thought in a text has not ended."""
    return text.rfind(think[0]) > text.rfind(think[1])


def opens_thought(tokenizer: Any, think: tuple[str, str], **template_kwargs: Any) -> bool:
    """Return whether a tokenizer's chat template lets the model begin inside a thought.

    Args:
        tokenizer: The model's; the result is False if its chat template is missing or fails.
        think: The tags that open and end a thought.
        **template_kwargs: Options of the template.
    """
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in template_kwargs:
        return False
    try:
        return is_open(generation_prompt(tokenizer, **template_kwargs), think)
    except Exception:  # templates raise what they like, and one that fails opens nothing
        return False
