"""What a page holds of a training run: groups, curves, ends and tools, without a browser."""

import pytest
from helpers.html_pages import page_of
from helpers.training_runs import training_run
from helpers.viewer_dumps import trajectory, write

from torchrl_agentic.records import Dump
from torchrl_agentic.viewer.curves import Curve, Point
from torchrl_agentic.viewer.html import page, write_page


def index_of(folder):
    return page_of(folder / "trajectories").index


def test_groups_have_the_advantages_and_the_step_of_their_batch(tmp_path):
    index = index_of(training_run(tmp_path))
    assert [group[0] for group in index["groups"]] == [0, 0, 1, 1, 2, 2]
    step, run, number, is_recorded, mean, spread, numbers, gains = index["groups"][1]
    assert (step, run, number, is_recorded, mean) == (0, 0, 1, True, 0.5)
    assert spread == pytest.approx(0.3536, abs=1e-4)
    assert gains == pytest.approx([-1.4138, 1.4138, 0, 0], abs=1e-4)
    assert [index["rows"][number][2] for number in numbers] == [0, 0, 0, 0]
    assert {row[8] for row in index["rows"][4:8]} == {"What is 1 × 7?"}
    assert {row[10] for row in index["rows"][4:8]} == {"sum-1"}


def test_curves_follow_the_steps_of_the_batches(tmp_path):
    (run,) = index_of(training_run(tmp_path))["runs"]
    found = {name: points for name, _, points in run["curves"]}
    assert [point[0] for point in found["Score"]] == [0, 1, 2]
    assert [point[1] for point in found["Score"]] == pytest.approx([0.75, 0.8, 0.85])
    assert [point[3] for point in found["Score"]] == [8, 8, 8]
    assert [point[1] for point in found["Share of groups with equal scores"]] == [0.5, 0.5, 0.5]
    assert [point[1] for point in found["Age of the oldest token, in updates"]] == [0, 1, 1]
    assert run["steps"] == [[0, 0, 8], [1, 1, 8], [2, 2, 8]]
    assert dict(zip(run["reasons"], run["endings"][0], strict=True)) == {"no_calls": 6, "max_turns": 2}
    assert [(tool[0], tool[1]) for tool in run["tools"]] == [("python", 24)]


def test_each_run_has_a_page_and_groups_of_its_own(tmp_path):
    for run in ("run-a", "run-b"):
        training_run(tmp_path, run=run, steps=2)
    index = index_of(tmp_path)
    assert index["run_names"] == ["run-a", "run-b"]
    assert [(run["id"], run["count"]) for run in index["runs"]] == [("run-a", 16), ("run-b", 16)]
    assert len(index["groups"]) == 8
    assert all(len(group[6]) == 4 for group in index["groups"])


def test_the_number_of_runs_with_a_page_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_RUNS", 1)
    for run in ("run-a", "run-b"):
        training_run(tmp_path, run=run, steps=1)
    index = index_of(tmp_path)
    assert index["run_names"] == ["run-a", "run-b"]
    assert [run["id"] for run in index["runs"]] == ["run-a"]


def test_many_steps_are_averaged(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_STEPS", 2)
    (run,) = index_of(training_run(tmp_path, steps=6, n_groups=1))["runs"]
    assert run["steps"] == [[0, 4, 20], [5, 5, 4]]


def test_a_dump_without_groups_has_computed_advantages(tmp_path):
    folder = write(tmp_path / "trajectories", trajectory("a", score=0.0), trajectory("b", score=1.0))
    index = page_of(folder).index
    ((_, _, name, is_recorded, *_, gains),) = index["groups"]
    assert (name, is_recorded) == (None, False)
    assert gains == pytest.approx([-0.9998, 0.9998], abs=1e-4)
    assert index["run_names"][0]


def test_metrics_belong_to_the_last_run(tmp_path):
    for run in ("run-a", "run-b"):
        training_run(tmp_path, run=run, steps=1)
    out = tmp_path / "page.html"
    with Dump(tmp_path / "trajectories") as dump:
        write_page(dump, out, name="mine", metrics=[Curve("loss", (Point(1, 2.5),))])
    text = out.read_text()
    assert "<title>mine – trajectories</title>" in text
    assert text.count('"metrics": [["loss", "", [[1, 2.5, null, 0]]]]') == 1
    assert text.index('"metrics": []') < text.index('"metrics": [["loss"')


def test_trajectories_that_left_in_no_batch_are_in_no_curve(tmp_path):
    training_run(tmp_path, steps=2)
    path = tmp_path / "trajectories" / "groups.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    (run,) = index_of(tmp_path)["runs"]
    assert (run["count"], run["unused"]) == (12, 4)
    found = {name: points for name, _, points in run["curves"]}
    assert [point[3] for point in found["Score"]] == [8, 4]
    assert [point[3] for point in found["Spread of scores within a group"]] == [2, 1]
