"""`report` shows a run, or two, in a terminal, as JSON and as a picture."""

import json
import sys
from pathlib import Path

import pytest
from helpers.trajectory_records import result, trajectory, turn
from PIL import Image
from typer.testing import CliRunner, Result

from torchrl_agentic.cli.main import app
from torchrl_agentic.messages import Status
from torchrl_agentic.records import Recorder


def _run(*words: object, width: int = 100) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, words)], env={"COLUMNS": str(width)})


def _dump(folder: Path, *, score: float, run_s: float, steps: int = 3, tool: str = "search") -> Path:
    with Recorder(folder) as recorder:
        for step in range(steps):
            recorder.step = step
            for n in range(20):
                calls = [
                    (tool, result(run_s=run_s)),
                    ("shell", result(Status.TIMEOUT if n % 4 == 0 else Status.OK)),
                ]
                recorder.write(trajectory(turn(*calls), step=step, score=float(n < 20 * score), name=f"t{n}"))
    return folder


def test_a_run_is_shown_over_its_steps_and_per_tool(tmp_path: Path):
    told = " ".join(_run(_dump(tmp_path / "a", score=0.25, run_s=0.04)).output.split())
    for words in (
        "60 trajectories of steps 0 to 2",
        "0.250",
        "25.0%",
        "12.5%",
        "no",
        "timeout",
        "search",
        "40",
    ):
        assert words in told
    assert "\x1b" not in told


@pytest.mark.parametrize("width", [80, 160])
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_cut(tmp_path: Path, width: int):
    one = _dump(tmp_path / "a", score=0.25, run_s=0.04, tool="code_interpreter")
    two = _dump(tmp_path / "b", score=0.75, run_s=0.4, tool="code_interpreter")
    for words in ([one], [one, two]):
        told = _run(*words, width=width).output.splitlines()
        tables = told[
            next(i for i, line in enumerate(told) if line.startswith(("Over steps", "All steps"))) :
        ]
        assert max(map(len, tables)) <= width
        assert "…" not in "".join(tables)


def test_comparison_of_two_runs_prints_each_change(tmp_path: Path):
    one, two = (
        _dump(tmp_path / "a", score=0.25, run_s=0.04),
        _dump(tmp_path / "b", score=0.75, run_s=0.4, steps=2),
    )
    told = " ".join(_run(one, two).output.split())
    assert "B is better: score 0.250 → 0.750 (+0.500)" in told
    assert "search run p50 40 → 400 ms (+360)" in told.partition("Times that are longer in B")[2]
    assert "within the noise" in told


def test_comparing_a_run_with_itself_shows_no_difference(tmp_path: Path):
    one = _dump(tmp_path / "a", score=0.25, run_s=0.04)
    assert "No difference exceeds the noise." in _run(one, one).output


def test_json_has_all_figures_and_nothing_else_is_printed(tmp_path: Path):
    one, two = _dump(tmp_path / "a", score=0.25, run_s=0.04), _dump(tmp_path / "b", score=0.75, run_s=0.4)
    data = json.loads(_run(one, "--json").stdout)
    assert [step["score"]["mean"] for step in data["steps"]] == [0.25] * 3
    both = json.loads(_run(one, two, "--json", "--by", 2).stdout)
    (score,) = [change for change in both["comparison"]["total"] if change["measure"] == "score"]
    assert (score["difference"], score["verdict"]) == (0.5, "better")
    assert [step["trajectories"] for step in both["second"]["steps"]] == [40, 20]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2])
def test_a_picture_is_drawn(tmp_path: Path, runs: int):
    """Names of tools are foreign: formulas, control characters and signs that no font has."""
    dumps = [
        _dump(tmp_path / name, score=0.5, run_s=0.1, tool="$\\frac{$\x1b\n\ud800漢🂡" * 9)
        for name in "ab"[:runs]
    ]
    done = _run(*dumps, "--png", tmp_path / "x.png")
    assert done.exit_code == 0, done.output
    with Image.open(tmp_path / "x.png") as image:
        assert image.width > 1000
        assert len(set(image.convert("L").tobytes())) > 20


def test_foreign_names_neither_reach_the_terminal_nor_break_the_tables(tmp_path: Path):
    told = _run(_dump(tmp_path / "a", score=0.5, run_s=0.1, tool="\x1b[2J[bold]\x07" + "x" * 500)).output
    assert not {"\x1b", "\x07"} & set(told)
    assert "[bold]" in told
    assert max(map(len, told.splitlines()[1:])) <= 100


def test_without_matplotlib_the_extra_is_named_before_anything_is_read(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = _run(tmp_path / "none", "--png", tmp_path / "x.png")
    assert done.exit_code == 2
    assert "torchrl-agentic[report]" in "".join(done.output.split())


def test_mistakes_exit_with_2(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    for words, told in (
        ([tmp_path / "none"], "none"),
        ([tmp_path / "bad.jsonl"], "bad.jsonl, line 1"),
        ([tmp_path / "bad.jsonl", "--png", "x.pdf"], ".png"),
    ):
        done = _run(*words)
        assert done.exit_code == 2, done.output
        assert told.replace(" ", "") in "".join(done.output.split())


def test_a_dump_without_a_line_is_an_empty_report(tmp_path: Path):
    (tmp_path / "0.jsonl").write_text("")
    done = _run(tmp_path, "--png", tmp_path / "x.png")
    assert done.exit_code == 0, done.output
    assert "0 trajectories" in done.output
