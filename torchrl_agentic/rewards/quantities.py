"""Read numbers from texts as people and models write them: `read_quantity`, `find_quantities`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
"""Numbers with more characters, or larger powers of ten, are not read: exact arithmetic would be slow."""
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_EXPONENT = r"(?:[eE](?P<e>[+-]?\d+)|\s?(?:×|\*|\\times|\\cdot)\s?10\^\{?(?P<power>[+-]?\d+)\}?)"
# A sign counts only where no digit, letter or bracket precedes it: in "3-4" it is a minus between numbers.
_NUMBER = re.compile(
    rf"""(?<![\w.])(?P<sign>(?<![\w)\]}}])[-+]\s?[$€£¥]?)?
    (?:
        (?:(?P<whole>\d+)\s?)?\\[dt]?frac\{{\s*(?P<latex_top>[-+]?{_DECIMAL})\s*\}}
        \{{\s*(?P<latex_bottom>[-+]?{_DECIMAL})\s*\}}
      | (?P<mixed>\d+)\s(?P<mixed_top>\d+)/(?P<mixed_bottom>\d+)(?![\w./])
      | (?P<top>{_DECIMAL})\s?/\s?(?P<bottom>{_DECIMAL})(?![\w/])
      | 10\^\{{?(?P<tens>[+-]?\d+)\}}?
      | (?P<plain>{_DECIMAL}){_EXPONENT}?
    )
    (?P<percent>\s?\\?%|\s?percent\b)?""",
    re.VERBOSE,
)
_SIGNS = str.maketrans({"−": "-", "–": "-", "⁄": "/"})
_LATEX = re.compile(r"\\(?:left|right|displaystyle|[,;!:]|\$)|(?<=\d)\{,\}(?=\d)")
_GROUPED = re.compile(r"(?<![\w.,])\d{1,3}(?:[_'\u00a0\u202f\u2009]\d{3})+(?![\d])")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number in a text.

    Attributes:
        value: Its exact value; that of a percentage is 1/100 of the number that stands before the sign.
        is_percent: True if a percent sign follows it.
        text: How it is written.
    """

    value: Fraction
    is_percent: bool
    text: str


def find_quantities(text: str) -> list[Quantity]:
    r"""Return the numbers in a text, in order.

    It reads signs, decimals, thousands separated by commas, `_`, `'` or narrow spaces, fractions (`3/4`,
    `1 1/2`, `\frac{3}{4}`), percentages, and powers of ten (`1e6`, `1.2 × 10^6`). A comma never separates
    decimals. Numbers with more than `MAX_DIGITS` characters, and fractions with the denominator 0, are left
    out.

    Args:
        text: The text.
    """
    return [read for found in _matches(text) if (read := _read(found)) is not None]


def read_quantity(text: str) -> Quantity | None:
    """Return the last number of a text; None if it has none.

    Args:
        text: The text.
    """
    found = reversed(list(_matches(text)))
    return next((read for one in found if (read := _read(one)) is not None), None)


def _matches(text: str) -> Iterator[re.Match[str]]:
    text = _LATEX.sub(lambda found: "," if found[0] == "{,}" else "", text.translate(_SIGNS))
    text = _GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    return _NUMBER.finditer(text)


def _read(found: re.Match[str]) -> Quantity | None:
    if len(found[0]) > MAX_DIGITS:
        return None
    try:
        value = _value(found)
    except ZeroDivisionError:
        return None
    if value is None:
        return None
    if (found["sign"] or "").startswith("-"):
        value = -value
    is_percent = found["percent"] is not None
    return Quantity(value / 100 if is_percent else value, is_percent, found[0].strip())


def _value(found: re.Match[str]) -> Fraction | None:
    if found["latex_top"]:
        return int(found["whole"] or 0) + _decimal(found["latex_top"]) / _decimal(found["latex_bottom"])
    if found["mixed"]:
        return int(found["mixed"]) + Fraction(int(found["mixed_top"]), int(found["mixed_bottom"]))
    if found["top"]:
        return _decimal(found["top"]) / _decimal(found["bottom"])
    if found["tens"]:
        exponent = int(found["tens"])
        return None if abs(exponent) > MAX_DIGITS else Fraction(10) ** exponent
    exponent = int(found["e"] or found["power"] or 0)
    return None if abs(exponent) > MAX_DIGITS else _decimal(found["plain"]) * Fraction(10) ** exponent


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
