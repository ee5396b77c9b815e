"""The folder of a training run: where its dump and its metrics are."""

import pytest
from helpers.viewer_dumps import trajectory, write

from torchrl_agentic.cli.view import show_report, view
from torchrl_agentic.viewer.run_folder import RunFolder


def show(path, query=""):
    return view(path, mask="", query=query, sort="none", html=None, as_text=True)


def test_a_dump_is_its_own_folder(tmp_path):
    write(tmp_path / "dump", trajectory("a"))
    assert RunFolder.of(tmp_path / "dump") == RunFolder(tmp_path / "dump", tmp_path / "dump", "dump")
    file = tmp_path / "dump" / "0.jsonl"
    assert RunFolder.of(file) == RunFolder(file, tmp_path / "dump", "0.jsonl")


def test_the_dump_of_a_run_is_in_its_trajectories(tmp_path):
    write(tmp_path / "run" / "trajectories", trajectory("a"))
    write(tmp_path / "run" / "evaluation", trajectory("b"))
    (tmp_path / "run" / "metrics.csv").write_text("step,loss\n1,2\n")
    found = RunFolder.of(tmp_path / "run")
    assert found == RunFolder(tmp_path / "run" / "trajectories", tmp_path / "run", "run")
    assert [curve.name for curve in found.curves()] == ["loss"]
    inner = RunFolder.of(tmp_path / "run" / "trajectories")
    assert (inner.dump, inner.name) == (found.dump, "run/trajectories")
    assert inner.curves() == found.curves()


def test_a_run_that_has_just_begun_has_an_empty_folder_of_trajectories(tmp_path):
    (tmp_path / "trajectories").mkdir()
    assert RunFolder.of(tmp_path).dump == tmp_path / "trajectories"


def test_the_only_dump_in_a_folder_is_found_and_several_are_named(tmp_path):
    write(tmp_path / "first", trajectory("a"))
    (tmp_path / "other").mkdir()
    assert RunFolder.of(tmp_path).dump == tmp_path / "first"
    write(tmp_path / "second", trajectory("a"))
    with pytest.raises(ValueError, match="several dumps: first, second"):
        RunFolder.of(tmp_path)


def test_a_folder_without_a_dump_stays_what_it_is(tmp_path):
    assert RunFolder.of(tmp_path).dump == tmp_path
    with pytest.raises(FileNotFoundError):
        RunFolder.of(tmp_path / "missing")


def test_the_command_shows_the_run_and_a_step_of_it(tmp_path, capsys):
    write(tmp_path / "trajectories", *(trajectory(f"of-{step}", step=step) for step in (1, 2, 10)))
    assert show(tmp_path, "step:2") == 0
    said = capsys.readouterr().out
    assert "of-2" in said
    assert "of-1" not in said
    assert "question: What is 6 × 7?" in said
    assert show_report(tmp_path, None, None, as_json=False, by=None) == 0
    assert "steps 1 to 10" in capsys.readouterr().out


def test_the_page_of_a_run_has_its_metrics(tmp_path):
    write(tmp_path / "trajectories", trajectory("a"))
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2.5\n")
    page = tmp_path / "page.html"
    assert view(tmp_path, mask="", query="", sort="none", html=page, as_text=False) == 0
    assert '"metrics": [["loss", "", [[1, 2.5, null, 0]]]]' in page.read_text()
