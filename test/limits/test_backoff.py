"""Pauses double after each failure, up to a bound."""

from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.limits.backoff import backoff_pause_s


def test_pauses_double_up_to_a_bound():
    assert [backoff_pause_s(failures, 0.5, 10.0) for failures in range(1, 8)] == [0.5, 1, 2, 4, 8, 10, 10]


@given(st.integers(1, 10_000), st.floats(0.001, 10))
def test_pauses_stay_within_a_bound(failures: int, first_s: float):
    assert first_s <= backoff_pause_s(failures, first_s, 10.0) <= 10.0
