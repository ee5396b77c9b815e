"""`check_all` reports every failure."""

import pytest
from helpers.check_all import check_all


def test_every_case_that_fails_is_raised_with_what_it_was():
    def check(one: int, other: int) -> None:
        assert one != other

    check_all([(1, 2), (3, 4)], check)
    with pytest.raises(ExceptionGroup) as raised:
        check_all([(1, 1), (1, 2), (7, 7)], check)
    assert [error.__notes__ for error in raised.value.exceptions] == [["case 0: (1, 1)"], ["case 2: (7, 7)"]]
