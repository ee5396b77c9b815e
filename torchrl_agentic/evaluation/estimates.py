"""Estimates from scores: pass@k and pass^k, means with confidence intervals, and paired differences.

Samples of one task are not independent: intervals treat the tasks as drawn from a population, and average the
epochs of each task first (standard errors clustered by task; Miller, 2024, "Adding Error Bars to Evals").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from torchrl_agentic.errors import check_count


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks, with its confidence interval.

    Attributes:
        value: The mean; each task counts once, however many samples it has.
        low: Lower end of the interval; None with less than two tasks of a score that is not 0 or 1.
        high: Upper end of the interval, or None.
        n_tasks: Number of tasks.
        n_samples: Number of samples.
    """

    value: float
    low: float | None
    high: float | None
    n_tasks: int
    n_samples: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference of two runs over the tasks that both have.

    Attributes:
        value: Mean of the second run less that of the first.
        low: Lower end of the confidence interval; None with less than two tasks.
        high: Upper end of the interval, or None.
        p_value: Probability of a difference at least as large if the runs are equally good.
        test: The test of `p_value`: "exact McNemar" if each difference is -1, 0 or 1, else "paired t".
        n_tasks: Number of tasks.
    """

    value: float
    low: float | None
    high: float | None
    p_value: float
    test: str
    n_tasks: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of `k` samples passes, drawn from `n` of which `c` pass.

    Averaged over tasks, it is the unbiased estimator of pass@k (Chen et al., 2021, "Evaluating Large Language
    Models Trained on Code").

    Args:
        n: Number of samples.
        c: Number of them that pass.
        k: Number of samples that are drawn.

    Raises:
        ValueError: If not 1 <= k <= n and 0 <= c <= n.
    """
    _check_counts(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Return the probability that all of `k` samples pass, drawn from `n` of which `c` pass: pass^k.

    It measures reliability (Yao et al., 2024, "τ-bench").

    Args:
        n: Number of samples.
        c: Number of them that pass.
        k: Number of samples that are drawn.

    Raises:
        ValueError: If not 1 <= k <= n and 0 <= c <= n.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check_counts(n: int, c: int, k: int) -> None:
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"k is from 1 to n, and c from 0 to n; got n={n}, c={c}, k={k}")


def wilson_interval(share: float, n: float, *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the score interval of a share (Wilson, 1927).

    Args:
        share: The share, from 0 to 1.
        n: Number of independent samples, or the effective number of correlated ones.
        confidence: Confidence level.

    Raises:
        ValueError: If `share` is not from 0 to 1, or `n` is not above 0.
    """
    if not (0.0 <= share <= 1.0 and n > 0):
        raise ValueError(f"share is from 0 to 1, and n above 0; got share={share}, n={n}")
    z = _normal_quantile(confidence)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not push the ends past the share itself, as with a share of 0 or 1.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def mean_estimate(scores: Mapping[str, Sequence[float]], *, confidence: float = 0.95) -> Estimate | None:
    """Return the mean of a score over tasks.

    If all scores are 0 or 1, the interval is Wilson's, with the effective number of samples under clustering
    by task (Dean and Pagano, 2015): from the number of tasks, if epochs agree, up to that of samples. Without
    epochs that is Wilson's own. Otherwise, it is Student's t interval over the means of the tasks.

    Args:
        scores: Scores of the samples of each task, by its name; tasks without samples are left out.
        confidence: Confidence level.

    Returns:
        The estimate; None without samples.
    """
    clusters = [list(map(float, values)) for values in scores.values() if values]
    if not clusters:
        return None
    means = [fmean(values) for values in clusters]
    n_samples = sum(map(len, clusters))
    if all(one in (0.0, 1.0) for values in clusters for one in values):
        interval = _clustered_interval(means, n_samples, confidence)
    else:
        interval = _t_interval(means, confidence)
    return Estimate(fmean(means), *interval, len(clusters), n_samples)


def pass_estimate(
    counts: Mapping[str, tuple[int, int]], k: int, *, all_pass: bool = False, confidence: float = 0.95
) -> Estimate | None:
    """Return pass@k, or pass^k, over the tasks that have at least `k` samples.

    The interval is Wilson's (1927), with the effective number of samples under clustering by task (Dean and
    Pagano, 2015), as in `mean_estimate`: from the variance of the estimates of the tasks, it is at least the
    number of tasks, and at most that of disjoint groups of `k` samples, over which the estimate of a task
    varies no more than their mean (Hoeffding, 1948). So it has a width if all tasks pass or fail, and equals
    that of the mean for k = 1.

    Args:
        counts: Number of samples, and number of them that pass, of each task by its name.
        k: Number of samples that are drawn.
        all_pass: Whether all of them must pass (pass^k) rather than one (pass@k).
        confidence: Confidence level of the interval.

    Returns:
        The estimate; None if no task has `k` samples.
    """
    check_count("k", k, optional=False)
    share = pass_hat_k if all_pass else pass_at_k
    enough = [(n, c) for n, c in counts.values() if n >= k]
    if not enough:
        return None
    values = [share(n, c, k) for n, c in enough]
    interval = _clustered_interval(values, sum(n // k for n, _ in enough), confidence)
    return Estimate(fmean(values), *interval, len(enough), sum(n for n, _ in enough))


def paired_difference(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], *, confidence: float = 0.95
) -> Difference | None:
    """Compare the scores of two runs, task by task, with the epochs of a task averaged.

    Args:
        first: Scores of the samples of each task of the first run.
        second: Scores of the second run.
        confidence: Confidence level of the interval, Student's t over the differences of the tasks.

    Returns:
        The difference over the tasks that both have; None if they share no task.
    """
    shared = [name for name in first if first[name] and second.get(name)]
    if not shared:
        return None
    deltas = [fmean(second[name]) - fmean(first[name]) for name in shared]
    low, high = _t_interval(deltas, confidence)
    if all(delta in (-1.0, 0.0, 1.0) for delta in deltas):
        test, p_value = "exact McNemar", mcnemar_p_value(deltas.count(1.0), deltas.count(-1.0))
    else:
        test, p_value = "paired t", _paired_t_p_value(deltas)
    return Difference(fmean(deltas), low, high, p_value, test, len(shared))


def mcnemar_p_value(wins: int, losses: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: the sign test of the tasks that differ.

    Args:
        wins: Number of tasks that only the second run solves.
        losses: Number of tasks that only the first run solves.
    """
    n = wins + losses
    tail = sum(math.comb(n, i) for i in range(min(wins, losses) + 1))
    return float(min(1.0, 2 * tail / 2**n)) if n else 1.0


def _paired_t_p_value(deltas: Sequence[float]) -> float:
    if len(deltas) < 2:
        return 1.0
    middle, error = fmean(deltas), stdev(deltas) / math.sqrt(len(deltas))
    if error == 0.0:  # all differ alike: the sign test
        return 1.0 if middle == 0.0 else mcnemar_p_value(len(deltas), 0)
    return 2.0 * student_t_tail(abs(middle) / error, len(deltas) - 1)


def _clustered_interval(shares: Sequence[float], most: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval of a mean of shares, of an effective number of samples up to `most`."""
    value, n_tasks = fmean(shares), len(shares)
    effective = float(n_tasks if n_tasks > 1 else most)
    if n_tasks > 1 and (squared := stdev(shares) ** 2 / n_tasks) > 0:
        effective = min(max(value * (1 - value) / squared, n_tasks), most)
    return wilson_interval(value, effective, confidence=confidence)


def _t_interval(values: Sequence[float], confidence: float) -> tuple[float | None, float | None]:
    """Return Student's t interval of a mean; None twice with less than two values."""
    if len(values) < 2:
        return None, None
    half = student_t_quantile(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def student_t_tail(t: float, df: int) -> float:
    """Return the probability that Student's t variable exceeds `t`.

    Args:
        t: Value, 0 or more.
        df: Degrees of freedom.
    """
    if t * t < df:  # the argument that is not close to 1 keeps its digits
        return 0.5 - 0.5 * _incomplete_beta(0.5, df / 2.0, t * t / (df + t * t))
    return 0.5 * _incomplete_beta(df / 2.0, 0.5, df / (df + t * t))


def student_t_quantile(confidence: float, df: int) -> float:
    """Return the value that Student's t variable exceeds neither above nor, negated, below.

    Args:
        confidence: Probability of that, above 0 and below 1.
        df: Degrees of freedom.
    """
    tail = (1.0 - confidence) / 2.0
    low, high = 0.0, 1.0
    while student_t_tail(high, df) > tail:
        high *= 2.0
    for _ in range(100):  # bisection, to the last bit
        middle = (low + high) / 2.0
        low, high = (middle, high) if student_t_tail(middle, df) > tail else (low, middle)
    return (low + high) / 2.0


def _normal_quantile(confidence: float) -> float:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is above 0 and below 1; got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2.0)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function, by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):  # where the fraction converges slowly; I_x(a, b) = 1 - I_1-x(b, a)
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Convergents numerator / denominator by their recurrence, scaled so that neither overflows.
    older_top, top, older_bottom, bottom = 1.0, 1.0, 0.0, 1.0
    value = 1.0
    for step in range(1, 10_000):
        m = step // 2
        if step % 2:
            factor = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            factor = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        older_top, top = top, top + factor * older_top
        older_bottom, bottom = bottom, bottom + factor * older_bottom
        older_top, top, older_bottom, bottom = (
            part / bottom for part in (older_top, top, older_bottom, bottom)
        )
        if abs(top - value) <= 1e-15 * abs(top):
            value = top
            break
        value = top
    return math.exp(log_front) / (a * value)
