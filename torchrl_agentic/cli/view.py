"""`torchrl-agentic view` and `report`: a dump in the terminal, as text, as an HTML page or as statistics."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.text import Text

from torchrl_agentic.cli.show import complain
from torchrl_agentic.text import printable
from torchrl_agentic.viewer.library import Library, read_all, text_of
from torchrl_agentic.viewer.listing import SORTS
from torchrl_agentic.viewer.query import QueryError, parse
from torchrl_agentic.viewer.report import Report, Tally, compare, read_tally
from torchrl_agentic.viewer.report.tally import rows_of
from torchrl_agentic.viewer.run_folder import RunFolder
from torchrl_agentic.viewer.state import ViewerState

if TYPE_CHECKING:
    from torchrl_agentic.evaluation import EvalComparison


def view(path: Path, *, mask: str, query: str, sort: str, html: Path | None, as_text: bool) -> int:
    """Show a dump.

    Args:
        path: A dump (a folder with a file per step, or one file), or the folder of a training run with one.
        mask: Regular expression; matching text is shown as a star.
        query: Filter of the list.
        sort: Order of the list, one of `SORTS`.
        html: File for an HTML page, instead of the terminal.
        as_text: Whether to print plain text instead.

    Returns:
        The exit code: 0, or 2 for a mistake of the user.
    """
    try:
        _check_file(path)
        if html is not None:
            return _write_html(path, html)
        path = RunFolder.of(path).dump
        if sort not in SORTS:
            raise ValueError(f"--sort must be one of {', '.join(SORTS)}; got {sort!r}")
        library = Library(path, mask=re.compile(mask or "(?!)"))
        with closing(library):
            return _print(library, query, sort) if as_text else _show(library, query, sort)
    except re.error as error:
        complain(f"--mask-str {mask}: {error}")
    except QueryError as error:
        complain(f"--query {query}: {error}")
    except (ValueError, ImportError, OSError) as error:
        complain(f"{path}: {error}" if str(path) not in str(error) else error)
    return 2


def _check_file(path: Path) -> None:
    """Raise ValueError for a file of which no line is a trajectory; a compressed one says so itself."""
    if path.suffix == ".zst" or not path.is_file():
        return
    from torchrl_agentic.records import BadLine, read_records

    bad: BadLine | None = None
    for record in read_records(path):
        if not isinstance(record, BadLine):
            return
        bad = bad or record
    if bad is not None:
        raise ValueError(f"{path} is not a dump of trajectories: line {bad.number}: {bad.reason}")


def _write_html(path: Path, html: Path) -> int:
    from torchrl_agentic.records import Dump
    from torchrl_agentic.viewer.html import write_page

    folder = RunFolder.of(path)
    with Dump(folder.dump) as dump:
        write_page(dump, html, name=folder.name, metrics=folder.curves())
    return 0


def _print(library: Library, query: str, sort: str) -> int:
    rows = read_all(library, parse(""), "none")
    rows = read_all(library, parse(query, library.extras), sort) if query or sort != "none" else rows
    for note in library.notes:
        complain(note)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # escape the characters that the encoding of the terminal or pipe lacks
        reconfigure(errors="backslashreplace")
    try:
        for row in rows:
            for line in text_of(library, row):
                print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stdout = None
        return 0
    return 0


def _show(library: Library, query: str, sort: str) -> int:
    try:
        from torchrl_agentic.viewer import RolloutViewer
    except ImportError:
        from torchrl_agentic.errors import MissingExtra

        raise MissingExtra("The viewer", "textual", "viewer") from None
    state = ViewerState(library)
    state.list.sort = sort
    library.work()  # finds the fields that a query can use
    state.list.query_by(query)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ValueError("the viewer needs a terminal: --text prints the dump, --html FILE writes a page")
    viewer = RolloutViewer(state)
    viewer.run()
    return viewer.return_code or 0


_PIPED_WIDTH = 160
"""Width of tables if neither a terminal nor $COLUMNS defines one."""


def show_report(
    dump: Path,
    other: Path | None,
    png: Path | None,
    *,
    as_json: bool,
    by: int | None,
    run: str | None = None,
) -> int:
    """Print the statistics of a run, or of two side by side.

    Args:
        dump: Dump of the first run.
        other: Dump of the second run, or None.
        png: File for charts, or None.
        as_json: Whether to print JSON.
        by: Number of steps per row, or None for about 24 rows.
        run: Beginning of the id of the only run to report; None for all.

    Returns:
        The exit code: 0, or 2 for a mistake of the user.
    """
    from torchrl_agentic.viewer.report.chart import draw, require_matplotlib

    paths = [dump] if other is None else [dump, other]
    try:
        if png is not None:
            require_matplotlib()  # fails before long dumps are read
            if png.suffix != ".png":
                raise ValueError(f"--png must name a .png file; got {png}")
        tallies = _read([RunFolder.of(path).dump for path in paths], run)
        named = [(tally, str(path)) for path, tally in zip(paths, tallies, strict=True)]
        every = [tally.report(name, by=by or 1) for tally, name in named]
        compared = None if other is None else _compared_evals(dump, other)
        if png is not None:
            draw(every, png)
            Console(stderr=True).print(Text(f"chart: {png}"))
    except (ValueError, ImportError, OSError) as error:
        complain(error)
        return 2
    if as_json:
        extra = {} if compared is None else {"evaluations": compared.to_json()}
        print(json.dumps({**_plain(every), **extra}))
    else:
        rows = by or rows_of(*tallies)
        _show_reports([tally.report(name, by=rows) for tally, name in named])
        if compared is not None:
            console = _console()
            console.print(compared.table())
            for line in compared.notes:
                console.print(Text(printable(line)), soft_wrap=True)
    return 0


def _compared_evals(first: Path, second: Path) -> EvalComparison | None:
    """Compare two evaluations; None if one of the folders holds another dump."""
    from torchrl_agentic.evaluation import EvalResult, compare
    from torchrl_agentic.evaluation.eval_folder import is_eval

    if not (is_eval(first) and is_eval(second)):
        return None
    return compare(EvalResult.read(first), EvalResult.read(second))


def _read(paths: list[Path], run: str | None) -> list[Tally]:
    """Read dumps, of one run or of all; show the progress in a terminal."""
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
                read_tally(
                    path,
                    lambda done, size, task=task: bar.update(task, completed=done, total=size),
                    run=run,
                )
            )
    return tallies


def _console() -> Console:
    is_sized = os.isatty(1) or "COLUMNS" in os.environ
    return Console(width=None if is_sized else _PIPED_WIDTH)


def _show_reports(reports: list[Report]) -> None:
    from torchrl_agentic.viewer.report.tables import comparison_tables, report_tables

    console = _console()
    if len(reports) == 1:
        console.print(report_tables(reports[0]))
    else:
        first, second = reports
        console.print(comparison_tables(first, second, compare(first, second)))


def _plain(reports: list[Report]) -> dict[str, object]:
    """Return the object that --json prints: a run, or two with their comparison."""
    if len(reports) == 1:
        return reports[0].to_json()
    first, second = reports
    comparison = compare(first, second).to_json()
    return {"first": first.to_json(), "second": second.to_json(), "comparison": comparison}
