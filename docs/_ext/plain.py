"""Treat docstrings as plain text whose only markup is backticks."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_QUOTED = re.compile(r"(`+[^`]*`+)")
_NAME = re.compile(r"`~?\w+(\.\w+)*(\(\))?`")


def as_rst(lines: list[str]) -> None:
    """Escape reST markup in place; leave code after "::" unchanged."""
    made: list[str] = []
    prose: list[str] = []
    code_in: int | None = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if code_in is not None and (not line.strip() or indent > code_in):
            made.append(line)
            continue
        code_in = None
        prose.append(line)
        if line.rstrip().endswith("::"):
            code_in = indent
            made += _escaped(prose)
            prose = []
    lines[:] = made + _escaped(prose)


def _escaped(lines: list[str]) -> list[str]:
    parts = _QUOTED.split("\n".join(lines))
    for index, part in enumerate(parts):
        if index % 2:
            if not (part.startswith("``") or _NAME.fullmatch(part)):  # no name, so nothing to link to
                parts[index] = f"`{part}`"
            continue
        parts[index] = part.replace("*", r"\*")
        if index and part[:1].isalpha():  # the s of `FileRefPart`s
            parts[index] = rf"\ {parts[index]}"
    return "".join(parts).split("\n") if lines else []


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx, before napoleon."""
    app.connect(
        "autodoc-process-docstring",
        lambda app, what, name, obj, options, lines: as_rst(lines),
        priority=400,
    )
    return {"parallel_read_safe": True}
