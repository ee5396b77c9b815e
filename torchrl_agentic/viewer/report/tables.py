"""Show reports as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchrl_agentic.records.call_stats import EXACT
from torchrl_agentic.text import printable, truncate
from torchrl_agentic.viewer.report.compare import Change, Comparison
from torchrl_agentic.viewer.report.statistics import (
    NONE,
    Report,
    ScoredTrajectory,
    StepReport,
    ToolReport,
    count,
    milliseconds,
    number,
    percent,
)

ALL = "all"
_STYLES = {"better": "green", "worse": "red"}
_WORDS = {"same": "within the noise"}
_WRITTEN = {"count": count, "number": number, "share": percent, "seconds": milliseconds}
_IN_STEPS = ("score", "errors", "turns")
_LEFT = ("measure", "B is")
_QUANTILES = ("p50", "p95", "p99")
_LONGEST_NAME = 24
Rows = Mapping[str, Mapping[str, str | Text]]
"""Name of a row → name of a column → content of the cell."""
_MOST_RUNS = 5
_ID_CHARS = 12


def report_tables(report: Report) -> Group:
    """Return the tables of a run: by step, by status, by reason, by tool."""
    steps = {step.name: step for step in report.steps}
    if len(steps) > 1:
        steps[ALL] = report.total
    parts: list[RenderableType] = [*_headline(report), Text()]
    parts.append(_grid(_over_steps(report.by), "step", {name: _step(step) for name, step in steps.items()}))
    if report.total.statuses:
        statuses = {name: step.statuses for name, step in steps.items()}
        parts.append(_grid("Calls by status", "step", _counts(report.total.statuses, statuses)))
    if report.total.reasons.keys() - {"unknown"}:
        reasons = {name: step.reasons for name, step in steps.items()}
        parts.append(_grid("How trajectories ended", "step", _counts(report.total.reasons, reasons)))
    if report.tools:
        parts.append(tool_tables(report.tools))
    if report.best:
        with_run = len(report.runs) > 1
        parts.append(_ranking("Lowest scores", report.worst, with_run=with_run))
        parts.append(_ranking("Highest scores", report.best, with_run=with_run))
    return Group(*parts)


def _ranking(title: str, ranked: Sequence[ScoredTrajectory], *, with_run: bool) -> Group:
    """Return a table of trajectories with their questions; `view --query id:…` shows one."""
    made = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    made.add_column("score", justify="right", no_wrap=True)
    made.add_column("step", justify="right", no_wrap=True)
    if with_run:
        made.add_column("run", no_wrap=True)
    made.add_column("id", no_wrap=True)
    made.add_column("question", no_wrap=True, overflow="ellipsis")
    for one in ranked:
        run = (Text(truncate(printable(one.run), 8)),) if with_run else ()
        name = Text(printable(one.request_id)[:_ID_CHARS])
        made.add_row(number(one.score), str(one.step), *run, name, Text(printable(one.question)))
    return Group(Text(title, style="bold"), made)


def tool_tables(tools: Sequence[ToolReport]) -> Group:
    """Return tables of the calls by tool: durations and statuses."""
    times: dict[str, dict[str, str | Text]] = {}
    for tool in tools:
        times[tool.tool] = {
            "calls": count(tool.calls),
            **{f"run\n{q}": milliseconds(getattr(tool.run, q)) for q in _QUANTILES},
            **{f"queue\n{q}": milliseconds(getattr(tool.queue, q)) for q in _QUANTILES},
        }
    kinds = dict.fromkeys(status for tool in tools for status in tool.statuses)
    statuses = {tool.tool: tool.statuses for tool in tools}
    return Group(
        _grid("Calls per tool, times in ms", "tool", times),
        _grid("Calls per tool, by status", "tool", _counts(kinds, statuses)),
    )


def comparison_tables(first: Report, second: Report, comparison: Comparison) -> Group:
    """Return the tables of two runs side by side: A, B, and their differences.

    Args:
        first: Report of run A.
        second: Report of run B.
        comparison: Their comparison.
    """
    parts: list[RenderableType] = []
    for letter, report in (("A", first), ("B", second)):
        head, *more = _headline(report)
        parts += [Text.assemble((f"{letter}: ", "bold"), head), *more]
    parts += [Text(), *_verdicts(comparison), Text()]
    parts.append(
        _grid("All steps", "measure", [(one.measure, _cells(one)) for one in _known(comparison.total)])
    )
    steps = {name: _beside(changes) for name, changes in comparison.steps.items()}
    parts.append(_grid(_over_steps(first.by), "step", steps))
    tools = [
        (name if index == 0 else "", {"measure": Text(change.measure), **_cells(change)})
        for name, changes in comparison.tools.items()
        for index, change in enumerate(_known(changes))
    ]
    if tools:
        parts.append(_grid("Per tool, times in ms", "tool", tools))
    return Group(*parts)


def _headline(report: Report) -> list[Text]:
    """Return lines about the trajectories of a report, and about lines that cannot be read."""
    total = report.total
    read = f"{printable(report.name)}: {total.trajectories:,} trajectories"
    if report.steps:
        steps = f"step {total.first}" if total.first == total.last else f"steps {total.first} to {total.last}"
        read += f" of {steps}"
    lines = [Text(read)]
    apart = [
        (total.unfinished, "that did not end"),
        (total.unscored, "without a score"),
        (total.not_finite, "whose score is not finite"),
    ]
    if missing := [f"{number:,} {what}" for number, what in apart if number]:
        lines.append(Text(f"Scores leave out trajectories: {', '.join(missing)}.", style="yellow"))
    if len(report.runs) > 1:
        most = [f"{printable(run)} ({number:,})" for run, number in list(report.runs.items())[:_MOST_RUNS]]
        more = ", …" if len(report.runs) > _MOST_RUNS else ""
        said = f"The dump mixes {len(report.runs):,} runs: {', '.join(most)}{more}. --run ID reports one."
        lines.append(Text(said, style="yellow"))
    if report.unused:
        lines.append(Text(f"Left in no batch, and not counted: {report.unused:,}.", style="dim"))
    if report.broken:
        lines.append(Text(f"Lines that cannot be read: {report.broken:,}", style="red"))
        lines += [Text(f"  {printable(complaint)[:300]}", style="red") for complaint in report.complaints]
    if not all(tool.run.is_exact for tool in report.tools):
        lines.append(Text(f"Quantiles of more than {EXACT:,} times are within 1 %.", style="dim"))
    return lines


def _over_steps(by: int) -> str:
    return "Over steps" if by == 1 else f"Over steps, {by} per row"


def _step(step: StepReport) -> dict[str, str | Text]:
    return {
        "n": count(step.trajectories),
        "score": number(step.score.mean),
        "score>0": percent(step.positive.mean),
        "right": percent(step.right.mean),
        "turns": number(step.turns.mean),
        "calls": number(step.calls.mean),
        "errors": percent(step.errors.mean),
        "infra": percent(step.infra.mean),
        "sampled": number(step.sampled.mean),
        "injected": number(step.injected.mean),
        "seconds": number(step.seconds.mean),
        "age": number(step.age.mean),
    }


def _counts(names: Iterable[str], rows: Mapping[str, Mapping[str, int]]) -> Rows:
    """Return rows with a column per name."""
    return {
        row: {_head(name): count(counts[name]) if counts.get(name) else NONE for name in names}
        for row, counts in rows.items()
    }


def _head(name: str) -> str:
    """Return the name of a status or reason, with each word on its own line."""
    return _clipped(name).replace("_", "\n")


def _cells(change: Change) -> dict[str, str | Text]:
    """Return the row of a measure: A, B, B - A, verdict."""
    write = _WRITTEN[change.kind]
    difference = write(change.difference, sign=True)
    if change.difference is not None and change.error is not None:
        difference += f" ± {write(change.error)}"
    said = Text(_WORDS.get(change.verdict, change.verdict), style=_STYLES.get(change.verdict, ""))
    return {"A": write(change.first), "B": write(change.second), "B - A": difference, "B is": said}


def _known(changes: Iterable[Change]) -> list[Change]:
    return [change for change in changes if (change.first, change.second) != (None, None)]


def _beside(changes: Sequence[Change]) -> dict[str, str | Text]:
    """Return the cells of some measures: A, B, B - A."""
    cells: dict[str, str | Text] = {}
    for change in changes:
        if change.measure in _IN_STEPS:
            write = _WRITTEN[change.kind]
            cells[f"{change.measure}\nA"] = write(change.first)
            cells[f"{change.measure}\nB"] = write(change.second)
            style = _STYLES.get(change.verdict, "")
            cells[f"{change.measure}\nB - A"] = Text(write(change.difference, sign=True), style=style)
    return cells


def _verdicts(comparison: Comparison) -> list[Text]:
    """Return lines that say what is better or worse in B, and by how much."""
    lines: list[Text] = []
    for verdict in ("better", "worse"):
        changed = [(tool, one) for tool, one in comparison.changes if one.verdict == verdict]
        if figures := [_said(tool, one) for tool, one in changed if one.kind != "seconds"]:
            lines.append(Text(f"B is {verdict}: {'; '.join(figures)}.", style=_STYLES[verdict]))
        if times := [_said(tool, one) for tool, one in changed if one.kind == "seconds"]:
            word = {"better": "shorter", "worse": "longer"}[verdict]
            lines.append(
                Text(f"Times that are {word} in B (the machine may be the cause): {'; '.join(times)}.")
            )
    return lines or [Text("No difference exceeds the noise.")]


def _said(tool: str, change: Change) -> str:
    write = _WRITTEN[change.kind]
    unit = " ms" if change.kind == "seconds" else ""
    what = f"{_clipped(tool)} {change.measure}" if tool else change.measure
    return (
        f"{what} {write(change.first)} → {write(change.second)}{unit} ({write(change.difference, sign=True)})"
    )


def _grid(title: str, head: str, rows: Rows | Sequence[tuple[str, Mapping[str, str | Text]]]) -> Group:
    """Return a table without the rows and columns in which nothing is known."""
    pairs = list(rows.items() if isinstance(rows, Mapping) else rows)
    names = dict.fromkeys(name for _, cells in pairs for name in cells)
    shown = [
        name for name in names if any(str(cells.get(name, NONE)) not in ("", NONE) for _, cells in pairs)
    ]
    made = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    made.add_column(head, no_wrap=True)
    for name in shown:
        made.add_column(Text(name), justify="left" if name in _LEFT else "right", no_wrap="\n" not in name)
    for row, cells in pairs:
        if row == ALL:
            made.add_section()
        made.add_row(Text(_clipped(row)), *(cells.get(name, NONE) for name in shown))
    return Group(Text(title, style="bold"), made)


def _clipped(name: str) -> str:
    """Return a name as one short line."""
    return truncate(printable(name), _LONGEST_NAME)
