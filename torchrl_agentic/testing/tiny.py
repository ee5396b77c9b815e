"""The tiny model of `rollout.tiny_model`, and questions that it answers."""

from __future__ import annotations

import itertools
from typing import TypedDict

from torchrl_agentic.rollout.tiny_model import TINY, load_tiny
from torchrl_agentic.testing.problems import Split, problems

__all__ = ["TINY", "Question", "load_tiny", "tiny_questions"]


class Question(TypedDict):
    """A row of a data set. The model's last message is right if it is `f"The answer is {answer}."`."""

    query: str
    answer: str


def tiny_questions(n: int, seed: int = 0, split: Split = "test") -> list[Question]:
    """Return word problems; the model has not seen those of the split "test", not even with other names.

    About three quarters need one call, the others two, one after the other or in one message. The answer to
    two calls in one message has the form "84 and 72".

    Args:
        n: Number of problems.
        seed: Seed of the random numbers.
        split: "train" or "test".
    """
    made = itertools.islice(problems(seed, split), n)
    return [Question(query=problem.query, answer=problem.answer) for problem in made]
