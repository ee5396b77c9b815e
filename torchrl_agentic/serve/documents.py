"""Reads the documents of a search server: text files of a folder, or lines of a JSONL file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_agentic.nesting import read_json

SUFFIXES = (".txt", ".md", ".markdown", ".rst")
MAX_TITLE = 120
"""A longer first line is no title."""
MAX_NAMED = 5
"""How many bad lines an error names."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document. id: what its source calls it: a line's "id", its number, or a file's path in the folder."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as retrieval services send them: the title is the first line."""
        return f"{self.title}\n{self.text}"


def read_documents(path: Path) -> list[Document]:
    """Read the documents of a folder, recursively, or of a JSONL file.

    Raises:
        ValueError: lines or files are not what is expected; says which.
        OSError: it cannot be read.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        return [found for file in files for found in _in_file(file, file.relative_to(path).as_posix())]
    if path.suffix.lower() not in (".jsonl", ".json", ".ndjson"):
        raise ValueError(f"{path}: expected a folder of {', '.join(SUFFIXES)} files, or a .jsonl file")
    return _in_lines(path)


def _in_file(file: Path, name: str) -> Iterator[Document]:
    """Take a file as a document; what is empty is none."""
    try:
        whole = file.read_text("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not whole:
        return
    first, _, rest = whole.partition("\n")
    title = first.lstrip("#").strip() if first.startswith("#") else first.strip()
    if title and len(title) <= MAX_TITLE and rest.strip():
        yield Document(name, title, rest.strip())
    else:
        yield Document(name, file.stem, whole)


def _in_lines(path: Path) -> list[Document]:
    documents: list[Document] = []
    bad: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                documents.append(_from_json(read_json(line), str(number)))
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    if bad:
        more = f" … and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        raise ValueError(f"{path}: {'; '.join(bad[:MAX_NAMED])}{more}")
    return documents


def _from_json(found: Any, number: str) -> Document:
    if not isinstance(found, dict):
        raise ValueError(
            f'expected an object with "contents", or "title" and "text"; got {type(found).__name__}'
        )
    fields: dict[str, Any] = {key: found.get(key) for key in ("contents", "title", "text")}
    for key, value in fields.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{key!r} must be text; got {type(value).__name__}")
    name = str(found.get("id", number))
    if fields["contents"] is not None:
        title, _, text = fields["contents"].partition("\n")
        return Document(name, title, text)
    if fields["text"] is None:
        raise ValueError(
            f'expected "contents", or "title" and "text"; got {", ".join(map(str, found)) or "nothing"}'
        )
    return Document(name, fields["title"] or "", fields["text"])
