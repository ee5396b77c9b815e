"""`torchrl-agentic report`: what a dump adds up to, or how two compare."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.text import Text

from torchrl_agentic.printable import printable
from torchrl_agentic.report import Report, Tally, compare, read_tally
from torchrl_agentic.report.tally import rows_of

_PIPED_WIDTH = 160
"""How wide tables are where no terminal says its width, and nor does $COLUMNS."""


def show_report(dump: Path, other: Path | None, png: Path | None, *, as_json: bool, by: int | None) -> int:
    """Show a run, or two side by side; give the exit code."""
    from torchrl_agentic.report.chart import draw, require_matplotlib

    errors = Console(stderr=True)
    paths = [dump] if other is None else [dump, other]
    try:
        if png is not None:
            require_matplotlib()  # before long dumps are read
            if png.suffix != ".png":
                raise ValueError(f"a chart goes to a .png file; got {png}")
        tallies = _read(paths)
        named = [(tally, str(path)) for path, tally in zip(paths, tallies, strict=True)]
        every = [tally.report(name, by=by or 1) for tally, name in named]
        if png is not None:
            draw(every, png)
            errors.print(Text(f"chart: {png}"))
    except (ValueError, ImportError, OSError) as error:
        errors.print(Text(f"torchrl-agentic: {printable(str(error))}", style="red"))
        return 2
    if as_json:
        print(json.dumps(_plain(every)))
    else:
        rows = by or rows_of(*tallies)
        _show([tally.report(name, by=rows) for tally, name in named])
    return 0


def _read(paths: list[Path]) -> list[Tally]:
    """Add dumps up; where somebody looks, say how far that is."""
    tallies: list[Tally] = []
    console = Console(stderr=True)
    with ExitStack() as stack:
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True
        )
        if console.is_terminal:
            stack.enter_context(bar)
        for path in paths:
            task = bar.add_task(printable(str(path)), total=None)
            tallies.append(
                read_tally(path, lambda done, size, task=task: bar.update(task, completed=done, total=size))
            )
    return tallies


def _show(reports: list[Report]) -> None:
    from torchrl_agentic.report.tables import comparison_tables, report_tables

    is_sized = os.isatty(1) or "COLUMNS" in os.environ
    console = Console(width=None if is_sized else _PIPED_WIDTH)
    if len(reports) == 1:
        console.print(report_tables(reports[0]))
    else:
        first, second = reports
        console.print(comparison_tables(first, second, compare(first, second)))


def _plain(reports: list[Report]) -> object:
    """Give what --json prints: a run, or two and how they compare."""
    if len(reports) == 1:
        return reports[0].to_json()
    first, second = reports
    comparison = compare(first, second).to_json()
    return {"first": first.to_json(), "second": second.to_json(), "comparison": comparison}
