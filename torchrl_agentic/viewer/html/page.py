"""The page: its assets around the contents of a dump."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import IO

from torchrl_agentic.permissions import PRIVATE, open_file
from torchrl_agentic.records import Dump
from torchrl_agentic.viewer.html.contents import Index, chunks

_SCRIPTS = ("data.js", "charts.js", "list.js", "trajectory.js", "page.js")
_MARK = re.compile(r"\{\{(\w+)\}\}")


def write_page(dump: Dump, path: Path, *, mode: int = PRIVATE) -> None:
    """Write a dump as one HTML file, which shows it without any other file and without a network.

    A trajectory is in memory only while it is written; of a text that is very long the page says how much is
    left out. What cannot be read is listed in the page, with the reason.

    Args:
        dump: The dump.
        path: The file; what is in it is lost.
        mode: Permissions of the file if it is created, whatever the umask is.

    Raises:
        OSError: the file cannot be written.
    """
    index = Index(dump.path.name)
    with tempfile.TemporaryFile() as bodies:
        for number, chunk in enumerate(chunks(dump, index)):
            bodies.write(b'<script type="application/octet-stream" id="chunk-%d">' % number)
            bodies.write(chunk + b"</script>\n")
        bodies.seek(0)
        with open(open_file(path, os.O_WRONLY | os.O_TRUNC, mode), "wb") as file:
            _assemble(file, index, bodies)


def _assemble(file: IO[bytes], index: Index, bodies: IO[bytes]) -> None:
    """Put the list in front of the trajectories: a browser shows it while it still reads the rest."""
    style, script = _asset("page.css"), "\n".join(map(_asset, _SCRIPTS))
    for kind, text in _pieces(_asset("page.html")):
        if kind == "index":
            file.writelines(index.parts())
        elif kind == "bodies":
            shutil.copyfileobj(bodies, file)
        else:
            known = {"style": style, "script": script, "policy": policy(style, script)}
            known["title"] = html.escape(index.name.encode("utf-8", "replace").decode())
            file.write((known[kind] if kind else text).encode())


def policy(style: str, script: str) -> str:
    """Write the Content-Security-Policy: this style, this script, nothing else, no HTML made of text."""
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {_hash(script)}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _pieces(template: str) -> Iterator[tuple[str, str]]:
    """Split a template at its {{marks}}: the name of each, or "" and the text between."""
    at = 0
    for mark in _MARK.finditer(template):
        yield "", template[at : mark.start()]
        yield mark[1], ""
        at = mark.end()
    yield "", template[at:]


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return resources.files("torchrl_agentic.viewer.html").joinpath("assets", name).read_text("utf-8")
