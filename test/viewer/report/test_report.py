"""A report adds a dump up: each figure is what its docstring says, and nothing foreign spoils it."""

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.processes import run_program
from helpers.training_runs import training_run
from helpers.trajectory_records import result, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from torchrl_agentic.messages import Status
from torchrl_agentic.records import Recorder
from torchrl_agentic.records.call_stats import EXACT, Distribution
from torchrl_agentic.viewer.report import Tally, read_report, read_tally
from torchrl_agentic.viewer.report.tables import report_tables
from torchrl_agentic.viewer.report.tally import MOST_TOOLS, OTHERS, rows_of


def _report(*records, by=1):
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally.report(by=by)


def test_steps_are_reported_in_their_order_each_with_its_own_figures():
    report = _report(
        trajectory(step=10, score=1.0), trajectory(step=2, score=0.0), trajectory(step=2, score=0.5)
    )
    assert [step.name for step in report.steps] == ["2", "10"]
    assert [step.trajectories for step in report.steps] == [2, 1]
    assert [step.score.mean for step in report.steps] == [0.25, 1.0]
    assert [step.positive.mean for step in report.steps] == [0.5, 1.0]
    assert report.total.score.mean == 0.5
    assert (report.total.first, report.total.last) == (2, 10)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, 1e300])
def test_invalid_score_does_not_change_the_mean(score: float):
    total = _report(trajectory(score=1.0), trajectory(score=score), trajectory(score=None)).total
    assert (total.score.mean, total.score.count, total.positive.mean) == (1.0, 1, 1.0)
    assert (total.not_finite, total.unscored) == (1, 1)


@pytest.mark.parametrize("reason", ["failed", "abandoned", "reset", "closed"])
def test_the_score_of_a_trajectory_that_did_not_end_enters_no_mean_and_no_ranking(reason: str):
    unfinished = replace(trajectory(score=-5.0), termination_reason=reason, extras={"acc": 1.0})
    report = _report(trajectory(score=1.0), unfinished, trajectory(score=0.0))
    total = report.total
    assert (total.score.mean, total.positive.mean, total.trajectories) == (0.5, 0.5, 3)
    assert (total.unfinished, total.unscored, total.right.count) == (1, 0, 0)
    assert [one.score for one in report.worst] == [0.0, 1.0]
    shown = io.StringIO()
    Console(file=shown, width=100).print(report_tables(report))
    assert "Scores leave out trajectories: 1 that did not end." in shown.getvalue()


def test_the_standard_error_is_that_of_the_textbook():
    total = _report(*(trajectory(score=score) for score in (1.0, 2.0, 4.0, 5.0))).total
    assert total.score.error == pytest.approx(math.sqrt(10 / 3) / 2)
    assert _report(trajectory(score=1.0)).total.score.error is None


def test_trajectories_are_counted_by_the_run_that_recorded_them():
    some = [replace(trajectory(), run=run) for run in ("a", "b", "b", "")]
    assert _report(*some).runs == {"b": 2, "a": 1}
    first, second = Tally(), Tally()
    first.add(some[0])
    second.add(some[1])
    first.merge(second)
    assert first.report().runs == {"a": 1, "b": 1}
    shown = io.StringIO()
    Console(file=shown, width=100).print(report_tables(_report(*some)))
    assert "The dump mixes 2 runs: b (2), a (1)" in shown.getvalue()
    Console(file=shown, width=100).print(report_tables(_report(some[0])))
    assert shown.getvalue().count("mixes") == 1


def test_right_answers_are_those_that_acc_notes():
    report = _report(trajectory(acc=True), trajectory(acc=0.0), trajectory(acc="yes"), trajectory())
    assert (report.total.right.mean, report.total.right.count) == (0.5, 2)


def test_infra_calls_do_not_count_in_the_error_rate():
    calls = [
        ("f", result()),
        ("f", result(Status.ERROR)),
        ("f", result(Status.INFRA)),
        ("f", result(Status.INFRA)),
    ]
    report = _report(trajectory(turn(*calls)))
    assert report.total.errors.mean == 0.5
    assert report.total.infra.mean == 0.5
    assert report.total.statuses == {"ok": 1, "error": 1, "infra": 2}
    (tool,) = report.tools
    assert (tool.calls, tool.errors, tool.infra) == (4, 1, 2)


def test_turns_calls_and_tokens_are_per_trajectory():
    long = trajectory(
        turn(("f", result())), turn(("f", result()), index=1), turn(index=2), sampled=30, injected=10
    )
    total = _report(long, trajectory(turn())).total
    assert (total.turns.mean, total.calls.mean) == (2.0, 1.0)
    assert (total.sampled.mean, total.sampled.count, total.injected.mean) == (30.0, 1, 10.0)


def test_times_of_each_tool_are_quantiles_of_its_calls():
    slow = [("slow", result(run_s=n / 100, queue_s=n / 1000)) for n in range(101)]
    report = _report(trajectory(turn(*slow, ("fast", result(run_s=0.5)))))
    tools = {tool.tool: tool for tool in report.tools}
    run, queue = tools["slow"].run, tools["slow"].queue
    assert (run.p50, run.p95, run.p99, run.count, run.is_exact) == (0.5, 0.95, 0.99, 101, True)
    assert queue.p95 == pytest.approx(0.095)
    assert tools["fast"].run.p50 == 0.5


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_invalid_durations_are_omitted_from_the_times(seconds: float):
    (tool,) = _report(trajectory(turn(("f", result(run_s=seconds)), ("f", result(run_s=2.0))))).tools
    assert (tool.run.p50, tool.run.count, tool.calls) == (2.0, 1, 2)


def test_reasons_are_counted_and_a_missing_one_is_unknown():
    report = _report(trajectory(reason="stop_tool"), trajectory(reason=""), trajectory(reason="stop_tool"))
    assert report.total.reasons == {"stop_tool": 2, "unknown": 1}


def test_names_that_a_model_makes_up_do_not_make_the_report_endless():
    calls = [(f"made_up_{n}", result(Status.UNKNOWN_TOOL)) for n in range(MOST_TOOLS + 7)]
    report = _report(trajectory(turn(*calls, ("f", result()), ("f", result()))))
    assert len(report.tools) == MOST_TOOLS + 1
    assert report.tools[0].tool == "f"
    assert (report.tools[-1].tool, report.tools[-1].calls) == (OTHERS, 8)
    assert sum(tool.calls for tool in report.tools) == MOST_TOOLS + 9


def test_steps_in_a_row_are_one_from_a_multiple_on():
    report = _report(*(trajectory(step=step, score=float(step)) for step in (8, 9, 10, 14, 25)), by=10)
    assert [step.name for step in report.steps] == ["8–9", "10–14", "25"]
    assert [step.score.mean for step in report.steps] == [8.5, 12.0, 25.0]


@pytest.mark.parametrize(("steps", "by"), [(0, 1), (1, 1), (24, 1), (25, 2), (100, 5), (1000, 50)])
def test_so_many_steps_are_a_row_that_all_fit(steps: int, by: int):
    tally = Tally()
    for step in range(steps):
        tally.add(trajectory(step=step))
    assert rows_of(tally) == by


def _dump(folder: Path, *records) -> Path:
    with Recorder(folder) as recorder:
        for record in records:
            recorder.step = record.step
            recorder.write(record)
    return folder


def test_dump_is_read_file_by_file_and_broken_lines_are_reported(tmp_path: Path):
    _dump(tmp_path, trajectory(step=1, score=math.nan), trajectory(step=2, score=1.0))
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"schema_version": 3, "requ\n')
    report = read_report(tmp_path)
    assert [step.name for step in report.steps] == ["1", "2"]
    assert (report.total.trajectories, report.total.not_finite, report.broken) == (2, 1, 1)
    assert "1.jsonl, line 2" in report.complaints[0]
    assert "cut off" in report.complaints[0]


def test_file_of_another_format_is_not_a_dump(tmp_path: Path):
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="is not a dump"):
        read_report(tmp_path)


def test_dump_of_texts_reports_only_scores(tmp_path: Path):
    """verl writes a file per step; neither turns nor calls are in it."""
    for step in (7, 8):
        line = {"input": "q", "output": "a", "gts": "1", "score": step / 10, "acc": step == 8, "step": step}
        (tmp_path / f"{step}.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "9.jsonl").write_text('{"input": "q", "output": "a", "score": "NaN"}\n')
    report = read_report(tmp_path)
    assert [(step.name, step.score.mean) for step in report.steps] == [("7", 0.7), ("8", 0.8), ("9", None)]
    assert report.total.right.mean == 0.5
    assert report.total.turns.count == report.total.calls.count == report.total.sampled.count == 0
    assert report.tools == ()


_statuses = st.sampled_from([*Status])
_calls = st.lists(st.tuples(st.sampled_from("fgh"), _statuses, st.floats(0, 10)), max_size=3)


@st.composite
def _trajectories(draw: st.DrawFn):
    turns = [
        turn(*((tool, result(status, run_s=run_s)) for tool, status, run_s in calls), index=index)
        for index, calls in enumerate(draw(st.lists(_calls, min_size=1, max_size=3)))
    ]
    return trajectory(
        *turns,
        step=draw(st.integers(0, 3)),
        score=draw(
            st.none() | st.sampled_from([math.nan, math.inf]) | st.integers(-40, 40).map(lambda n: n / 4)
        ),
        reason=draw(st.sampled_from(["", "stop_tool", "no_calls"])),
        sampled=draw(st.integers(0, 3)),
        injected=draw(st.integers(0, 3)),
    )


def _figures(report):
    """All of a report; means to six digits, as the last ones of a sum depend on its order."""
    text = json.dumps(report.to_json())
    return json.loads(text, parse_float=lambda digits: round(float(digits), 6))


@given(st.lists(_trajectories(), max_size=8), st.data())
def test_the_report_of_a_dump_is_that_of_its_parts_in_any_order(records, data):
    shuffled = data.draw(st.permutations(records))
    cut = data.draw(st.integers(0, len(records)))
    parts = [Tally(), Tally()]
    for record in shuffled[:cut]:
        parts[0].add(record)
    for record in shuffled[cut:]:
        parts[1].add(record)
    parts[0].merge(parts[1])
    assert _figures(parts[0].report()) == _figures(_report(*records))


def test_a_part_that_is_merged_is_not_changed_by_it():
    part, whole = Tally(), Tally()
    part.add(trajectory(turn(("f", result())), score=1.0))
    before = part.report()
    whole.merge(part)
    whole.merge(part)
    whole.add(trajectory(turn(("f", result())), score=0.0))
    assert part.report() == before


@settings(deadline=None, max_examples=settings.default.max_examples // 2)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50))
def test_quantiles_of_very_many_values_are_within_a_hundredth(values):
    """Beyond the bound, and whether they came as one or were merged."""
    many = values * (EXACT // len(values) + 1)
    whole, merged = Distribution(many), Distribution(many[:100])
    merged.merge(Distribution(many[100:]))
    ordered = sorted(many)
    assert not whole.is_exact
    for q in (0.0, 0.5, 0.95, 0.99, 1.0):
        exact = ordered[round(q * (len(many) - 1))]
        assert whole.quantile(q) == pytest.approx(exact, rel=0.0101)
        assert merged.quantile(q) == whole.quantile(q)
    assert len(merged) == len(many)


def test_zero_has_a_bucket_and_nothing_has_no_quantile():
    assert Distribution([0.0] * 5000).quantile(0.99) == 0.0
    assert Distribution().quantile(0.5) is None


def test_reading_a_report_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys, torchrl_agentic.viewer.report.chart, torchrl_agentic.cli.view\n"
        "print(sorted({'torch', 'tensordict', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = run_program([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_worst_and_the_best_are_reported_with_their_questions():
    some = [trajectory(step=step, score=float(step), name=f"t{step}") for step in range(12)]
    report = _report(*some)
    assert [one.score for one in report.worst] == [0, 1, 2, 3, 4]
    assert [one.score for one in report.best] == [11, 10, 9, 8, 7]
    assert (report.best[0].request_id, report.best[0].question) == ("t11-11", "q")
    shown = io.StringIO()
    Console(file=shown, width=120).print(report_tables(report))
    assert "Lowest scores" in shown.getvalue()
    assert "t11-11" in shown.getvalue()


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan, None]), max_size=20), st.integers(0, 20))
def test_the_ranking_is_that_of_all_scores_in_any_parts(scores, cut):
    some = [trajectory(step=step, score=score, name=f"t{step}") for step, score in enumerate(scores)]
    parts = Tally(), Tally()
    for place, one in enumerate(some):
        parts[place >= cut].add(one)
    parts[0].merge(parts[1])
    report = parts[0].report()
    known = [(score, step) for step, score in enumerate(scores) if score is not None and score == score]
    if len({score for score, _ in known}) < 2:
        assert (report.worst, report.best) == ((), ())
        return
    assert [(one.score, one.step) for one in report.worst] == sorted(known)[:5]
    best = sorted(known, key=lambda one: (-one[0], one[1]))[:5]
    assert [(one.score, one.step) for one in report.best] == best


def test_one_of_several_runs_can_be_reported(tmp_path):
    for run in ("run-a", "run-b"):
        training_run(tmp_path, run=run, steps=2)
    dump = tmp_path / "trajectories"
    assert read_tally(dump).runs == {"run-a": 16, "run-b": 16}
    assert read_tally(dump, run="run-b").runs == {"run-b": 16}
    with pytest.raises(ValueError, match="no trajectory of a run 'c'; it has those of run-a, run-b"):
        read_tally(dump, run="c")


def test_trajectories_count_in_the_step_of_their_batch(tmp_path):
    report = read_report(training_run(tmp_path, steps=3, ahead=2) / "trajectories")
    assert [(step.first, step.trajectories) for step in report.steps] == [(0, 8), (1, 8), (2, 8)]
    assert [step.age.mean for step in report.steps] == [0, 1, 2]


def test_trajectories_that_left_in_no_batch_are_not_counted(tmp_path):
    training_run(tmp_path, run="r", steps=2)
    dump = tmp_path / "trajectories"
    file = min(dump.glob("[0-9]*.jsonl"))
    line = json.loads(file.read_text().splitlines()[0])
    before = read_report(dump)
    with file.open("a") as lines:
        for change in ({"trajectory": "ahead"}, {"trajectory": "ahead", "run": "an evaluation"}):
            lines.write(json.dumps({**line, **change}) + "\n")
    after = read_report(dump)
    assert (before.unused, after.unused) == (0, 1)
    assert after.total.trajectories == before.total.trajectories + 1
    shown = io.StringIO()
    Console(file=shown, width=120).print(report_tables(after))
    assert "Left in no batch, and not counted: 1." in shown.getvalue()
