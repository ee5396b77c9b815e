"""The query line selects the listed rows, and reports its errors."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.records import Summary
from torchrl_agentic.viewer.query import QueryError, is_id, parse

SUMMARY = Summary(
    request_id="AB12-cd34",
    step=3,
    score=0.25,
    termination_reason="max_turns",
    trajectory="Question-7",
    group="4147c2",
    n_turns=4,
    statuses={"ok": 2, "timeout": 1},
    tools={"python": 3},
    extras={"acc": 1.0, "kind": "hard", "done": True},
    redactions=2,
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("status:timeout tool:python score<0.5 reason:max_turns", True),
        ("status:timeout score<0.2", False),
        ("status:crash,timeout", True),
        ("-status:timeout", False),
        ("status!=crash", True),
        ("score>=0.25 score<=0.25 score=0.25", True),
        ("score!=0.25", False),
        ("score:none", False),
        ("score!=none", True),
        ("turns:4 calls=3 errors>0 step<10 redactions:2", True),
        ("name:question", True),
        ("id:ab12cd", True),
        ("group:4147", True),
        ("acc=1 kind:hard done:true", True),
        ('kind:"hard"', True),
        ("acc>1", False),
        ("kind>3", False),
    ],
)
def test_query_matches_rows_that_fulfil_all_terms(text: str, holds: bool):
    assert parse(text, SUMMARY.extras).holds(SUMMARY) is holds


def test_words_are_kept_for_the_text():
    assert parse('one "two words" -three').words == (("one", True), ("two words", True), ("three", False))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scor<1", ["no field scor", "did you mean score?"]),
        ("zzz:1", ["no field zzz", "reason", "turns"]),
        ("http://x", ["no field http", '"http://x"']),
        ("status:timeuot", ["no status timeuot", "timeout"]),
        ("score<high", ["high is not a number"]),
        ("tool<3", ["tool is not a number", "tool:3"]),
        ("score<", ["score<", "score<1"]),
        ('a "b', ["quotes come in pairs"]),
        ("-", ["must follow the minus sign"]),
    ],
)
def test_a_query_that_cannot_be_understood_says_why(text: str, words: list[str]):
    with pytest.raises(QueryError) as error:
        parse(text)
    assert all(word in str(error.value) for word in words), error.value


@given(st.text(st.sampled_from('abc:<>=!-" ,.1') | st.characters(), max_size=30))
def test_any_text_is_a_query_or_a_mistake_that_is_explained(text: str):
    try:
        found = parse(text)
    except QueryError as error:
        assert str(error)
    else:
        assert found.holds(SUMMARY) in (True, False)


@given(st.floats(allow_nan=False), st.sampled_from(["<", "<=", ">", ">=", "=", "!="]))
def test_a_score_that_is_missing_or_nan_fulfils_no_comparison_of_size(value: float, comparison: str):
    query = parse(f"score{comparison}{value!r}")
    for score in (None, math.nan):
        summary = Summary("", 0, score, "", "", "", 0, {}, {}, {})
        assert query.holds(summary) is (comparison == "!=")
        assert parse("score:none").holds(summary)


@given(st.text(st.sampled_from("0123456789abcdef-"), max_size=36), st.integers(0, 36))
def test_the_beginning_of_an_id_is_enough_and_hyphens_do_not_matter(request_id: str, length: int):
    assert is_id(request_id, request_id.upper()[:length])
    assert is_id(request_id, request_id.replace("-", "")[:length])
