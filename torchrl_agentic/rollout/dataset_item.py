"""`DatasetItem`: read the rows of files, folders, data frames and data sets of the `datasets` package."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.messages import JSON
from torchrl_agentic.text import did_you_mean, read_json
from torchrl_agentic.trajectory.task import Task

SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
"""Suffixes of the files that can be read."""
SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
"""Names of splits that the names of files in a folder may begin with."""


@dataclass(frozen=True, slots=True)
class DatasetItem:
    """A row of a data set, as plain Python.

    Attributes:
        place: Position for error messages, such as `train.jsonl, line 3`.
        stem: Name of the file without its suffix, or of the data set; "" for rows in memory.
        number: Number of the row in its file, counted from 0.
        value: The row.
    """

    place: str
    stem: str
    number: int
    value: JSON


def read_source(source: Any, *, split: str | None = None, subset: str | None = None) -> Iterator[DatasetItem]:
    """Yield the rows of a data set.

    Args:
        source: A file or folder, or several; the name of a data set on the Hugging Face hub; a `Dataset` or
            `DatasetDict` of the package `datasets`; a data frame of pandas; or an iterable of rows.
        split: The split to read, where there are several.
        subset: Subset of a data set on the hub, such as "main" for "openai/gsm8k".

    Raises:
        ValueError: If a file has another form, or the split is missing; the message names file and line.
        FileNotFoundError: If a file does not exist.
        TypeError: If `source` has another type.
        MissingExtra: If a package that reads it is not installed.
    """
    if isinstance(source, str | PathLike):
        yield from _read_path(cast("str | PathLike[str]", source), split, subset)
        return
    package = type(source).__module__.partition(".")[0]
    if _are_paths(source):
        for one in source:
            yield from _read_path(one, split, subset)
        return
    _check_unused("subset", subset, f"a {type(source).__name__}")
    if package == "datasets":
        yield from _read_dataset(source, "", split)
        return
    _check_unused("split", split, f"a {type(source).__name__}")
    if package == "pandas" and hasattr(source, "to_dict"):
        yield from _numbered("row", "", (_without_gaps(row) for row in source.to_dict("records")))
    elif isinstance(source, Mapping):
        raise TypeError("source is a mapping: put a row into a list, [row]; of several splits, pass one")
    elif isinstance(source, Iterable):
        yield from _numbered("row", "", cast("Iterable[Any]", source))
    else:
        raise TypeError(
            "source is a file, a folder, a data set of `datasets`, a data frame or an iterable of rows; "
            f"got {type(source).__name__}"
        )


def _check_unused(name: str, value: str | None, what: str) -> None:
    """Raise ValueError if `split` or `subset` is given for a source without them."""
    if value is not None:
        raise ValueError(f"{name}={value!r} chooses a part of a data set, and {what} has no such parts")


def read_file(path: Path) -> Iterator[DatasetItem]:
    """Yield the rows of a file of JSON lines, JSON, Parquet or CSV.

    Args:
        path: The file. Any suffix besides .jsonl, .parquet and .csv is read as JSON.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it has another form; the message names file and line.
        MissingExtra: If it is Parquet, and pyarrow is not installed.
    """
    read = {".jsonl": _json_lines, ".parquet": _parquet, ".csv": _csv}.get(path.suffix, _json)
    for number, (place, value) in enumerate(read(path)):
        yield DatasetItem(f"{path}, {place}" if place else str(path), path.stem, number, value)


def _are_paths(source: Any) -> TypeGuard[Sequence[str | PathLike[str]]]:
    """Return True for a list of files, and False for a list of rows."""
    items = cast("Sequence[Any]", source) if isinstance(source, list | tuple) else ()
    return bool(items) and all(isinstance(one, str | PathLike) for one in items)


def _read_path(source: str | PathLike[str], split: str | None, subset: str | None) -> Iterator[DatasetItem]:
    path = Path(source)
    if path.exists():
        _check_unused("subset", subset, str(path))
    if path.is_dir():
        yield from _read_folder(path, split)
    elif path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: expected a file with one of the suffixes {', '.join(SUFFIXES)}")
        _check_unused("split", split, str(path))
        yield from read_file(path)
    elif isinstance(source, str) and source.count("/") == 1 and path.suffix not in SUFFIXES and path.name:
        yield from _read_hub(source, split, subset)
    else:
        here = sorted(one.name for one in path.parent.iterdir()) if path.parent.is_dir() else []
        raise FileNotFoundError(f"{path}: no such file or folder{did_you_mean(path.name, here)}")


def _read_folder(folder: Path, split: str | None) -> Iterator[DatasetItem]:
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        saved = _datasets(f"Reading {folder}").load_from_disk(str(folder))
        yield from _read_dataset(saved, folder.name, split)
        return
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    files = [
        path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise ValueError(f"{folder}: the folder has no file with one of the suffixes {', '.join(SUFFIXES)}")
    splits = {path: _split_in(path.stem) for path in files}
    known = sorted({name for name in splits.values() if name})
    if split is not None or len(known) > 1:
        chosen = _split_of(known, split, str(folder))
        files = [path for path in files if splits[path] == chosen]
    for path in files:
        yield from read_file(path)


def _split_in(stem: str) -> str:
    """Return the split that the name of a file begins with, such as train-00000-of-00002; "" for others."""
    first = stem.replace("_", "-").replace(".", "-").split("-")[0]
    return first if first in SPLITS else ""


def _split_of(known: Sequence[str], split: str | None, where: str) -> str:
    """Return the split to read; the only one if none was chosen."""
    shown = ", ".join(known) or "none"
    if split is None:
        if len(known) == 1:
            return known[0]
        example = "train" if "train" in known or not known else known[0]
        raise ValueError(f"{where} has the splits {shown}: choose one, such as split={example!r}")
    if split not in known:
        raise ValueError(f"{where} has no split {split!r}; its splits: {shown}{did_you_mean(split, known)}")
    return split


def _read_hub(name: str, split: str | None, subset: str | None) -> Iterator[DatasetItem]:
    package = _datasets(f"Reading {name!r} from the hub")
    try:
        found = package.load_dataset(name, subset, split=split)
    except (OSError, ValueError) as error:  # no such name, no connection, no such split or subset
        raise ValueError(
            f"{name!r} is neither a file or folder here, nor a data set that `datasets` can load: {error}"
        ) from error
    yield from _read_dataset(found, name.rpartition("/")[2], None)


def _read_dataset(dataset: Any, name: str, split: str | None) -> Iterator[DatasetItem]:
    """Yield the rows of a data set of the package `datasets`."""
    if isinstance(dataset, Mapping):  # of splits
        splits = cast("Mapping[str, Any]", dataset)
        split = _split_of(list(splits), split, name or "the data set")
        dataset = splits[split]
    else:
        known = str(dataset.split or "")
        if split is not None and split != known:
            raise ValueError(f"the data set is the split {known!r}, not {split!r}")
        split = known
    name = name or str(dataset.info.dataset_name or "")
    yield from _numbered("row", "-".join(part for part in (name, split) if part), dataset)


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtra(what, "datasets", "datasets") from None
    return datasets


def _numbered(kind: str, stem: str, rows: Iterable[Any]) -> Iterator[DatasetItem]:
    for number, row in enumerate(rows):
        value = row if isinstance(row, Task) else plain_json(row)
        yield DatasetItem(f"{stem}, {kind} {number}" if stem else f"{kind} {number}", stem, number, value)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None


def _json_lines(path: Path) -> Iterator[tuple[str, JSON]]:
    yield from _lines(path, _text(path))


def _lines(path: Path, text: str) -> Iterator[tuple[str, JSON]]:
    for number, line in enumerate(text.split("\n"), 1):  # in JSON, nothing but a newline ends a line
        if line.strip():
            yield f"line {number}", _parsed(f"{path}, line {number}", line)


def _json(path: Path) -> Iterator[tuple[str, JSON]]:
    text = _text(path)
    try:
        whole = read_json(text)
    except ValueError as error:
        first, _, rest = text.strip().partition("\n")
        if not rest or not first.startswith("{") or not first.rstrip().endswith("}"):
            raise ValueError(f"{path}: not JSON: {error}") from None
        yield from _lines(path, text)  # JSON lines under another suffix
        return
    items = cast("list[JSON]", whole) if isinstance(whole, list) else [whole]
    yield from ((f"item {number}", item) for number, item in enumerate(items))


def _parsed(place: str, text: str) -> JSON:
    try:
        return read_json(text)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[tuple[str, JSON]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra(f"{path}", "pyarrow", "parquet") from None
    number = 0
    with path.open("rb") as file:  # a missing file raises as for other formats
        try:
            batches = cast("Any", parquet).ParquetFile(file).iter_batches()
            for batch in batches:
                for row in batch.to_pylist():
                    yield f"row {number}", plain_json(row)
                    number += 1
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a Parquet file: {error}") from None


def _csv(path: Path) -> Iterator[tuple[str, JSON]]:
    reader = csv.DictReader(io.StringIO(_text(path)), strict=True)
    try:
        for row in reader:
            place = f"line {reader.line_num}"
            if None in row or None in row.values():
                raise ValueError(
                    f"{path}, {place}: expected {len(reader.fieldnames or ())} columns, as in the first line"
                )
            yield place, {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.reader.line_num}: not CSV: {error}") from None


def plain_json(value: Any) -> Any:
    """Return a value of a data set as plain Python: arrays become lists, numbers of NumPy plain numbers.

    Dates become strings in ISO 8601, decimal numbers become floats. Bytes, images and other objects stay as
    they are.

    Args:
        value: A value of Parquet, pandas, NumPy or `datasets`.
    """
    if value is None or type(value) in (str, int, float, bool, bytes):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return plain_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(item) for item in cast("Iterable[Any]", value)]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return float(value) if isinstance(value, decimal.Decimal) else value


def _without_gaps(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of a data frame with None in place of the missing values of pandas."""
    import pandas

    api: Any = pandas
    gaps = {name for name, value in row.items() if api.api.types.is_scalar(value) and api.isna(value)}
    return {str(name): None if name in gaps else value for name, value in row.items()}
