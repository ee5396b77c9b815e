"""Text over the limit is cut, with a marker inside the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.tokens.writer import Truncation


def count(text):
    """As many tokens as there are words, and at most as many as bytes."""
    return len(text.split())


sides = st.sampled_from(["left", "middle", "right"])


@given(st.text(max_size=400), st.integers(45, 200), sides)
def test_the_limit_of_characters_holds_with_the_marker(text, limit, side):
    found = Truncation(None, limit, side).apply(text, count)
    assert len(found) <= limit
    assert (found == text) == (len(text) <= limit)


@given(st.lists(st.sampled_from(["ab", "c", "defg"]), max_size=300), st.integers(6, 60), sides)
def test_the_limit_of_tokens_holds_and_is_used(words, limit, side):
    text = " ".join(words)
    found = Truncation(limit, None, side).apply(text, count)
    assert count(found) <= limit
    if found != text:
        assert count(found) >= limit - 2, "as much is kept as fits"


@given(st.text("abcdef", min_size=100, max_size=300), sides)
def test_left_keeps_the_head_right_the_tail_and_middle_both_as_in_verl(text, side):
    found = Truncation(None, 60, side).apply(text, count)
    head, _, rest = found.partition("[… ")
    tail = rest.partition(" …]")[2]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert {"left": not tail, "right": not head, "middle": abs(len(head) - len(tail)) <= 1}[side]
    assert f"{len(text) - len(head) - len(tail)} characters" in found


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0,), "max_tokens must be 1"),
        ((None, 0), "max_chars must be 1"),
        ((None, 9), "no room for the marker"),
        ((None, None, "up"), "left, middle or right; got 'up'"),
    ],
)
def test_invalid_options_are_rejected(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        Truncation(*arguments)
