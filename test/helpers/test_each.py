"""The helper that checks many cases in one test loses no failure."""

import pytest
from helpers.each import each


def test_every_case_that_fails_is_raised_with_what_it_was():
    def check(one: int, other: int) -> None:
        assert one != other

    each([(1, 2), (3, 4)], check)
    with pytest.raises(ExceptionGroup) as raised:
        each([(1, 1), (1, 2), (7, 7)], check)
    assert [error.__notes__ for error in raised.value.exceptions] == [["case 0: (1, 1)"], ["case 2: (7, 7)"]]
