"""Check many cases of one rule in one test, where a test for each would cost more than the case."""

from collections.abc import Callable, Iterable
from typing import Any


def check_all(cases: Iterable[tuple[Any, ...]], check: Callable[..., object]) -> None:
    """Check every case, and raise the failures of all together, each with its case.

    Args:
        cases: Arguments of `check`.
        check: Raises if a case does not hold.

    Raises:
        ExceptionGroup: If any case does not hold.
    """
    failures: list[Exception] = []
    for number, case in enumerate(cases):
        try:
            check(*case)
        except Exception as error:
            error.add_note(f"case {number}: {str(case)[:2000]}")
            failures.append(error)
    if failures:
        raise ExceptionGroup("cases that do not hold", failures)
