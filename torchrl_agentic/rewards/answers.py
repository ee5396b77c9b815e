"""Compare the last message of the model with the right answer."""

from __future__ import annotations

from torchrl_agentic.tools.verl.graders import numbers


def answer_reward(text: str, answer: str) -> float:
    """Return 1.0 for a correct answer, else 0.0.

    If the expected answer has numbers, the last numbers of the text must equal them as numbers, so that
    220000.0 is 220000. Otherwise the text must contain the answer, in upper or lower case. Reasoning up to
    `</think>` does not count.

    Args:
        text: The last message of the model.
        answer: The expected answer.
    """
    text = text.rpartition("</think>")[2]
    wanted = numbers(answer)
    if wanted:
        return float(numbers(text)[-len(wanted) :] == wanted)
    return float(answer.strip().casefold() in text.casefold())
