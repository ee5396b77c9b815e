"""Pages of the HTML viewer, written and read without a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_agentic.records import Dump, Recorder, TrajectoryRecord
from torchrl_agentic.viewer.html import write_page

_SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A page as text: its index, its trajectories, its scripts as (attributes, text), and its batches."""

    text: str
    index: dict[str, Any]
    bodies: list[dict[str, Any]]
    scripts: list[tuple[str, str]]
    batches: list[dict[str, Any]]


def dump_of(folder: Path, records: Iterable[TrajectoryRecord], name: str = "0.jsonl") -> Path:
    """Write a dump of one file."""
    with Recorder(folder / name) as recorder:
        for record in records:
            recorder.write(record)
    return folder


def page_of(folder: Path) -> Page:
    """Write the page of a dump and read it back."""
    out = folder / "page.html"
    with Dump(folder) as dump:
        write_page(dump, out)
    text = out.read_text("utf-8")
    scripts = _SCRIPT.findall(text)
    index = next(json.loads(inside) for attributes, inside in scripts if 'id="index"' in attributes)
    bodies, batches = (
        [
            json.loads(line)
            for attributes, inside in scripts
            if f'id="{kind}-' in attributes
            for line in zlib.decompress(base64.b64decode(inside)).split(b"\n")
        ]
        for kind in ("chunk", "batch")
    )
    return Page(text, index, bodies, scripts, batches)
