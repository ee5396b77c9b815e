"""The lines of a cassette: a call and what came of it, written, read and compared."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic_core import to_json

from torchrl_agentic.messages import JSON
from torchrl_agentic.text import MAX_LINE_DEPTH, count_values, read_json, truncate_middle
from torchrl_agentic.tools.wrappers.encoding import (
    Outcome,
    canonical,
    outcome_from_json,
    outcome_to_json,
    plain_text,
)

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_SHOWN, _COMPARED = 200, 200
_DIGITS = 4300
_UNREADABLE = re.compile(rb"\d{%d}" % (_DIGITS + 1))  # an integer, perhaps, that Python's json does not read


@dataclass(frozen=True, slots=True)
class Entry:
    """One call and what came of it.

    args: as `canonical` writes them; None where no JSON can hold them. seconds: how long it took.
    """

    trajectory: str
    tool: str
    call_id: str
    args: str | None
    seconds: float
    data: Mapping[str, JSON]

    @property
    def outcome(self) -> Outcome:
        """What came of it: a result, or an error to be raised."""
        return outcome_from_json(self.data)

    def __str__(self) -> str:
        args = truncate_middle(self.args or "(no JSON)", _SHOWN)
        return f"{self.tool}({args}), id {self.call_id!r}, trajectory {self.trajectory!r}"


def read_entries(path: Path) -> list[Entry]:
    """Read a file of entries; a line that cannot be read is passed over, and logged."""
    entries: list[Entry] = []
    if not path.exists():
        return entries
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    entries.append(
                        read_entry(cast("dict[str, Any]", read_json(line, max_depth=MAX_LINE_DEPTH)))
                    )
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                logger.warning("%s, line %s, passed over: %s: %s", path, number, type(error).__name__, error)
    return entries


def nearest(entries: Iterable[Entry], trajectory: str, tool: str, args: str) -> Entry | None:
    """Choose among entries: the same tool before the same trajectory, and then the likest arguments."""

    def likeness(entry: Entry) -> tuple[bool, bool, float]:
        matcher = difflib.SequenceMatcher(None, args[:_COMPARED], (entry.args or "")[:_COMPARED])
        return entry.tool == tool, entry.trajectory == trajectory, matcher.quick_ratio()

    return max(entries, key=likeness, default=None)


def read_entry(data: Mapping[str, Any]) -> Entry:
    """Make an entry of what a line holds.

    Raises:
        ValueError, KeyError, TypeError: it is none, or one of a later version.
    """
    if data["schema_version"] > SCHEMA_VERSION:
        raise ValueError(
            f"an entry of version {data['schema_version']}; this package reads up to {SCHEMA_VERSION}"
        )
    args = None if data["args"] is None else canonical(data["args"])
    outcome = {name: data[name] for name in ("result", "error") if name in data}
    outcome_from_json(outcome)  # so that one that cannot be read is passed over here
    return Entry(data["trajectory"], data["tool"], data["id"], args, data["seconds"], outcome)


def entry_line(
    trajectory: str, tool: str, call_id: str, args: Mapping[str, JSON], outcome: Outcome, seconds: float
) -> bytes:
    """Write an entry and its newline; what JSON cannot hold of arguments, `meta` and metrics is left out.

    What most tools return, a text and nothing more, is put between pieces that are kept: the bytes are the
    same, in two thirds of the time.
    """
    text = plain_text(outcome)
    try:
        if text is None:
            data = entry_to_json(trajectory, tool, call_id, args, outcome, seconds)
            line = to_json(data, fallback=str) + b"\n"
        else:
            line = b"".join(
                (
                    b'{"result":{"status":"ok","parts":[{"text":',
                    to_json(text),
                    _between(trajectory, tool),
                    to_json(call_id),
                    b',"seconds":',
                    to_json(seconds),
                    b',"args":',
                    to_json(args, fallback=str),
                    b"}\n",
                )
            )
        if len(line) <= _DIGITS or not _UNREADABLE.search(line):
            return line
    except (ValueError, TypeError, RecursionError):
        pass  # half of a surrogate pair, for one: json can escape it
    data = entry_to_json(trajectory, tool, call_id, args, outcome, seconds)
    key = canonical(args)
    data["args"] = None if key is None else json.loads(key)
    try:
        count_values(data, max_depth=MAX_LINE_DEPTH)
        return json.dumps(data, default=str).encode() + b"\n"
    except (ValueError, TypeError, RecursionError):
        for name in ("meta", "metrics", "detail"):
            data.get("result", data.get("error", {})).pop(name, None)
        logger.warning("what came of %r holds what JSON cannot: left out", call_id)
        return json.dumps(data, default=str).encode() + b"\n"


def entry_to_json(
    trajectory: str, tool: str, call_id: str, args: Mapping[str, JSON], outcome: Outcome, seconds: float
) -> dict[str, JSON]:
    """Give what the line of an entry holds."""
    data = outcome_to_json(outcome)
    data["schema_version"] = SCHEMA_VERSION
    data["trajectory"] = trajectory
    data["tool"] = tool
    data["id"] = call_id
    data["seconds"] = seconds
    data["args"] = args
    return data


@lru_cache(maxsize=1024)
def _between(trajectory: str, tool: str) -> bytes:
    """What stands between text and id in the lines of a tool; for as many as may be in use at a time."""
    place = to_json({"schema_version": SCHEMA_VERSION, "trajectory": trajectory, "tool": tool})
    return b'}]},%b,"id":' % place[1:-1]
