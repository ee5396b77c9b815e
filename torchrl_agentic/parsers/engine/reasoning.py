"""Find out whether the prompt opens the model's reasoning, so that a message begins inside it."""

from __future__ import annotations

from typing import Any

QUESTION = {"role": "user", "content": "hello"}
"""A user message for rendering chat templates."""


def generation_prompt(tokenizer: Any, **template_kwargs: Any) -> str:
    """Return the text that a chat template appends to a conversation for the model to continue.

    Args:
        tokenizer: Tokenizer with a chat template.
        **template_kwargs: Options of the template, such as `enable_thinking`.

    Raises:
        Exception: Any exception of the template.
    """

    def write(**options: Any) -> str:
        return tokenizer.apply_chat_template([QUESTION], tokenize=False, **template_kwargs, **options)

    before, with_prompt = write(add_generation_prompt=False), write(add_generation_prompt=True)
    return with_prompt[len(before) :] if with_prompt.startswith(before) else with_prompt


def is_open(text: str, think: tuple[str, str]) -> bool:
    """Return whether the last reasoning in a text has not ended.

    Args:
        text: The text to search.
        think: Tags that open and end reasoning.
    """
    return text.rfind(think[0]) > text.rfind(think[1])


def opens_thought(tokenizer: Any, think: tuple[str, str], **template_kwargs: Any) -> bool:
    """Return whether the prompt of a tokenizer's chat template opens the model's reasoning.

    Args:
        tokenizer: The model's tokenizer; the result is False if its chat template is missing or fails.
        think: Tags that open and end reasoning.
        **template_kwargs: Options of the template.
    """
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in template_kwargs:
        return False
    try:
        return is_open(generation_prompt(tokenizer, **template_kwargs), think)
    except Exception:  # templates may raise anything; a failing one opens no reasoning
        return False
