"""Word problems for the tiny model: the question, the calls of a good model, the result.

Each problem belongs to one of two splits by a hash of its template and its numbers, so that no problem of the
test split was trained on under another name.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

SYSTEM = "You solve problems with a Python tool."
"""System message of most of the tiny model's training examples."""

Split = Literal["train", "test"]
Kind = Literal["one", "two", "pair"]
Nested = tuple[tuple[str, ...], ...]
"""Strings by message."""

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Umar", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "books", "boxes", "buttons", "cards", "chairs", "coins", "cookies", "cups", "eggs", "flowers",
    "keys", "lamps", "marbles", "nuts", "pears", "pencils", "pens", "plates", "shells", "spoons", "stamps",
    "stones", "toys",
)  # fmt: skip

ONE = (
    ("What is {a} + {b}?", "{a} + {b}"),
    ("What is {a} - {b}?", "{a} - {b}"),
    ("What is {a} * {b}?", "{a} * {b}"),
    ("{N} has {a} {t} and gets {b} more. How many {t} does {N} have now?", "{a} + {b}"),
    ("{N} had {a} {t} and gave {b} to {M}. How many {t} does {N} have left?", "{a} - {b}"),
    ("{N} takes {a} {t} out of a box with {b}. How many {t} stay in the box?", "{b} - {a}"),
    ("There are {a} bags with {b} {t} each. How many {t} are there?", "{a} * {b}"),
    ("{N} packs {a} {t} into bags of {b}. How many bags are full?", "{a} // {b}"),
    ("{a} children share {b} {t}. How many {t} does each child get?", "{b} // {a}"),
    ("{N} has {a} {t} and buys {b} bags of {c}. How many {t} does {N} have now?", "{a} + {b} * {c}"),
    ("{N} had {a} {t}, lost {b} and found {c}. How many {t} does {N} have now?", "{a} - {b} + {c}"),
    ("{N} fills {a} shelves with {b} {t} each, and {c} fall down. How many {t} stay?", "{a} * {b} - {c}"),
    ("{N} had {a} {t} and gave {b} to each of {c} friends. How many {t} are left?", "{a} - {b} * {c}"),
    ("{N} found {a} {t}, {M} found {b}, and {c} were there before. How many is that?", "{a} + {b} + {c}"),
    ("{N} puts {a} {t} and {b} {s} into each of {c} bags. How many things is that?", "({a} + {b}) * {c}"),
    ("{N} has {a} {t} and {M} has {b}. Together they fill boxes of {c}. How many boxes are full?",
     "({a} + {b}) // {c}"),
    ("{N} has {a} bags of {b} {t} and {c} bags of {d}. How many {t} is that?", "{a} * {b} + {c} * {d}"),
)  # fmt: skip
TWO = (
    ("First {N} buys {a} bags of {b} {t}. Then {c} children share them. How many {t} does each child get?",
     "{a} * {b}", "{r} // {c}"),
    ("First {N} has {a} {t} and finds {b}. Then {N} sells {c}. How many {t} are left?",
     "{a} + {b}", "{r} - {c}"),
    ("First {N} packs {a} {t} into bags of {b}. Then {N} sells each bag for {c} coins. How many coins?",
     "{a} // {b}", "{r} * {c}"),
    ("First {N} loses {b} of {a} {t}. Then {M} brings {c}. How many {t} are there?",
     "{a} - {b}", "{r} + {c}"),
)  # fmt: skip
PAIR = (
    ("{N} has {a} bags of {b} {t} and {M} has {c} bags of {d}. How many {t} does each of them have?",
     "{a} * {b}", "{c} * {d}"),
    ("{N} had {a} {t} and got {b}. {M} had {c} and lost {d}. How many {t} does each of them have?",
     "{a} + {b}", "{c} - {d}"),
    ("What is {a} + {b}, and what is {c} * {d}?", "{a} + {b}", "{c} * {d}"),
)  # fmt: skip
TEMPLATES: dict[Kind, tuple[tuple[str, ...], ...]] = {"one": ONE, "two": TWO, "pair": PAIR}
SHARES: dict[Kind, float] = {"one": 0.75, "two": 0.15, "pair": 0.10}
TEST_SHARE = 0.1
LARGEST = 99_999
"""Upper bound on results; the lower bound is 1."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem and its solution.

    Attributes:
        query: The question.
        turns: Code of each tool call, by message.
        results: Result of each call, in the same shape.
        kind: "one" call, "two" calls in two messages, or a "pair" of calls in one message.
    """

    query: str
    turns: Nested
    results: Nested
    kind: Kind

    @property
    def answer(self) -> str:
        """Return the last result, or both results of two calls in one message: "84 and 72"."""
        return " and ".join(self.results[-1])


def problems(seed: int, split: Split) -> Iterator[Problem]:
    """Yield problems without end, the same ones for the same seed and split.

    Args:
        seed: Seed of the random numbers.
        split: "train" or "test".
    """
    rng = random.Random(f"{split} {seed}")
    while True:
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        yield _problem(kind, split, rng)


def split_of(template: str, numbers: dict[str, int]) -> Split:
    """Return the split that a template with these numbers belongs to.

    Args:
        template: The question, with names of numbers in braces.
        numbers: Name → number.
    """
    digest = hashlib.sha256(f"{template} {sorted(numbers.items())}".encode()).digest()
    return "test" if digest[0] < 256 * TEST_SHARE else "train"


def value_of(code: str) -> int:
    """Return the value of an expression of a problem."""
    return eval(code, {"__builtins__": {}})


def _problem(kind: Kind, split: Split, rng: random.Random) -> Problem:
    while True:
        query, *codes = rng.choice(TEMPLATES[kind])
        numbers = {key: _number(rng) for key in sorted(set(re.findall(r"\{([a-d])\}", query)))}
        solved = _solved(kind, codes, numbers) if split_of(query, numbers) == split else None
        if solved is not None:
            name, other = rng.sample(NAMES, 2)
            thing, second = rng.sample(THINGS, 2)
            asked = query.format(N=name, M=other, t=thing, s=second, **numbers)
            return Problem(asked, *solved, kind=kind)


def _number(rng: random.Random) -> int:
    (digits,) = rng.choices((1, 2, 3), (2, 5, 3))
    return rng.randint(max(2, 10 ** (digits - 1)), 10**digits - 1)


def _solved(kind: Kind, codes: list[str], numbers: dict[str, int]) -> tuple[Nested, Nested] | None:
    """Return turns and results, or None if a result is out of bounds."""
    turns: list[str] = []
    results: list[int] = []
    for code in codes:
        turns.append(code.format(**numbers, r=results[-1] if results else ""))
        results.append(value_of(turns[-1]))
        if not 1 <= results[-1] <= LARGEST:
            return None
    shown = [str(result) for result in results]
    if kind == "two":
        return tuple((code,) for code in turns), tuple((result,) for result in shown)
    return (tuple(turns),), (tuple(shown),)
