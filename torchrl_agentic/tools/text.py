"""Cutting text that is too long for a prompt."""

from __future__ import annotations


def middle_out(text: str, limit: int) -> str:
    """Keep head and tail of a text of more than `limit` characters; say in between how much is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… [{len(text) - 2 * half} characters omitted] …\n{text[len(text) - half :]}"
