"""Tables generated from the code and from benchmark results, so that they are never out of date."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from table import seconds_in_words

from torchrl_agentic import sandbox
from torchrl_agentic.messages import ParsedCall
from torchrl_agentic.parsers import ALIASES, PARSERS, get_parser
from torchrl_agentic.repl.repl_cases import CASES as OF_INTERPRETERS
from torchrl_agentic.sandbox import Sandbox
from torchrl_agentic.sandbox.base import THREATS
from torchrl_agentic.sandbox.conformance import CASES as OF_SANDBOXES
from torchrl_agentic.sandbox.system_calls import MACHINES, TABLE
from torchrl_agentic.sandbox.system_calls import Calls as SystemCalls

RESULTS = Path(__file__).parents[1] / "_data" / "benchmarks.json"
ORDER = ("forkserver", "bubblewrap", "landlock", "docker", "e2b", "modal", "seatbelt", "unsafe")
REGISTERED = dict(PARSERS)  # before tutorials register theirs
_QUOTED = re.compile(r"`([^`]+)`")


def table(header: Sequence[str], rows: Sequence[Sequence[str | nodes.Node]], kind: str) -> nodes.table:
    """Create a table from nodes and from texts in which backticks mark code."""
    group = nodes.tgroup(cols=len(header))
    group += [nodes.colspec(colwidth=1) for _ in header]
    head, body = nodes.thead(), nodes.tbody()
    head += _row(header)
    body += [_row(row) for row in rows]
    group += [head, body]
    made = nodes.table(classes=[kind])
    made += group
    return made


def _row(cells: Sequence[str | nodes.Node]) -> nodes.row:
    made = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += text(cell) if isinstance(cell, str) else cell
        made += entry
    return made


def text(words: str) -> nodes.paragraph:
    """Create a paragraph from a text in which backticks mark code."""
    made = nodes.paragraph()
    for index, part in enumerate(_QUOTED.split(words)):
        made += nodes.literal(text=part) if index % 2 else nodes.Text(part)
    return made


def kinds() -> list[type[Sandbox]]:
    """Return the sandboxes in the order of the page."""
    found = {getattr(sandbox, name) for name in sandbox.__all__}
    made = [one for one in found if isinstance(one, type) and issubclass(one, Sandbox) and one.name]
    return sorted(made, key=lambda kind: ORDER.index(kind.name))


class Threats(SphinxDirective):
    """Table of threats: how many cases test that a sandbox stops each of them."""

    def run(self) -> list[nodes.Node]:
        """Count the cases that each sandbox must pass."""
        rows = [
            [f"`{threat}`: {meaning}", *(self.held(kind, threat) for kind in kinds())]
            for threat, meaning in THREATS.items()
        ]
        return [table(["code cannot …", *(kind.name for kind in kinds())], rows, "claims")]

    def held(self, kind: type[Sandbox], threat: str) -> str:
        """Return a cell of the table: the number of cases that test one threat for one sandbox."""
        one = kind()
        held = [
            case
            for case in (*OF_SANDBOXES, *OF_INTERPRETERS)
            if case.threat == threat and case.skip_reason(one) is None
        ]
        return f"✓ {len(held)}" if held else "–"


class Limits(SphinxDirective):
    """Table of the limits that each sandbox enforces."""

    def run(self) -> list[nodes.Node]:
        """Ask each sandbox."""
        held = {kind.name: kind().limits_enforced for kind in kinds()}
        names = dict.fromkeys(name for limits in held.values() for name in limits)
        rows = [[f"`{name}`", *("✓" if held[kind].get(name) else "–" for kind in held)] for name in names]
        return [table(["limit", *held], rows, "claims")]


class Calls(SphinxDirective):
    """Table of system calls and their treatment by the filter of the sandboxes on Linux."""

    def run(self) -> list[nodes.Node]:
        """Read the table from which the filter is generated."""
        rows = [
            [calls.subject, calls.verdict, calls.why, ", ".join(f"`{name}`" for name in names(calls))]
            for calls in sorted(
                TABLE, key=lambda calls: ("denied", "checked", "allowed").index(calls.verdict)
            )
        ]
        return [table(["about", "verdict", "why", "calls"], rows, "claims")]


def names(calls: SystemCalls) -> list[str]:
    """Return the names of system calls on both architectures."""
    return list(dict.fromkeys(name for machine in MACHINES for name in calls.of(machine)))


class Lists(SphinxDirective):
    """The two lists at the start of each sandbox module's docstring."""

    def run(self) -> list[nodes.Node]:
        """Read the docstrings of the modules."""
        made: list[nodes.Node] = []
        for kind in kinds():
            about = importlib.import_module(kind.__module__).__doc__ or ""
            section = nodes.section(ids=[f"sandbox-{kind.name}"], names=[kind.name])
            section += nodes.title(text=kind.__name__)
            for block in _blocks(about):
                section += block
            made.append(section)
        return made


def _blocks(about: str) -> list[nodes.Node]:
    """Create paragraphs and lists from a docstring in which "- " starts an item."""
    made: list[nodes.Node] = []
    for line in about.splitlines():
        stripped = line.strip()
        if not stripped:
            made.append(nodes.paragraph())
        elif stripped.startswith("- "):
            if not made or not isinstance(made[-1], nodes.bullet_list):
                made.append(nodes.bullet_list())
            made[-1] += nodes.list_item("", nodes.paragraph(text=stripped[2:]))
        elif made and isinstance(made[-1], nodes.bullet_list) and line.startswith("  "):
            paragraph = made[-1][-1][0]
            paragraph[0] = nodes.Text(f"{paragraph.astext()} {stripped}")
        elif made and isinstance(made[-1], nodes.paragraph):
            before = made[-1].astext()
            made[-1] = text(f"{before} {stripped}".strip())
        else:
            made.append(text(stripped))
    return [block for block in made if block.astext()]


class Parsers(SphinxDirective):
    """Table of the formats with their names and an example call."""

    def run(self) -> list[nodes.Node]:
        """Render a call with each parser."""
        rows = []
        for name in REGISTERED:
            others = [alias for alias, meant in ALIASES.items() if meant == name]
            parser = get_parser(name)
            call = nodes.paragraph("", "", nodes.literal(text=_call(parser)))
            rows.append([f"`{name}`", " ".join(f"`{alias}`" for alias in others), call])
        return [table(["parser", "also known as", "a call"], rows, "parsers")]


def _call(parser: Any) -> str:
    if parser.name == "tags":
        return parser.render_call(ParsedCall("search", {"query": "…"}, "c1"))
    if parser.name == "fence":
        return "```python\n…\n```"
    return parser.render_call(ParsedCall("f", {"k": "v"}, "c1"))


class Benchmarks(SphinxDirective):
    """Table of the benchmark groups whose names have given prefixes."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Read the results; ratios are relative to the first contender of a group."""
        self.env.note_dependency(str(RESULTS))
        found = json.loads(RESULTS.read_text("utf-8"))["groups"]
        groups = {name: rows for name, rows in found.items() if name.startswith(self.arguments[0])}
        if not groups:
            raise self.error(f"no group of results begins with {self.arguments[0]!r}")
        rows = []
        for name, contenders in groups.items():
            first = contenders[0][1]
            for index, (contender, median) in enumerate(contenders):
                about = "" if index else name.removeprefix(self.arguments[0]).strip(" :") or name
                rows.append([about, contender, seconds_in_words(median), f"{median / first:.3g} ×"])
        return [table(["what", "how", "median", "ratio"], rows, "benchmarks")]


class Machine(SphinxDirective):
    """Description of the machine on which the results were measured."""

    def run(self) -> list[nodes.Node]:
        """Read the description from the results."""
        self.env.note_dependency(str(RESULTS))
        machine = json.loads(RESULTS.read_text("utf-8"))["machine"]
        return [text(", ".join(f"{name} {value}" for name, value in machine.items()) + ".")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    for name, directive in {
        "sandbox-threats": Threats,
        "sandbox-limits": Limits,
        "sandbox-calls": Calls,
        "sandbox-lists": Lists,
        "parsers": Parsers,
        "benchmarks": Benchmarks,
        "benchmark-machine": Machine,
    }.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True}
