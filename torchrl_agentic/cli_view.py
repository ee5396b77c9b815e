"""`torchrl-agentic view`: a dump in the terminal, as text, or as a page of HTML."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.text import Text

from torchrl_agentic.viewer.library import Library
from torchrl_agentic.viewer.listing import SORTS
from torchrl_agentic.viewer.plain import read_all, text_of
from torchrl_agentic.viewer.query import QueryError, parse
from torchrl_agentic.viewer.reading import Reading


def view(path: Path, *, mask: str, query: str, sort: str, html: Path | None, as_text: bool) -> int:
    """Show a dump; give the exit code."""
    try:
        if html is not None:
            return _write_html(path, html)
        if sort not in SORTS:
            raise ValueError(f"--sort is one of {', '.join(SORTS)}; got {sort!r}")
        library = Library(path, mask=re.compile(mask or "(?!)"))
        with closing(library):
            return _print(library, query, sort) if as_text else _show(library, query, sort)
    except re.error as error:
        return _complain(f"--mask-str {mask}: {error}")
    except QueryError as error:
        return _complain(f"--query {query}: {error}")
    except (ValueError, ImportError, OSError) as error:
        return _complain(f"{path}: {error}" if str(path) not in str(error) else str(error))


def _complain(words: str) -> int:
    from torchrl_agentic.printable import printable

    Console(stderr=True).print(Text(f"torchrl-agentic: {printable(words)}", style="red"))
    return 2


def _write_html(path: Path, html: Path) -> int:
    from torchrl_agentic.records import Dump
    from torchrl_agentic.viewer.html import write_page

    with Dump(path) as dump:
        write_page(dump, html)
    return 0


def _print(library: Library, query: str, sort: str) -> int:
    rows = read_all(library, parse(""), "none")
    rows = read_all(library, parse(query, library.extras), sort) if query or sort != "none" else rows
    for note in library.notes:
        _complain(note)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # a terminal or pipe that knows few characters gets escapes for the others
        reconfigure(errors="backslashreplace")
    try:
        for row in rows:
            for line in text_of(library, row):
                print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has read enough
        sys.stdout = None
        return 0
    return 0


def _show(library: Library, query: str, sort: str) -> int:
    try:
        from torchrl_agentic.viewer import RolloutViewer
    except ImportError:
        from torchrl_agentic.errors import MissingExtra

        raise MissingExtra("The viewer", "textual", "viewer") from None
    reading = Reading(library)
    reading.sort = sort
    library.work()  # tells which fields there are
    reading.query_by(query)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ValueError("the viewer needs a terminal: --text prints the dump, --html FILE writes a page")
    viewer = RolloutViewer(reading)
    viewer.run()
    return viewer.return_code or 0
