"""Tool output that cannot be taken for markup: no control token or marker of the format stands in it."""

from __future__ import annotations

import re
from functools import lru_cache

_BREAK = "\u200b"
"""A zero-width space: people do not see it, and no tokenizer joins what it parts."""
# `<|im_start|>` and its like, of whichever family, with DeepSeek's wide bars.
_CONTROL = r"<[|\uff5c][^<>|\uff5c\s]{1,64}+[|\uff5c]>|</?s>|<(?:start|end)_of_turn>"


@lru_cache(maxsize=64)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    ours = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
    return re.compile(f"{ours}|{_CONTROL}" if ours else _CONTROL)


def defused(text: str, markers: tuple[str, ...]) -> str:
    """Give a text with a zero-width space behind the first character of each marker."""
    return _pattern(markers).sub(lambda match: f"{match[0][0]}{_BREAK}{match[0][1:]}", text)
