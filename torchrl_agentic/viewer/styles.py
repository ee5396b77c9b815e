"""The colours of the viewer, by what a text is."""

from __future__ import annotations

import functools

from rich.style import Style

COLOURS = {
    "system": "#9aa0b0",
    "user": "#5cc8e8",
    "input": "#5cc8e8",
    "assistant": "#8bd17c",
    "output": "#8bd17c",
    "tool": "#e5b95c",
    "other": "#c8a2e8",
    "call": "#e5b95c",
    "result": "#d8cfae",
    "error": "#f07070",
    "think": "italic #8a93a8",
    "value": "#d5d8e0",
    "key": "#5cc8e8",
    "name": "bold #ffffff",
    "rule": "#5c6580",
    "faint": "#7f879c",
    "more": "italic #b0a8e0",
    "score": "#d5d8e0",
    "same": "#7f879c",
    "differs": "bold #e5b95c",
    "match": "#000000 on #c8b040",
    "focus": "bold #000000 on #ff9a3c",
    "token sampled": "#dff5d8 on #24502c",
    "token prompt": "#b8d8e8 on #1c3444",
    "token boundary": "#b0b0c0 on #30303c",
    "token call": "#f0dcb0 on #50401c",
}
"""By the name of a style; " title" behind it makes it bold."""
CURSOR = Style(bgcolor="#2c3a5c")


@functools.cache
def style(name: str) -> Style:
    """Give a style by its name."""
    found = Style.parse(COLOURS.get(name.removesuffix(" title"), ""))
    return found + Style(bold=True) if name.endswith(" title") else found
