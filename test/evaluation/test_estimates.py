"""Estimates from scores agree with brute force, with published tables, and with their definitions."""

import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agentic.evaluation import (
    mean_estimate,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    wilson_interval,
)
from torchrl_agentic.evaluation.estimates import (
    mcnemar_p_value,
    pass_estimate,
    student_t_quantile,
    student_t_tail,
)

passes = st.lists(st.booleans(), min_size=1, max_size=8)
scores = st.floats(-2, 2, allow_nan=False).map(lambda value: round(value, 3))


@given(passes, st.integers(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_pass_and_pass_hat_k_that_of_draws_of_passes(samples, k):
    n, c = len(samples), sum(samples)
    if k > n:
        with pytest.raises(ValueError, match="k is from 1 to n"):
            pass_at_k(n, c, k)
        return
    draws = list(itertools.combinations(samples, k))
    assert pass_at_k(n, c, k) == pytest.approx(fmean(map(any, draws)))
    assert pass_hat_k(n, c, k) == pytest.approx(fmean(map(all, draws)))
    assert pass_hat_k(n, c, 1) == pytest.approx(c / n)
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)


@given(st.integers(1, 10_000), st.data())
def test_the_wilson_interval_holds_exactly_the_shares_that_a_score_test_does_not_reject(n, data):
    count = data.draw(st.integers(0, n))
    share = count / n
    low, high = wilson_interval(share, n)
    assert 0.0 <= low <= share <= high <= 1.0
    for end in (low, high):  # the test statistic at the ends is the quantile
        if 0.0 < end < 1.0 and end != share:
            assert abs(share - end) / math.sqrt(end * (1 - end) / n) == pytest.approx(1.959964, rel=1e-5)


@pytest.mark.parametrize(
    ("df", "quantile"),
    [
        (1, 12.706205),
        (2, 4.302653),
        (3, 3.182446),
        (4, 2.776445),
        (9, 2.262157),
        (29, 2.045230),
        (1000, 1.962339),
    ],
)
def test_quantiles_of_student_t_are_those_of_the_tables(df, quantile):
    assert student_t_quantile(0.95, df) == pytest.approx(quantile, abs=2e-6)
    assert student_t_tail(quantile, df) == pytest.approx(0.025, abs=1e-7)


@given(st.floats(0, 50), st.integers(1, 400))
def test_tails_of_student_t_with_one_and_two_degrees_have_their_closed_forms(t, df):
    assert student_t_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, abs=1e-12)
    assert student_t_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), abs=1e-12)
    assert 0.0 <= student_t_tail(t, df + 1) <= student_t_tail(t, df) + 1e-15 <= 0.5 + 1e-14


@given(st.dictionaries(st.text(max_size=3), st.lists(scores, max_size=4), max_size=8))
def test_the_mean_counts_each_task_once_and_lies_in_its_interval(values):
    found = mean_estimate(values)
    clusters = [some for some in values.values() if some]
    if not clusters:
        assert found is None
        return
    assert found.value == pytest.approx(fmean(map(fmean, clusters)))
    assert (found.n_tasks, found.n_samples) == (len(clusters), sum(map(len, clusters)))
    if found.low is not None:
        assert found.low - 1e-12 <= found.value <= found.high + 1e-12


@given(st.lists(st.booleans(), min_size=1, max_size=50))
def test_without_epochs_the_interval_of_passes_is_that_of_wilson(samples):
    found = mean_estimate({str(number): [value] for number, value in enumerate(samples)})
    assert (found.low, found.high) == pytest.approx(wilson_interval(fmean(samples), len(samples)))


@given(st.lists(st.booleans(), min_size=2, max_size=20), st.integers(1, 10))
def test_epochs_that_repeat_each_other_do_not_narrow_the_interval(samples, epochs):
    once = mean_estimate({str(number): [value] for number, value in enumerate(samples)})
    often = mean_estimate({str(number): [value] * epochs for number, value in enumerate(samples)})
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_epochs_of_tasks_that_are_equally_hard_narrow_the_interval_as_further_samples_do():
    halves = {str(number): [0.0, 1.0] for number in range(10)}
    assert mean_estimate(halves).n_samples == 20
    squared = {str(number): [float(number < 5), float(number >= 5)] for number in range(10)}
    found, independent = mean_estimate(squared), wilson_interval(0.5, 20)
    assert found.high - found.low >= independent[1] - independent[0] - 1e-12


def test_95_percent_intervals_over_clustered_samples_cover_the_mean_95_percent_of_the_time():
    draw = random.Random(7)
    covered = 0
    for _ in range(1000):
        hard = [draw.random() for _ in range(40)]  # the population mean is 0.5
        found = mean_estimate(
            {str(task): [float(draw.random() < p) for _ in range(4)] for task, p in enumerate(hard)}
        )
        covered += found.low <= 0.5 <= found.high
    assert 925 <= covered <= 975


def test_pass_at_k_leaves_out_tasks_with_fewer_samples():
    counts = {"a": (4, 1), "b": (4, 4), "c": (1, 1)}
    found = pass_estimate(counts, 2)
    assert (found.value, found.n_tasks) == (pytest.approx((0.5 + 1.0) / 2), 2)
    assert pass_estimate(counts, 2, all_pass=True).value == pytest.approx(0.5)
    assert pass_estimate(counts, 5) is None
    assert 0.0 <= found.low <= found.high <= 1.0


@pytest.mark.parametrize(("passes", "value"), [(4, 1.0), (0, 0.0)])
def test_the_interval_of_pass_at_k_keeps_its_width_if_all_tasks_pass_or_fail(passes, value):
    counts = dict.fromkeys("abc", (4, passes))
    for all_pass in (False, True):
        found = pass_estimate(counts, 2, all_pass=all_pass)
        assert found.value == value
        assert (found.low, found.high) == pytest.approx(wilson_interval(value, 3))
        assert found.high - found.low > 0.5


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8))
def test_pass_at_1_has_the_interval_of_the_mean_of_passes(tasks):
    mean = mean_estimate({str(n): list(map(float, some)) for n, some in enumerate(tasks)})
    for all_pass in (False, True):
        counts = {str(n): (len(some), sum(some)) for n, some in enumerate(tasks)}
        found = pass_estimate(counts, 1, all_pass=all_pass)
        assert (found.low, found.high) == pytest.approx((mean.low, mean.high))


@given(
    st.lists(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_interval_of_pass_at_k_lies_in_0_to_1_and_holds_the_value(counts, k, all_pass):
    found = pass_estimate({str(place): one for place, one in enumerate(counts)}, k, all_pass=all_pass)
    if found is not None:
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0
        assert found.low < found.high


def test_95_percent_intervals_of_pass_at_2_cover_it_95_percent_of_the_time():
    draw = random.Random(7)
    covered = 0
    for _ in range(1000):
        hard = [draw.random() for _ in range(40)]  # pass@2 of the population is 1 - 1/3
        counts = {str(task): (4, sum(draw.random() < p for _ in range(4))) for task, p in enumerate(hard)}
        found = pass_estimate(counts, 2)
        covered += found.low <= 2 / 3 <= found.high
    assert 925 <= covered <= 975


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=10))
def test_the_p_value_of_passes_is_that_of_all_exchanges_of_the_two_runs(pairs):
    first = {str(number): [one] for number, (one, _) in enumerate(pairs)}
    second = {str(number): [two] for number, (_, two) in enumerate(pairs)}
    found = paired_difference(first, second)
    deltas = [two - one for one, two in pairs]
    sums = [abs(sum(s * d for s, d in zip(signs, deltas, strict=True)))
            for signs in itertools.product((-1, 1), repeat=len(pairs))]  # fmt: skip
    assert found.test == "exact McNemar"
    assert found.value == pytest.approx(fmean(deltas))
    assert found.p_value == pytest.approx(fmean(total >= abs(sum(deltas)) for total in sums))


def test_mcnemar_with_many_tasks_is_exact():
    assert mcnemar_p_value(0, 0) == 1.0
    assert mcnemar_p_value(2, 10) == pytest.approx(2 * (1 + 12 + 66) / 2**12)
    assert 0.0 < mcnemar_p_value(2000, 2300) < 1e-5


@given(st.lists(st.tuples(scores, scores), min_size=2, max_size=20))
def test_a_paired_difference_changes_its_sign_with_the_order_of_the_runs(pairs):
    first = {str(number): [one, 0.25] for number, (one, _) in enumerate(pairs)}
    second = {str(number): [two] for number, (_, two) in enumerate(pairs)}
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert there.value == pytest.approx(-back.value)
    assert there.p_value == pytest.approx(back.p_value)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert 0.0 <= there.p_value <= 1.0


def test_the_paired_t_test_gives_the_figures_of_a_textbook():
    """Student's sleep data (1908), as in R's `t.test(paired = TRUE)`: t = -4.0621, df = 9, p = 0.002833."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(
        *({str(n): [value] for n, value in enumerate(some)} for some in (first, second))
    )
    assert found.test == "paired t"
    assert found.p_value == pytest.approx(0.002833, abs=1e-6)
    assert (found.value, found.low, found.high) == pytest.approx((1.58, 0.7001142, 2.4598858), abs=1e-6)


def test_runs_without_a_common_task_have_no_difference():
    assert paired_difference({"a": [1.0]}, {"b": [1.0], "a": []}) is None
