"""Tokens and cost of requests."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.engines import Price, Usage

COUNTS = st.integers(0, 10**6)
NONSENSE = st.none() | st.booleans() | st.floats() | st.text() | st.integers(max_value=-1) | st.lists(COUNTS)


@given(st.lists(st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.floats(0, 1e6)), max_size=5))
def test_usages_add_up(usages):
    total = sum(usages, Usage())
    assert total.requests == sum(one.requests for one in usages)
    assert total.tokens == sum(one.prompt + one.completion for one in usages)
    assert total.cost == pytest.approx(sum(one.cost for one in usages))


@given(st.dictionaries(st.sampled_from(["prompt_tokens", "completion_tokens", "cost"]), NONSENSE) | NONSENSE)
def test_nonsense_counts_as_nothing(data):
    found = Usage.of_response(data, None)
    assert (found.requests, found.tokens) == (1, 0)
    assert math.isfinite(found.cost)
    assert found.cost >= 0


def test_the_cost_that_a_service_reports_is_used_without_a_price():
    data = {"prompt_tokens": 10, "completion_tokens": 5, "cost": 0.25}
    assert Usage.of_response(data, None).cost == 0.25
    assert Usage.of_response(data, Price(1e6, 2e6)).cost == 20.0


def test_cached_tokens_cost_as_others_if_nothing_is_said():
    data = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
    assert Usage.of_response(data, Price(1e6, 0)).cost == 10.0
    assert Usage.of_response(data, Price(1e6, 0, cached=0.5e6)).cost == 8.0


@pytest.mark.parametrize(
    ("prices", "kind"),
    [((-1, 1), ValueError), ((1, math.nan), ValueError), (("1", 1), TypeError), ((True, 1), TypeError)],
    ids=range(4),
)
def test_a_price_is_a_number_of_0_or_more(prices, kind):
    with pytest.raises(kind, match="price per million tokens"):
        Price(*prices)
