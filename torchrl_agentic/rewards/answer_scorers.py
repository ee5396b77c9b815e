"""Scorers that compare an answer with the right one: `exact_match`, `numeric_match` and others."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias, cast

from torchrl_agentic.rewards.quantities import Quantity, read_quantity
from torchrl_agentic.tools.verl.graders import boxed
from torchrl_agentic.trajectory.score import Score
from torchrl_agentic.trajectory.trajectory import Trajectory

TextOf: TypeAlias = Callable[[Trajectory], str]
Extract: TypeAlias = str | re.Pattern[str] | Callable[[str], str | None]
Answers: TypeAlias = str | int | float | Sequence[Any] | Callable[[Trajectory], Any]
AnswerScorer: TypeAlias = Callable[[Trajectory], Score]

_AROUND = " \t\n.,;:!?\"'`()[]{}*_$“”‘’«»„。、，；：！？（）「」"
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)


def marked_answer(text: str) -> str | None:
    r"""Return what a text marks as its answer; None if it marks nothing.

    The last `\boxed{…}` counts, else the last `<answer>…</answer>`, else what follows the last `####`.

    Args:
        text: The text.
    """
    if "\\boxed{" in text:
        return boxed(text)
    if tagged := _TAGGED.findall(text):
        return tagged[-1]
    before, mark, after = text.rpartition("####")
    del before
    return after if mark else None


def right_answers(trajectory: Trajectory, answers: Answers | None = None) -> list[str]:
    """Return the right answers of a trajectory's task as texts.

    Args:
        trajectory: The trajectory.
        answers: The right answer, a list of right answers, or a function of the trajectory that returns
            them; None: `Task.truth`.

    Raises:
        ValueError: If the task has no right answer, or an empty one, which any text would have.
    """
    found: Any = answers(trajectory) if callable(answers) else answers
    if found is None:
        found = trajectory.task.truth
    if hasattr(found, "tolist"):  # an array, as data frames hold lists
        found = found.tolist()
    several = cast("Sequence[Any]", found) if isinstance(found, list | tuple | set | frozenset) else [found]
    texts = [str(one) for one in several if one is not None]
    if not texts:
        raise ValueError(
            f"task {trajectory.task.name!r} has no right answer: set Task.answer, or pass answers="
        )
    if not all(text.strip() for text in texts):
        raise ValueError(
            f"task {trajectory.task.name!r} has an empty right answer, which any text would have"
        )
    return texts


def normalized(
    text: str, *, ignore_case: bool = True, ignore_space: bool = True, ignore_punctuation: bool = True
) -> str:
    """Return a text in the form in which answers are compared.

    Args:
        text: The text.
        ignore_case: Fold upper and lower case.
        ignore_space: Replace white space by single spaces.
        ignore_punctuation: Remove quotes, brackets, `$`, `*` and marks such as `.` at both ends, and commas
            between thousands. Signs remain: -5 is not 5, and C++ is not C.
    """
    text = unicodedata.normalize("NFKC", text)
    if ignore_case:
        text = text.casefold()
    text = " ".join(text.split()) if ignore_space else text.strip()
    if ignore_punctuation:
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
        text = text.strip(_AROUND) or text
    return text


def is_letter(text: str) -> bool:
    """Return True for a single letter, such as that of a choice: its case counts within longer texts."""
    return len(text) == 1 and text.lower() != text.upper()


def find_words(text: str, words: str) -> Iterator[int]:
    """Yield where words stand in a text, no word or number continuing at either end.

    Args:
        text: The text.
        words: The words, not empty.
    """
    start = text.find(words)
    while start >= 0:
        end = start + len(words)
        if not _joins(text[start - 1 : start], words[0]) and not _joins(words[-1], text[end : end + 1]):
            yield start
        start = text.find(words, start + 1)


def exact_match(
    *,
    answers: Answers | None = None,
    text: TextOf | None = None,
    extract: Extract | None = None,
    location: Literal["whole", "start", "end"] = "whole",
    ignore_case: bool = True,
    ignore_space: bool = True,
    ignore_punctuation: bool = True,
) -> AnswerScorer:
    """Return a scorer: 1.0 if the answer equals a right one after normalization, else 0.0.

    Args:
        answers: The right answer, a list of right answers of which any counts, or a function of the
            trajectory that returns them; None: `Task.truth`.
        text: Function of the trajectory that returns the text to look at; None: `Trajectory.final_answer`.
        extract: Reads the answer from the text: a regular expression, of which the last match counts (its
            group "answer", else its first group, else all of it), or a function that returns a text or None,
            such as `marked_answer`. None: the whole text.
        location: "whole": the answer equals a right one. "start" and "end": it begins or ends with one, and
            no word or number continues there.
        ignore_case: Fold upper and lower case, except of a single letter at the start or the end.
        ignore_space: Treat any white space as one space.
        ignore_punctuation: Ignore punctuation around the answers, and commas between thousands.

    Raises:
        ValueError: If `location` is another text.
        re.error: If `extract` is no regular expression.
    """
    if location not in ("whole", "start", "end"):
        raise ValueError(f"location is 'whole', 'start' or 'end'; got {location!r}")

    def agrees(found: str, right: str) -> bool:
        folds = ignore_case and (location == "whole" or not is_letter(right.strip()))
        found, right = (
            normalized(
                one, ignore_case=folds, ignore_space=ignore_space, ignore_punctuation=ignore_punctuation
            )
            for one in (found, right)
        )
        if location == "whole":
            return found == right
        if location == "start":
            return found.startswith(right) and not _joins(right[-1], found[len(right) : len(right) + 1])
        return found.endswith(right) and not _joins(found[: -len(right)][-1:], right[0])

    return _scorer("exact_match", agrees, answers=answers, text=text, extract=extract)


def contains(
    *,
    answers: Answers | None = None,
    text: TextOf | None = None,
    whole_words: bool = True,
    ignore_case: bool = True,
    ignore_space: bool = True,
) -> AnswerScorer:
    """Return a scorer: 1.0 if a right answer occurs in the text, else 0.0.

    A model under training may learn to list many answers: prefer `exact_match` or `numeric_match` as a
    reward.

    Args:
        answers: The right answer, a list of right answers of which any counts, or a function of the
            trajectory that returns them; None: `Task.truth`.
        text: Function of the trajectory that returns the text to look at; None: `Trajectory.final_answer`.
        whole_words: The occurrence must not be a part of a longer word or number, and the case of a single
            letter counts.
        ignore_case: Fold upper and lower case.
        ignore_space: Treat any white space as one space.
    """

    def agrees(found: str, right: str) -> bool:
        folds = ignore_case and not (whole_words and is_letter(right.strip()))
        found, right = (
            normalized(one, ignore_case=folds, ignore_space=ignore_space, ignore_punctuation=False)
            for one in (found, right)
        )
        return any(True for _ in find_words(found, right)) if whole_words else right in found

    return _scorer("contains", agrees, answers=answers, text=text)


def matches_regex(
    pattern: str | re.Pattern[str],
    *,
    answers: Answers | None = None,
    text: TextOf | None = None,
    ignore_case: bool = True,
    ignore_space: bool = True,
    ignore_punctuation: bool = True,
) -> AnswerScorer:
    """Return a scorer: 1.0 if the answer that a pattern extracts equals a right one, else 0.0.

    It is `exact_match` with `extract=pattern`; for numbers use `numeric_match(extract=pattern)`. The pattern
    runs on text that a model wrote: one with nested repetitions, such as `(a+)+b`, can take forever on a
    hostile text.

    Args:
        pattern: Regular expression, of which the last match counts: its group "answer", else its first
            group, else all of it. It is case-sensitive without `(?i)`.
        answers: The right answer, a list of right answers of which any counts, or a function of the
            trajectory that returns them; None: `Task.truth`.
        text: Function of the trajectory that returns the text to look at; None: `Trajectory.final_answer`.
        ignore_case: Fold upper and lower case of the answers.
        ignore_space: Treat any white space as one space.
        ignore_punctuation: Ignore punctuation around the answers, and commas between thousands.

    Raises:
        re.error: If `pattern` is no regular expression.
    """
    score = exact_match(
        answers=answers,
        text=text,
        extract=re.compile(pattern),
        ignore_case=ignore_case,
        ignore_space=ignore_space,
        ignore_punctuation=ignore_punctuation,
    )
    score.__name__ = "matches_regex"
    return score


def numeric_match(
    *,
    answers: Answers | None = None,
    text: TextOf | None = None,
    extract: Extract | None = None,
    abs_tol: float = 0.0,
    rel_tol: float = 0.0,
    strict_percent: bool = False,
) -> AnswerScorer:
    r"""Return a scorer: 1.0 if the answer is a right number, else 0.0.

    The answer is the last number of the text, or of what it marks by `\boxed{…}`, `<answer>` or `####`.
    Numbers are compared exactly, in any notation that `find_quantities` reads: 0.5, 1/2, 50% and
    `\frac{1}{2}` are equal, and so are 1,200 and 1.2e3. Units are ignored.

    Args:
        answers: The right number, a list of right numbers of which any counts, or a function of the
            trajectory that returns them; None: `Task.truth`. From a text, such as an answer of GSM8K, the
            marked or last number counts.
        text: Function of the trajectory that returns the text to look at; None: `Trajectory.final_answer`.
        extract: Reads the answer from the text, as in `exact_match`; None: what the text marks, or all of it.
        abs_tol: Largest absolute difference that counts as equal.
        rel_tol: Largest difference that counts as equal, relative to the right number.
        strict_percent: If only one of the numbers has a percent sign, 50% equals 0.5 only. Otherwise it
            equals 50 too.

    Raises:
        ValueError: If a tolerance is negative or NaN, or a right answer has no number (when it is called).
    """
    for name, bound in (("abs_tol", abs_tol), ("rel_tol", rel_tol)):
        if not 0 <= bound < math.inf:
            raise ValueError(f"{name} is 0 or more; got {bound}")
    absolute, relative = (Fraction(repr(float(bound))) for bound in (abs_tol, rel_tol))  # 0.3 is 3/10

    def is_close(found: Fraction, right: Fraction) -> bool:
        return abs(found - right) <= max(absolute, relative * abs(right))

    def agrees(found: str, right: str) -> bool:
        wanted, said = _marked_quantity(right), read_quantity(found)
        if wanted is None:
            raise ValueError(f"the right answer {right!r:.80} has no number: use exact_match or contains")
        if said is None:
            return False
        if is_close(said.value, wanted.value):
            return True
        if strict_percent or said.is_percent == wanted.is_percent:
            return False
        return is_close(_shown(said), _shown(wanted))

    def last_number(value: str) -> str | None:
        marked = marked_answer(value)
        last = read_quantity(value if marked is None else marked)
        return None if last is None else last.text

    reads = last_number if extract is None else extract
    return _scorer("numeric_match", agrees, answers=answers, text=text, extract=reads)


def _marked_quantity(text: str) -> Quantity | None:
    marked = marked_answer(text)
    return read_quantity(text if marked is None else marked)


def _shown(quantity: Quantity) -> Fraction:
    return quantity.value * 100 if quantity.is_percent else quantity.value


def _scorer(
    name: str,
    agrees: Callable[[str, str], bool],
    *,
    answers: Answers | None,
    text: TextOf | None,
    extract: Extract | None = None,
) -> AnswerScorer:
    """Return a scorer that extracts an answer and compares it with each right one."""
    read = _reader(extract)

    def score(trajectory: Trajectory) -> Score:
        wanted = right_answers(trajectory, answers)
        found = read(trajectory.final_answer if text is None else text(trajectory))
        expected = " or ".join(map(repr, wanted))
        if found is None:
            return Score(0.0, None, f"no answer found; expected {expected:.200}")
        results = [agrees(found, right) for right in wanted]  # all: each of them is checked
        said = f"{found.strip()!r:.200}"
        if any(results):
            return Score(1.0, found.strip(), f"{said} is right")
        return Score(0.0, found.strip(), f"expected {expected:.200}; found {said}")

    score.__name__ = score.__qualname__ = name
    return score


def _reader(extract: Extract | None) -> Callable[[str], str | None]:
    if extract is None:
        return lambda text: text
    if callable(extract):
        return extract
    pattern = re.compile(extract)
    group: str | int = "answer" if "answer" in pattern.groupindex else int(pattern.groups > 0)

    def read(text: str) -> str | None:
        found: str | None = None
        for match in pattern.finditer(text):
            found = match[group]
        return found

    return read


def _joins(before: str, after: str) -> bool:
    """Return True if two neighbouring characters belong to one word; scripts without spaces have no words."""
    return (before + after).isalnum() and bool(before and after) and not (_is_wide(before) or _is_wide(after))


def _is_wide(character: str) -> bool:
    return unicodedata.east_asian_width(character) in "WF"
