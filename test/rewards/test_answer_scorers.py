"""Scorers of answers: what they extract, and when it equals a right answer."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.rewards import contains, exact_match, marked_answer, matches_regex, numeric_match
from torchrl_agentic.testing import finished_trajectory


def value(scorer, said, answer=None, **options):
    return scorer(finished_trajectory(said, answer=answer, **options)).value


@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [
        ("Paris", "paris", 1),
        ("  **Paris.** \n", "Paris", 1),
        ("“Paris”", "Paris", 1),
        ("New\n York", "new york", 1),
        ("1,000", "1000", 1),
        ("(B)", "B", 1),
        ("-5", "5", 0),
        ("C++", "C", 0),
        ("50%", "50", 0),
        ("Parisian", "Paris", 0),
        ("It is Paris", "Paris", 0),
        ("<think>Paris</think> Rome", "Paris", 0),
        ("<think>Rome?</think>\nParis", "Paris", 1),
        ("", "Paris", 0),
        ("...", "Paris", 0),
    ],
)
def test_exact_match_compares_normalized_answers(said: str, right: str, expected: float):
    assert value(exact_match(), said, right) == expected


def test_normalization_can_be_turned_off():
    assert value(exact_match(ignore_case=False), "paris", "Paris") == 0
    assert value(exact_match(ignore_punctuation=False), "Paris.", "Paris") == 0
    assert value(exact_match(ignore_space=False), "New  York", "New York") == 0


def test_any_of_several_right_answers_counts():
    assert value(exact_match(), "NYC", ["New York", "NYC"]) == 1
    assert value(exact_match(), "NYC", np.array(["New York", "NYC"])) == 1
    assert value(numeric_match(), "7", np.int64(7)) == 1
    assert value(exact_match(answers=["a", "b"]), "b") == 1
    assert value(exact_match(answers=lambda one: one.task.data["label"]), "b", data={"label": "b"}) == 1
    assert value(exact_match(), "4", data={"reward_model": {"ground_truth": 4}}) == 1


def test_a_task_without_a_right_answer_is_a_mistake_of_the_task():
    with pytest.raises(ValueError, match=r"task 'test' has no right answer: set Task\.answer"):
        value(exact_match(), "x")
    for empty in ("", [" ", "Paris"]):
        with pytest.raises(ValueError, match="'test' has an empty right answer"):
            value(exact_match(), "", empty)
    with pytest.raises(ValueError, match="no number"):
        value(numeric_match(), "5", "Paris")


@pytest.mark.parametrize(
    ("location", "said", "expected"),
    [
        ("end", "So it is 49.", 1),
        ("end", "So it is 149", 0),
        ("end", "49 it is", 0),
        ("start", "49 it is", 1),
        ("start", "495 it is", 0),
        ("end", "答案是49", 1),
    ],
)
def test_a_match_at_one_end_does_not_cut_words_or_numbers(location, said: str, expected: float):
    assert value(exact_match(location=location), said, "49") == expected


def test_contains_finds_an_answer_anywhere():
    assert value(contains(), "I think Paris, France.", "paris") == 1
    assert value(contains(whole_words=False), "14", "4") == 1
    assert value(contains(), "14 or 41", "4") == 0
    assert value(contains(), "14 or 4", "4") == 1
    assert value(contains(), "首都是巴黎。", "巴黎") == 1
    assert value(contains(whole_words=False), "a bird", "A") == 1


def test_the_case_of_a_letter_counts_within_a_text():
    for scorer in (contains(), exact_match(location="start")):
        assert (value(scorer, "a bird", "A"), value(scorer, "A: a bird", "A")) == (0, 1)
    assert value(exact_match(), "(a)", "A") == 1


def test_the_last_match_of_a_pattern_is_the_answer():
    scorer = matches_regex(r"ANSWER: (\w+)")
    assert value(scorer, "ANSWER: A\nno, ANSWER: B", "b") == 1
    assert value(scorer, "ANSWER: B\nno, ANSWER: A", "b") == 0
    assert value(scorer, "B", "b") == 0
    assert value(matches_regex(r"(?P<x>x)?(?P<answer>\d+)"), "x7", "7") == 1
    assert value(matches_regex(r"\d+"), "x7", "7") == 1
    with pytest.raises(re.error):
        matches_regex("(")


def test_a_score_tells_what_was_extracted_and_expected():
    score = matches_regex(r"ANSWER: (\w+)")(finished_trajectory("ANSWER: A", answer="B"))
    assert (score.value, score.answer, score.explanation) == (0.0, "A", "expected 'B'; found 'A'")
    score = matches_regex(r"ANSWER: (\w+)")(finished_trajectory("?", answer="B"))
    assert (score.answer, score.explanation) == (None, "no answer found; expected 'B'")
    assert numeric_match()(finished_trajectory("It is $1,200.", answer="1200")).answer == "1,200"


@pytest.mark.parametrize(
    ("said", "right", "expected"),
    [
        ("First 3, then 4. It is 72.", "Natalia … #### 72", 1),
        ("#### 1,000.0", 1000, 1),
        ("It is 5. Check: \\boxed{\\frac{1}{2}} as of step 3", 0.5, 1),
        ("<answer>50%</answer>", "0.5", 1),
        ("50%", "50", 1),
        ("0.5", "50%", 1),
        ("\\boxed{x} 72", 72, 0),
        ("no number", 72, 0),
        ("71.999", 72, 0),
        ("1e999999999", 72, 0),
        ("12 km/h", "12", 1),
        ("<think>72</think> I do not know.", 72, 0),
    ],
)
def test_numeric_match_compares_numbers_in_any_notation(said: str, right, expected: float):
    assert value(numeric_match(), said, right) == expected


def test_tolerances_are_inclusive_and_exact():
    assert value(numeric_match(abs_tol=0.3), "1.3", 1) == 1  # the float 0.3 is a little less than 3/10
    assert value(numeric_match(abs_tol=0.3), "1.30001", 1) == 0
    assert value(numeric_match(rel_tol=0.5), "150", 100) == 1
    assert value(numeric_match(rel_tol=0.5), "151", 100) == 0
    assert value(numeric_match(strict_percent=True), "50%", 50) == 0
    for wrong in ({"abs_tol": -1.0}, {"rel_tol": float("nan")}):
        with pytest.raises(ValueError, match="0 or more"):
            numeric_match(**wrong)


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_two_fractions_agree_if_and_only_if_they_are_equal(said, right):
    assert value(numeric_match(strict_percent=True), f"It is {said}.", str(right)) == float(said == right)


@given(st.text(max_size=40), st.text(max_size=20).filter(str.strip))
def test_any_text_can_be_scored(said: str, right: str):
    for scorer in (exact_match(), exact_match(location="end"), contains()):
        assert value(scorer, said, right) in (0.0, 1.0)
    assert value(numeric_match(), said, 7) in (0.0, 1.0)


@given(st.text(max_size=30).filter(str.strip))
def test_an_answer_equals_itself(said: str):
    trajectory = finished_trajectory(said, answer=said)
    assert exact_match(text=lambda one: one.answer)(trajectory).value == 1


def test_where_to_look_can_be_chosen():
    two = finished_trajectory("first", "second", answer="first")
    assert exact_match()(two).value == 0
    assert exact_match(text=lambda one: one.texts[0])(two).value == 1
    assert exact_match(extract=marked_answer)(finished_trajectory("\\boxed{a} b", answer="a")).value == 1


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("<answer>1</answer><answer> 2 </answer>", " 2 "),
        ("<answer>1", None),
        ("x #### 3", " 3"),
        ("nothing", None),
    ],
)
def test_the_last_mark_of_a_text_counts(text: str, marked: str | None):
    assert marked_answer(text) == marked


def test_a_wrong_location_is_refused():
    with pytest.raises(ValueError, match="location"):
        exact_match(location="middle")  # pyright: ignore[reportArgumentType]
