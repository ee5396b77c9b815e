"""Numbers are read in the notations of people, models and LaTeX, exactly."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.rewards.quantities import MAX_DIGITS, find_quantities, read_quantity

NOTATIONS = {
    "1,234.50": "1234.5",
    "$-3.5": "-3.5",
    "-$4": "-4",
    "\\$1{,}000": "1000",
    "−7": "-7",
    "3/4": "3/4",
    "1 1/2": "3/2",
    "\\frac{3}{4}": "3/4",
    "-2\\dfrac{1}{2}": "-5/2",
    "50%": "1/2",
    "12.5 \\%": "1/8",
    "30 percent": "3/10",
    "1e6": "1000000",
    "1.5e-3m": "3/2000",
    "1.2 \\times 10^{5}": "120000",
    "2×10^3": "2000",
    "10^3": "1000",
    "1'000'000": "1000000",
    "1_000": "1000",
    "1\u202f000": "1000",
    ".5": "1/2",
    "72.": "72",
    "12km": "12",
    "(5)": "5",
}


@pytest.mark.parametrize("text", sorted(NOTATIONS))
def test_a_notation_is_read(text: str):
    found = read_quantity(f"It is {text}")
    assert found is not None
    assert found.value == Fraction(NOTATIONS[text])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        ("no number, v1.2.3 and a1b", []),
        ("3-4", [3, 4]),
        ("1,2,3", [1, 2, 3]),
        ("10 200", [10, 200]),
        ("5/0 then 2", [2]),
        ("1e999999999 then 2", [2]),
        ("9" * (MAX_DIGITS + 1) + " then 2", [2]),
        ("From 1,000 to 2,000.", [1000, 2000]),
    ],
)
def test_the_numbers_of_a_text_are_found_in_order(text: str, values: list[int]):
    assert [found.value for found in find_quantities(text)] == values


@given(st.integers(-(10**30), 10**30))
def test_whole_numbers_are_read_with_and_without_thousands_separators(number: int):
    for text in (str(number), f"{number:,}", f"{number:_}", f"{number:,}".replace(",", "{,}")):
        found = find_quantities(f"The answer is {text}.")
        assert [one.value for one in found] == [number]


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_decimals_and_percentages_are_exact(number):
    assert [one.value for one in find_quantities(f"x = {number:f}")] == [Fraction(number)]
    (found,) = find_quantities(f"{number:,f}%")
    assert (found.value, found.is_percent) == (Fraction(number) / 100, True)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_are_read_back_as_python_writes_them(number: float):
    found = read_quantity(repr(number))
    assert found is not None
    assert float(found.value) == number


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**6))
def test_fractions_are_read_in_both_notations(top: int, bottom: int):
    for text in (f"{top}/{bottom}", f"\\frac{{{top}}}{{{bottom}}}"):
        assert [one.value for one in find_quantities(text)] == [Fraction(top, bottom)]


@given(st.text(st.sampled_from("0123456789.,-+/%$eE^{} \\frac×*_'n−"), max_size=60))
def test_any_text_can_be_read_and_each_number_reads_alike_by_itself(text: str):
    for found in find_quantities(text):
        again = read_quantity(found.text)
        assert again is not None
        assert again.value == found.value
