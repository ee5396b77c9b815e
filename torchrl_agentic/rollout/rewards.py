"""What an answer is worth: numbers are compared as numbers, so that 220000.0 is 220000."""

from __future__ import annotations

from torchrl_agentic.tools.answers import numbers


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
