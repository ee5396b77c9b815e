"""Training data of `train_tiny.py`: right and wrong conversations about word problems, with a Python tool."""

from __future__ import annotations

import json
import linecache
import random
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchrl_agentic.testing.problems import SYSTEM, Problem, problems, value_of

SYSTEMS = (
    *[SYSTEM] * 3, "You are a helpful assistant.", "Use the tool.", "You may call tools.",
    "You solve problems.", "Be brief.", "", None,
)  # fmt: skip
"""System messages; None means that there is no system message."""
NO_TOOL = "I need a tool to compute this."
"""The answer if no tool is offered."""
WITHOUT_TOOLS, FAILING = 0.05, 0.2
"""Share of conversations without tools, and share of the others in which a call fails."""
WRONG_CALL, WRONG_END = 0.45, 0.15
"""Shares of a weak model's conversations with a wrong expression, and with an end that ignores the result."""

BLAMELESS = ("TimeoutError: stopped after 30.0 s", "MemoryError", "Error: try again")
"""Errors that the code did not cause."""

ChatMessage = dict[str, str]


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation.

    Attributes:
        messages: Its messages.
        learnt: True for each assistant message that is learnt.
        with_tools: True if the prompt offers the tool.
    """

    messages: list[ChatMessage]
    learnt: list[bool]
    with_tools: bool = True


def lessons(seed: int, *, weak: bool = False) -> Iterator[Lesson]:
    """Yield an endless series of conversations about problems of the split "train"."""
    rng = random.Random(seed)
    for problem in problems(seed, "train"):
        if rng.random() < WITHOUT_TOOLS:
            chat = [*_opening(problem, rng), {"role": "assistant", "content": NO_TOOL}]
            yield Lesson(chat, [True], with_tools=False)
        else:
            yield lesson(problem, rng, weak=weak)


def exercises(seed: int) -> Iterator[Lesson]:
    """Yield an endless series of conversations that repeat numbers: copying helps to learn the rest."""
    rng = random.Random(seed)
    while True:
        words = [str(rng.randrange(10 ** rng.randint(1, 5))) for _ in range(rng.randint(4, 10))]
        text = words[0] + "".join(f" {rng.choice(('', '+ ', '- ', '* ', '// '))}{word}" for word in words[1:])
        chat = [{"role": "system", "content": "Repeat."}, {"role": "user", "content": text}]
        yield Lesson([*chat, {"role": "assistant", "content": text}], [True], with_tools=False)


def lesson(problem: Problem, rng: random.Random, *, weak: bool = False) -> Lesson:
    """Return a conversation that solves a problem, or a weak one with possible mistakes."""
    turns, results = spoilt(problem, rng) if weak else (problem.turns, problem.results)
    chat = _opening(problem, rng)
    learnt: list[bool] = []
    fails = rng.randrange(len(turns)) if rng.random() < FAILING else None
    for turn, (codes, shown) in enumerate(zip(turns, results, strict=True)):
        if turn == fails:
            code, error, ours = failure(rng.choice(codes), rng)
            chat.append({"role": "assistant", "content": calls([code])})
            chat.append({"role": "tool", "content": error})
            learnt.append(not ours and len(codes) == 1)
        chat.append({"role": "assistant", "content": calls(codes)})
        chat += ({"role": "tool", "content": result} for result in shown)
        learnt.append(True)
    answer = " and ".join(results[-1])
    if weak and rng.random() < WRONG_END:
        answer = rng.choice(re.findall(r"\d+", problem.query))
    chat.append({"role": "assistant", "content": f"The answer is {answer}."})
    return Lesson(chat, [*learnt, True])


def _opening(problem: Problem, rng: random.Random) -> list[ChatMessage]:
    system = rng.choice(SYSTEMS)
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": problem.query}]


def calls(codes: Sequence[str]) -> str:
    """Return calls as Hermes and Qwen models write them."""
    blocks = (json.dumps({"name": "python", "arguments": {"code": code}}) for code in codes)
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def failure(code: str, rng: random.Random) -> tuple[str, str, bool]:
    """Return the code and the result of a failing call, and whether the code caused the failure."""
    if rng.random() < 0.3:
        return code, rng.choice(BLAMELESS), False
    broken = broken_code(code, rng)
    cell = f"<cell {rng.randint(1, 9)}>"
    linecache.cache[cell] = (len(broken), None, [f"{broken}\n"], cell)
    try:
        exec(compile(broken, cell, "exec"), {})
    except SyntaxError as error:
        return broken, "".join(traceback.format_exception_only(error)).rstrip(), True
    except Exception as error:
        own = error.__traceback__
        return broken, "".join(traceback.format_exception(None, error, own and own.tb_next)).rstrip(), True
    raise AssertionError(f"{broken!r} was meant to fail")


def broken_code(code: str, rng: random.Random) -> str:
    """Return a variant of an expression that raises."""
    ways = (
        re.sub(r"\S+$", "x", code),
        re.sub(r"[-+*/]+ \S+$", "// 0", code),
        re.sub(r" ([-+*]) ", r" \1 * ", code, count=1) + " +",
        f"({code}",
        re.sub(r"\S+$", "", code).rstrip(),
    )
    return rng.choice(ways)


def spoilt(problem: Problem, rng: random.Random) -> tuple[Any, Any]:
    """Return turns and results; with probability WRONG_CALL, with another operator or another order."""
    if rng.random() >= WRONG_CALL:
        return problem.turns, problem.results
    turns, results, old = [], [], []
    for codes, shown in zip(problem.turns, problem.results, strict=True):
        new = [spoilt_code(code, rng) for code in codes]
        if old:  # the second step begins with the result of the first
            new = [re.sub(rf"\b{before}\b", after, code) for code in new for before, after in old]
        try:
            values = [str(value_of(code)) for code in new]
        except ZeroDivisionError:
            new, values = list(codes), list(shown)
        old = [(shown[0], values[0])]
        turns.append(new)
        results.append(values)
    return turns, results


def spoilt_code(code: str, rng: random.Random) -> str:
    """Return another expression with the same numbers."""
    if rng.random() < 0.3:
        left, sign, right = re.match(r"(.+) (\S+) (\S+)$", code).groups()  # type: ignore[union-attr]
        if "(" not in left or ")" in left:
            return f"{right} {sign} {left}"
    signs = re.findall(r" (\S+) ", code)
    at = rng.randrange(len(signs))
    signs[at] = rng.choice([sign for sign in ("+", "-", "*", "//") if sign != signs[at]])
    return re.sub(r" (?:\+|-|\*|//) ", lambda _: f" {signs.pop(0)} ", code)
