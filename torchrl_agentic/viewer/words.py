"""What stands in the bars and in the list of the viewer, in words."""

from __future__ import annotations

from torchrl_agentic.records import BadLine
from torchrl_agentic.viewer.blocks import number
from torchrl_agentic.viewer.reading import Reading
from torchrl_agentic.viewer.rows import Row, label
from torchrl_agentic.viewer.wrap import Line, fit, plain

KEYS = {
    "n p": "next trajectory, the one before, in the order of the list",
    "N P": "next step, the one before",
    "j k": "a page down, up",
    "g G": "to the beginning, to the end",
    "tab ← →": "to the list, to the text",
    "f": "search words, in all that is listed",
    "enter b": "next match, the one before, in other trajectories too",
    "esc": "clear the search; leave a comparison or a line of input",
    "/": "query: what is listed, e.g. status:timeout tool:python score<0.5 reason:max_turns -name:x words",
    "o": "sort: none, score ascending, score descending; without a score last",
    "a": "list all steps, or one",
    "t": "choose a step",
    "r": "go to a request id, in any step; its beginning will do, hyphens do not matter",
    "s": "text, or a table of all fields",
    "x": "choose one field of the table, or all",
    "i": "tokens, by who wrote them",
    "c m": "compare with another trajectory that began alike, with the next one",
    "e": "unfold or fold reasoning",
    "+": "show more of long texts",
    "L": "load all of a large trajectory",
    "l": "hide or show the list",
    "F": "follow: go to what comes newest",
    "?": "these keys",
    "q": "quit",
}
"""The keys, and what they do."""
QUERIES = """\
A query is one or more of these, all of which must hold:
  status:timeout       a call was answered so; of several with a comma: status:timeout,crash
  tool:python          a call of this tool
  reason:max_turns     how it ended; reason:none if that is not known
  score<0.5            also > <= >= = !=; score:none where there is none
  turns calls errors step   are numbers too
  name:part id:ab12 group:4147   parts of a name, beginnings of ids
  acc=1                whatever else was noted of a trajectory
  words "more words"   that are said in it
  -status:ok           a minus sign: not so"""
HINTS = "? keys  f search  / query  o sort  s table  i tokens  c compare  q quit"


def row_line(row: Row, width: int, *, with_step: bool) -> Line:
    """Write a line of the list: score, errors, and, where there is room, turns, calls and how it ended."""
    summary = row.summary
    step = ((f"{row.step.name:>4} ", "faint"),) if with_step else ()
    if isinstance(summary, BadLine):
        return fit((*step, (f"{'✗':>7} ", "error"), (label(row), "error")), width)
    errors = f"{summary.n_errors}✗" if summary.n_errors else ""
    more = f"{summary.n_turns:>3}t {summary.n_calls:>3}c {summary.termination_reason:<12.12} "
    return fit(
        (
            *step,
            (f"{number(summary.score):>7} ", "score"),
            (f"{errors:>3} ", "error"),
            (more if width >= 50 else "", "faint"),
            (label(row), ""),
        ),
        width,
    )


def head_line(width: int, *, with_step: bool) -> Line:
    """Write what the columns of the list are."""
    more = "turn call end          " if width >= 50 else ""
    return fit(((f"{'step ' if with_step else ''}  score err {more}trajectory", "faint"),), width)


def top_line(reading: Reading, width: int) -> Line:
    """Say what is read: which file and step, how many are listed, in which order, and how far it is read."""
    library = reading.library
    steps, step = library.steps, reading.step
    at = f"{step.label} ({steps.index(step) + 1}/{len(steps)})" if step in steps else "no step"
    if reading.shows_all_steps:
        at = "all steps"
    place = reading.place
    known = (
        sum(len(step.rows) for step in steps) if reading.shows_all_steps else len(step.rows) if step else 0
    )
    listed = len(reading.shown)
    of = f" of {known:,}" if listed != known else ""
    facts = [
        plain(fit(((str(library.path.name or library.path), ""),), max(12, width // 5))),
        at,
        f"{place + 1 if place >= 0 else '–'}/{listed:,}{of}",
        {"none": "", "score ascending": "score ↑", "score descending": "score ↓"}[reading.sort],
        reading.asked,
        {"text": "", "table": reading.field or "table"}.get(reading.view, reading.view),
    ]
    progress = library.progress
    done = round(10 * progress)
    bar = f" {'━' * done}{'─' * (10 - done)} {progress:.0%}" if steps and progress < 1 else ""
    return fit(((" " + " · ".join(filter(None, facts)), "name"), (bar, "key")), width)
