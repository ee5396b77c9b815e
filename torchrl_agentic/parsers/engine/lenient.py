"""Fixes for JSON that a model got slightly wrong: a closed list, each of which loses nothing.

Only for blocks with a closer: nothing is ever added to what was cut off.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from torchrl_agentic.messages import JSON
from torchrl_agentic.parsers.base import Limits
from torchrl_agentic.parsers.engine.attempts import Unreadable
from torchrl_agentic.parsers.engine.jsontext import decode, fits, skip_whitespace
from torchrl_agentic.parsers.engine.literals import LiteralReader

_FENCE = re.compile(r"\s*+```[a-z]*+\s*+(?P<body>.*)```\s*+\Z", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_STRING_OR_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+")|,(?=\s*+[}\]])', re.DOTALL)
_STRING_OR_NOTHING = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{,]\s*+,', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


def mended(body: str, limits: Limits) -> tuple[JSON, tuple[str, ...]] | None:
    """Read the body of a block that is no JSON as it stands; give its value and its fixes, or None.

    The fixes: a code fence around it is dropped, raw control characters in strings are escaped, commas before
    a closing bracket are dropped, one brace missing at the very end is added, Python literals are read.
    """
    notes: tuple[str, ...] = ()
    if match := _FENCE.match(body):
        body, notes = match["body"], ("fenced_json",)
    for ending in ("", "}"):
        found = _fixed(f"{body}{ending}", limits, notes)
        if found is not None:
            return found if not ending else (found[0], (*found[1], "missing_brace"))
    return None


def _fixed(body: str, limits: Limits, notes: tuple[str, ...]) -> tuple[JSON, tuple[str, ...]] | None:
    value = _whole(body, limits)
    if value is not None:
        return value, notes
    for note, fix in _FIXES:
        fixed = fix(body)
        if fixed != body:
            body, notes = fixed, (*notes, note)
            value = _whole(body, limits)
            if value is not None:
                return value, notes
    return _python(body, limits, notes)


def _whole(body: str, limits: Limits) -> JSON | None:
    try:
        value, end = decode(body, skip_whitespace(body, 0), limits)
    except Unreadable:
        return None
    return value if skip_whitespace(body, end) == len(body) else None


def _python(body: str, limits: Limits, notes: tuple[str, ...]) -> tuple[JSON, tuple[str, ...]] | None:
    if not fits(body, 0, len(body), limits):
        return None
    reader = LiteralReader(body, limits)
    try:
        value, end = reader.value(0)
    except Unreadable:
        return None
    if reader.skip(end) != len(body) or not isinstance(value, dict | list):
        return None
    return cast("JSON", value), (*notes, "python_literals")


def _escape_control(body: str) -> str:
    return _STRING.sub(lambda string: _CONTROL.sub(lambda c: f"\\u{ord(c[0]):04x}", string[0]), body)


def _drop_commas(body: str) -> str:
    if any(match[0][0] != '"' for match in _STRING_OR_NOTHING.finditer(body)):
        return body  # a comma behind nothing is a value that is missing
    return _STRING_OR_COMMA.sub(lambda match: match[1] or "", body)


_FIXES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("raw_control_characters", _escape_control),
    ("trailing_comma", _drop_commas),
)
