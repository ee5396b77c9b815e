"""`last_run`: which run wrote the last record of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pydantic_core

from torchrl_agentic.messages import fields_of
from torchrl_agentic.records.lines import Lines
from torchrl_agentic.records.writer import ZSTD

_HEAD = 4096  # bytes of a line in which its run lies
_CHUNK = 1 << 16


def last_run(path: Path) -> str | None:
    """Return the id of the run that wrote the last record of a file.

    Args:
        path: A file of records. One that is compressed is unpacked for it; of another, the end is read.

    Returns:
        The id; empty if the record has none, as in dumps of other trainers; None if the file has no record.

    Raises:
        OSError: If the file cannot be read.
    """
    line = _last_of_compressed(path) if path.suffix == ZSTD else _last(path)
    try:
        fields = fields_of(pydantic_core.from_json(line, allow_partial="trailing-strings"))
    except ValueError:
        return None
    run = (fields or {}).get("run")
    return run if isinstance(run, str) else ""


def _last(path: Path) -> bytes:
    """Return the beginning of the last line that is not blank."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        start, tail = end, b""
        while start > 0 and b"\n" not in tail.rstrip(b"\n"):
            start = max(0, start - _CHUNK)
            file.seek(start)
            tail = (file.read(min(_CHUNK, end - start)) + tail)[: _HEAD + _CHUNK]
            end = start
        return tail.rstrip(b"\n").rpartition(b"\n")[2][:_HEAD]


def _last_of_compressed(path: Path) -> bytes:
    lines = Lines(path)
    try:
        lines.scan()
        return lines.read(len(lines) - 1, _HEAD) if len(lines) else b""
    finally:
        lines.close()
