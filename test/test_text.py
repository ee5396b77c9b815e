"""Foreign text is cut to its bound, shown without control characters, and read as JSON without a crash."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.text import (
    MAX_DEPTH,
    TooDeepError,
    TooManyValuesError,
    count_values,
    did_you_mean,
    nearest,
    one_line,
    printable,
    read_json,
    shorten,
    truncate,
    truncate_middle,
)


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_as_deep_as_allowed_is_read_and_one_level_more_is_not():
    for text in ("[" * MAX_DEPTH + "]" * MAX_DEPTH, '{"a":' * MAX_DEPTH + "1" + "}" * MAX_DEPTH):
        assert count_values(read_json(text)) == count_values(read_json(text.encode())) >= MAX_DEPTH - 1
        for deeper in (f"[{text}]", f"[{text}]".encode()):
            with pytest.raises(TooDeepError, match=f"more than {MAX_DEPTH} levels"):
                read_json(deeper)
    assert read_json(json.dumps("[" * 10_000)) == "[" * 10_000
    with pytest.raises(TooDeepError):
        count_values(_nested(MAX_DEPTH + 1))


def test_a_greater_depth_can_be_given():
    text = "[" * 300 + "]" * 300
    assert count_values(read_json(text, max_depth=300), max_depth=300) == 299
    with pytest.raises(TooDeepError, match="more than 299 levels"):
        read_json(text, max_depth=299)
    with pytest.raises(TooDeepError, match="more than 10 levels"):
        read_json("[" * 11 + "]" * 11, max_depth=10)


def test_a_value_that_contains_itself_or_multiplies_is_refused():
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(TooDeepError):
        count_values(itself)
    twice: list[Any] = []
    for _ in range(100):
        twice = [twice, twice]
    with pytest.raises(TooManyValuesError, match="more than 1000 values"):
        count_values(twice, max_values=1000)


@given(
    st.recursive(
        st.none() | st.text(max_size=3),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    )
)
def test_values_are_counted_at_any_depth(value: Any):
    def expected(item: Any) -> int:
        items = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
        return sum(1 + expected(inner) for inner in items)

    assert count_values(value) == expected(value)
    with pytest.raises(TooManyValuesError):
        count_values([value], max_values=expected(value))


_hostile = st.text(
    st.characters() | st.sampled_from("\x1b\x9b\r\t\x00\x7f\u202e\u2066\u200b\u0301\ufe0f\ud800漢한👍 \n"),
    max_size=80,
)


@given(_hostile)
def test_no_control_format_or_half_character_is_left(text: str):
    kinds = {unicodedata.category(character) for character in printable(text)}
    assert not kinds & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)))
def test_plain_text_stays(text: str):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "␛[31mred"),
        ("a\rb\tc\x00\x7f", "a␍b␉c␀␡"),
        ("\x9b2J", "‹9B›2J"),
        ("safe\u202eevil\u2069", "safe‹202E›evil‹2069›"),
        ("a\u00a0b\u3000c", "a b c"),
        ("half \udce9", "half ‹DCE9›"),
        ("⚠\ufe0f é 漢 👍", "⚠ é 漢 👍"),
        ("z" + "\u0301" * 500, "z\u0301\u0301\u0301‹+497 marks›"),
        ("[bold]no markup[/] :smile:", "[bold]no markup[/] :smile:"),
    ],
)
def test_invisible_characters_are_shown_escaped(text: str, shown: str):
    assert printable(text) == shown


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("mark", ["", "…", "...(truncated)..."])
@given(text=st.text(), bound=st.integers(17, 60))
def test_truncated_text_has_the_length_of_the_bound_and_both_ends(side, mark, text, bound):
    left = truncate(text, bound, side=side, mark=mark)
    if len(text) <= bound:
        assert left == text
        return
    assert len(left) == bound
    cut = {"left": 0, "right": bound - len(mark), "middle": (bound - len(mark) + 1) // 2}[side]
    assert left[cut : cut + len(mark)] == mark
    assert text.startswith(left[:cut])
    assert text.endswith(left[cut + len(mark) :])


@given(st.text(max_size=80), st.integers(0, 40))
def test_shortened_text_shows_how_much_is_missing(text: str, bound: int):
    left = truncate_middle(text, bound)
    if len(text) <= bound:
        assert left == text
        return
    half = bound // 2
    omitted = len(text) - 2 * half
    assert left == f"{text[:half]}\n… [{omitted} characters omitted] …\n{text[len(text) - half :]}"


@given(_hostile, st.integers(1, 60))
def test_one_line_is_printable_encodable_and_not_longer(text: str, bound: int):
    line = one_line(text, bound)
    assert line.isprintable()
    assert len(line) <= bound
    assert line.encode().decode() == line


@pytest.mark.parametrize(
    ("value", "shown"),
    [("a" * 9, "a" * 7 + "…"), ("text", "text"), ([1, 2], "[1, 2]"), ([1] * 9, "[1, 1, …"), (None, "None")],
)
def test_any_value_can_be_shown_in_an_error_message(value: Any, shown: str):
    assert shorten(value, 8) == shown


def test_a_value_that_has_no_repr_is_named_by_its_type():
    assert shorten(10**9999) == "a huge int"


def test_unknown_name_error_suggests_the_most_similar_one():
    known = ("search", "python", "shell")
    assert did_you_mean("serach", known) == "; did you mean 'search'?"
    assert did_you_mean("weather", known) == did_you_mean("serach", ()) == ""
    assert nearest("pyhton", known) == "python"
    assert nearest("pyhton", known, cutoff=0.95) is None
    assert nearest(30, ["30.0"]) == "30.0"
