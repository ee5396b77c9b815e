"""Compare the last message of the model with the right answer."""

from __future__ import annotations

import re

from torchrl_agentic.rewards.answer_scorers import find_words, is_letter, marked_answer, normalized
from torchrl_agentic.tools.verl.graders import numbers

_LETTER = re.compile(r"(?<!\w)(?<!\w['’])[^\W\d_](?!\w|['’]\w|[+#])")
# "A" and "I" in front of a word in lower case are words themselves: "A bird", "I think", but "A is right".
_WORD = re.compile(r"[AaI] +(?!(?:is|was|because|since|as)\b)[a-z]")
_REFUSED = re.compile(r"\b(?:not|or|nor|either|neither)\W+(?:(?:an?|the)\W+)?$", re.IGNORECASE)
_ALTERNATIVES = re.compile(r"(?:,[^,.;:!?\n]{1,40})*,?\s+or\b|\s*/\s*\w", re.IGNORECASE)
_BEFORE, _BEHIND = 40, 200
"""Characters around an answer that may tell that it is refused, or one of several."""


def answer_reward(text: str, answer: str) -> float:
    r"""Return 1.0 for a correct answer, else 0.0.

    The answer of a text is what it marks by `\boxed{…}`, `<answer>` or `####`. If the expected answer has
    numbers, the last numbers must equal them as numbers, so that 220000.0 is 220000. If it is a single
    letter, the last letter that stands alone must equal it, in the same case. Any other expected answer must
    occur as whole words, in upper or lower case: at the end of what is marked, or anywhere in a text that
    marks nothing, where "not Paris" and "Paris or Rome" do not count. Reasoning up to `</think>` does not
    count.

    A text without a mark can still list answers. Ask the model to mark its answer, and use
    `exact_match(extract=marked_answer)`, if it is trained on answers that are not numbers.

    Args:
        text: The last message of the model.
        answer: The expected answer.

    Raises:
        ValueError: If the expected answer is empty.
    """
    if not (answer := answer.strip()):
        raise ValueError("the right answer is empty, and any text would have it: set Task.answer")
    text = text.rpartition("</think>")[2]
    marked = marked_answer(text)
    said = text if marked is None else marked
    if wanted := numbers(answer):
        return float(numbers(said)[-len(wanted) :] == wanted)
    if is_letter(answer):
        return float(_last_letter(said, like=answer) == answer)
    right, found = normalized(answer), normalized(said)
    ends = [start + len(right) for start in find_words(found, right) if not _is_refused(found, start)]
    if marked is not None:
        return float(ends[-1:] == [len(found)])
    return float(any(not _ALTERNATIVES.match(found, end, end + _BEHIND) for end in ends))


def _is_refused(text: str, start: int) -> bool:
    return _REFUSED.search(text[max(0, start - _BEFORE) : start]) is not None


def _last_letter(text: str, *, like: str) -> str:
    """Return the last letter that stands alone, is not refused, and has the case of another one; else ""."""
    for found in reversed(list(_LETTER.finditer(text))):
        is_word = _WORD.match(text, found.start()) is not None
        if found[0].isupper() == like.isupper() and not is_word and not _is_refused(text, found.start()):
            return found[0]
    return ""
