"""What an answer is worth: numbers are compared as numbers, so that 220000.0 is 220000."""

from __future__ import annotations

import re
from decimal import Decimal

# A sign counts only where no digit or letter precedes it: in "3-4" it is a minus between two numbers.
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)?|\d+(?:\.\d+)?")


def numbers(text: str) -> list[Decimal]:
    """Give the numbers of a text, in their order; commas may part thousands."""
    return [Decimal(found.replace(",", "")) for found in _NUMBER.findall(text)]


def answer_reward(text: str, answer: str) -> float:
    """Give 1.0 for a right answer, else 0.0.

    Where the expected answer has numbers, the last ones of the text must be these; else it must occur in the
    text, whatever the case. Reasoning up to `</think>` is left out.
    """
    text = text.rpartition("</think>")[2]
    wanted = numbers(answer)
    if wanted:
        return float(numbers(text)[-len(wanted) :] == wanted)
    return float(answer.strip().casefold() in text.casefold())
