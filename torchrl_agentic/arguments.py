"""Checks of public arguments, so that a wrong type or value is told in words of ours."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def check_seconds(name: str, value: Any, *, none: str = "no bound") -> None:
    """Raise if `value` is no number of seconds above 0.

    Args:
        name: The argument's name.
        value: The argument; None is accepted.
        none: What None means.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not above 0.
    """
    check_above_zero(name, value, " seconds", none=none)


def check_above_zero(name: str, value: Any, unit: str = "", *, none: str = "no limit") -> None:
    """Raise if `value` is no number above 0.

    Args:
        name: The argument's name.
        value: The argument; None is accepted.
        unit: What the number counts, for the message.
        none: What None means.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not above 0, or NaN.
    """
    if value is None:
        return
    if not _is_number(value):
        raise TypeError(f"{name} is a number above 0{unit}, or None for {none}; got {_met(value)}")
    if not value > 0:  # so that NaN, of which every comparison is false, is refused too
        raise ValueError(f"{name} must be above 0{unit}, or None for {none}; got {value}")


def check_count(name: str, value: Any, *, optional: bool = True) -> None:
    """Raise if `value` is no whole number of 1 or more.

    Args:
        name: The argument's name.
        value: The argument. A float that is whole is accepted.
        optional: Whether None is accepted.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is below 1 or not whole.
    """
    if optional and value is None:
        return
    or_none = ", or None for no limit" if optional else ""
    if not _is_number(value):
        raise TypeError(f"{name} is a whole number of 1 or more{or_none}; got {_met(value)}")
    if not (1 <= value < math.inf and value % 1 == 0):
        raise ValueError(f"{name} must be 1 or more, and whole{or_none}; got {value}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _met(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
