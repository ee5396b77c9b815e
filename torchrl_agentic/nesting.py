"""One bound on how deep JSON, YAML and arguments are nested, and checks of it that do not recurse."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

JSON: TypeAlias = Any
"""A value that `json.loads` can return."""

MAX_DEPTH = 200
"""How many lists and mappings may be inside each other, as many as pydantic's JSON reader takes."""
MAX_LINE_DEPTH = 255
"""The same for a line of a dump or cassette, which holds such values in levels of its own: as is written."""

_CONTAINERS = (dict, list, tuple)
_are_scalars = frozenset((str, int, float, bool, type(None))).issuperset


class TooDeepError(ValueError):
    """A value is nested deeper than it may be."""

    def __init__(self, max_depth: int = MAX_DEPTH) -> None:
        super().__init__(f"nested more than {max_depth} levels deep; make it flatter")


class TooManyValuesError(ValueError):
    """A value holds more values than it may."""

    def __init__(self, max_values: int) -> None:
        super().__init__(f"more than {max_values} values")


def count_values(value: JSON, *, max_values: int = sys.maxsize, max_depth: int = MAX_DEPTH) -> int:
    """Return how many values there are inside a value, at any depth.

    Args:
        value: A value of dicts, lists and tuples. A part that is in several places counts in each.
        max_values: How many values there may be.
        max_depth: How many dicts, lists and tuples may be inside each other.

    Raises:
        TooDeepError: If it is nested deeper, or contains itself.
        TooManyValuesError: If it holds more values.
    """
    count = depth = 0
    level: list[Any] = [value] if isinstance(value, _CONTAINERS) else []
    while level:
        depth += 1
        if depth > max_depth:
            raise TooDeepError(max_depth)
        inner: list[Any] = []
        for node in level:
            count += len(node)
            if count > max_values:
                raise TooManyValuesError(max_values)
            items: Any = node.values() if isinstance(node, dict) else node  # pyright: ignore[reportUnknownVariableType]
            if not _are_scalars(map(type, items)):  # much faster than to look at each
                inner += [item for item in items if isinstance(item, _CONTAINERS)]
        level = inner
    return count


def is_flat(values: Iterable[JSON]) -> bool:
    """Return whether values are texts, numbers, booleans and None, with nothing inside them."""
    return _are_scalars(map(type, values))


def read_json(text: str | bytes | bytearray, *, max_depth: int = MAX_DEPTH, **options: Any) -> JSON:
    """Read JSON as `json.loads` does, but not deeper than it may be, whatever the version of Python.

    Args:
        text: The JSON.
        max_depth: How many lists and mappings may be inside each other.
        options: As those of `json.loads`.

    Raises:
        TooDeepError: If it is nested deeper.
        ValueError: If it is no JSON.
    """
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise TooDeepError(max_depth) from None
    # Only text with as many brackets can be nested as deep.
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > max_depth:  # pyright: ignore[reportArgumentType]
        count_values(value, max_depth=max_depth)
    return value
