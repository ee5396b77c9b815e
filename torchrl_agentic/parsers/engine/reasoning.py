"""Whether the prompt of a model opens its thought, so that an answer begins inside of one."""

from __future__ import annotations

from typing import Any

_USER = {"role": "user", "content": "hello"}


def generation_prompt(tokenizer: Any, **told: Any) -> str:
    """Return what a chat template writes behind a conversation for the model to go on from.

    Args:
        tokenizer: One with a chat template.
        **told: What the template is told, such as `enable_thinking`.

    Raises:
        Exception: Whatever the template raises.
    """

    def write(**options: Any) -> str:
        return tokenizer.apply_chat_template([_USER], tokenize=False, **told, **options)

    before, with_prompt = write(add_generation_prompt=False), write(add_generation_prompt=True)
    return with_prompt[len(before) :] if with_prompt.startswith(before) else with_prompt


def is_open(text: str, think: tuple[str, str]) -> bool:
    """Whether the last thought in a text has not ended."""
    return text.rfind(think[0]) > text.rfind(think[1])


def opens_thought(tokenizer: Any, think: tuple[str, str], **told: Any) -> bool:
    """Return whether a tokenizer's chat template lets the model begin inside a thought.

    Args:
        tokenizer: Any; False if it has no chat template, or one that cannot write a plain question.
        think: What opens and what ends a thought.
        **told: What the template is told.
    """
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in told:
        return False
    try:
        return is_open(generation_prompt(tokenizer, **told), think)
    except Exception:
        return False
