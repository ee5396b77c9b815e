"""Curves of a training run: from its trajectories, and from what its trainer logged."""

import math

import pytest
from helpers.trajectory_records import trajectory
from hypothesis import given
from hypothesis import strategies as st
from torchrl.record.loggers.csv import CSVLogger

from torchrl_agentic.records import Origin
from torchrl_agentic.viewer.curves import MOST_METRICS, Point, curves, group_curves, read_metrics, thinned
from torchrl_agentic.viewer.report import Tally
from torchrl_agentic.viewer.samples import SampleGroups


def by_name(found):
    return {curve.name: curve for curve in found}


def tally_of(scores):
    tally = Tally()
    for step, score in scores:
        tally.add(trajectory(step=step, score=score))
    return tally


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100)), min_size=1, max_size=40))
def test_a_curve_has_the_mean_and_the_spread_of_each_step(scores):
    curve = by_name(curves(tally_of(scores).report()))["Score"]
    assert [point.step for point in curve.points] == sorted({step for step, _ in scores})
    for point in curve.points:
        some = [score for step, score in scores if step == point.step]
        mean = sum(some) / len(some)
        assert point.n_values == len(some)
        assert point.value == pytest.approx(mean, abs=1e-9)
        if len(some) > 1:
            spread = math.sqrt(sum((score - mean) ** 2 for score in some) / (len(some) - 1))
            assert point.spread == pytest.approx(spread, abs=1e-6)


def test_curves_without_a_value_are_left_out():
    names = set(by_name(curves(tally_of([(0, None)]).report())))
    assert "Score" not in names
    assert "Age of the oldest token, in updates" not in names
    assert "Turns per trajectory" in names


def test_ages_and_versions_come_from_the_origin_and_the_batch():
    tally = Tally()
    for versions in ((3,), (2, 3)):
        one = trajectory(step=0, score=1.0)
        made = type(one)(
            one.request_id, one.turns, score=1.0, origin=Origin("t", 0, 0, versions, 2.5), rewards=one.rewards
        )
        tally.add(made, 5, 4)
    found = by_name(curves(tally.report()))
    assert found["Policy version"].points[0].value == 3
    assert found["Age of the oldest token, in updates"].points == (
        Point(5, 1.5, pytest.approx(0.7071, abs=1e-4), 2),
    )
    assert found["Seconds per trajectory"].points[0].value == 2.5


def test_curves_of_groups_count_those_that_teach_nothing():
    groups = SampleGroups()
    number = 0
    for step, some in ((1, [0, 1]), (1, [1, 1]), (2, [1, 1]), (2, [0.5])):
        for score in some:
            one = trajectory(step=step, score=score).summary
            groups.add(
                number, type(one)(**{**_fields(one), "group": f"g{number if len(some) == 1 else step}{some}"})
            )
            number += 1
    spread, flat = group_curves(groups)
    assert [(point.step, point.value, point.n_values) for point in flat.points] == [(1, 0.5, 2), (2, 1.0, 1)]
    assert [point.value for point in spread.points] == [0.25, 0]


def _fields(summary):
    return {name: getattr(summary, name) for name in type(summary).__dataclass_fields__}


@given(st.integers(0, 300), st.integers(1, 50))
def test_thinned_points_keep_the_ends_and_their_order(count, most):
    points = [Point(step, step) for step in range(count)]
    found = thinned(points, most)
    assert len(found) <= most + 1
    assert list(found) == sorted(set(found))
    assert found[:1] == tuple(points[:1])
    assert found[-1:] == tuple(points[-1:])


def test_scalars_of_a_csv_logger_are_curves(tmp_path):
    logger = CSVLogger("experiment", log_dir=str(tmp_path))
    for step in range(3):
        logger.log_scalar("train/reward", step / 2, step=10 * step)
        logger.log_scalar("loss", math.nan if step == 1 else -step, step=step)
    found = by_name(read_metrics(tmp_path))
    assert [point[:2] for point in found["train/reward"].points] == [(0, 0), (10, 0.5), (20, 1)]
    assert [point[:2] for point in found["loss"].points] == [(0, 0), (2, -2)]
    assert by_name(read_metrics(tmp_path / "experiment")) == found


def test_scalars_of_two_experiments_keep_their_names(tmp_path):
    for name in ("a", "b"):
        CSVLogger(name, log_dir=str(tmp_path)).log_scalar("loss", 1.0, step=0)
    assert set(by_name(read_metrics(tmp_path))) == {"a: loss", "b: loss"}


def test_a_table_of_metrics_is_curves(tmp_path):
    (tmp_path / "metrics.csv").write_text(
        "loss, step ,reward,note\n0.5,1,,ok\n0.25,2,1.0,\nbroken\n,x,3,4\n0.1,2,2.0\n"
    )
    found = by_name(read_metrics(tmp_path))
    assert [point[:2] for point in found["loss"].points] == [(1, 0.5), (2, 0.1)]
    assert [point[:2] for point in found["reward"].points] == [(2, 2.0)]
    assert "note" not in found


def test_a_table_without_steps_counts_its_rows(tmp_path):
    (tmp_path / "metrics.csv").write_text("loss\n3\n2\n")
    assert [point[:2] for point in read_metrics(tmp_path)[0].points] == [(0, 3), (1, 2)]


def test_files_that_are_no_metrics_give_no_curve(tmp_path):
    assert read_metrics(tmp_path) == []
    (tmp_path / "metrics.csv").write_bytes(b"\x00\xff\n" + b'"' * 100)
    (tmp_path / "scalars").mkdir()
    (tmp_path / "scalars" / "x.csv").write_text("a,b,c\n1\nnan,1\n1,inf\n")
    assert read_metrics(tmp_path) == []
    assert read_metrics(tmp_path / "missing") == []


def test_the_number_of_metrics_is_bounded(tmp_path):
    names = [f"m{n}" for n in range(2 * MOST_METRICS)]
    (tmp_path / "metrics.csv").write_text(f"step,{','.join(names)}\n1,{','.join('2' for _ in names)}\n")
    assert len(read_metrics(tmp_path)) == MOST_METRICS
