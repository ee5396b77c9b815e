"""Figures as words."""

from __future__ import annotations

NONE = "–"
"""What stands where nothing is known."""


def number(value: float | None, *, sign: bool = False) -> str:
    """Write a number with about three digits that count. sign: a plus, too."""
    if value is None:
        return NONE
    size = abs(value)
    digits = ".3f" if size < 1 else ".2f" if size < 100 else ",.0f" if size < 1e9 else ".2e"
    return format(value, ("+" if sign else "") + digits)


def count(value: float | None, *, sign: bool = False) -> str:
    """Write how many there are."""
    return NONE if value is None else format(value, f"{'+' if sign else ''},.0f")


def percent(value: float | None, *, sign: bool = False) -> str:
    """Write a share; a difference of shares in percentage points."""
    return NONE if value is None else f"{100 * value:+.1f}pp" if sign else f"{100 * value:.1f}%"


def milliseconds(value: float | None, *, sign: bool = False) -> str:
    """Write seconds as milliseconds."""
    if value is None:
        return NONE
    size = abs(value)
    digits = ".2f" if size < 0.001 else ".1f" if size < 0.01 else ",.0f" if size < 1e6 else ".2e"
    return format(1000 * value, ("+" if sign else "") + digits)
