"""Convert the values that tools return to JSON, arrays, tensors and tables included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import pydantic_core

from torchrl_agentic.text import MAX_INT_BITS

JSON: TypeAlias = Any
"""A value that `json.loads` can return; types cannot say it without recursion in each signature."""

MAX_ELEMENTS = 10_000
"""Arrays and tables of more elements are abridged."""
FIRST = 10
"""How many elements, rows and columns an abridged value has."""


def jsonable(value: Any) -> JSON:
    """Convert a value to what `json.dumps` takes, at any depth.

    Converts pydantic models, dataclasses, enums, dates, times, decimals, paths, sets, UUIDs, and bytes that
    are UTF-8 text. Recognizes numbers and arrays of numpy, torch and the like by their methods, without
    importing these libraries:

    - A scalar becomes a number, an array or tensor a nested list, on whatever device it is.
    - A table (pandas) becomes `{"columns", "index", "data"}`, a series `{"index", "data"}`, or a list where
      its index only numbers the rows; a missing value becomes null.
    - An array or table of more than `MAX_ELEMENTS` elements is abridged to its shape and first values.

    Args:
        value: What a tool returned.

    Returns:
        None, bool, int, float, str, or lists and dicts of these. Floats that are not finite stay, see
        `finite`.

    Raises:
        TypeError: If there is no JSON for it. The message names the type.
    """
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TypeError("a tool returned an integer of more digits than JSON readers take")
    if value is None or type(value) in (bool, int, float):
        return value
    try:
        return pydantic_core.to_jsonable_python(value, fallback=_plain)
    except (pydantic_core.PydanticSerializationError, TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"a tool returned a {type(value).__name__} that is no JSON: {error}") from None


def finite(value: JSON) -> JSON:
    """Replace the floats that JSON does not have by the texts "NaN", "Infinity" and "-Infinity".

    Raises:
        RecursionError: If the value contains itself, or is nested too deep.
    """
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {finite(key): finite(item) for key, item in cast("Mapping[Any, JSON]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast("Sequence[JSON]", value)]
    return value


def _plain(value: Any) -> Any:
    """Convert what pydantic does not know to what it knows."""
    kind = type(cast("object", value)).__name__
    try:
        if isinstance(value, type):
            raise TypeError("it is a class")
        if callable(getattr(value, "notna", None)) and hasattr(value, "iloc"):
            return _table(value)
        if callable(getattr(value, "tolist", None)):
            return _array(value)
    except Exception as error:
        raise ValueError(f"no JSON for {kind}: {error}") from None
    if isinstance(value, Mapping):
        return dict(cast("Mapping[Any, Any]", value))
    if isinstance(value, Sequence) and len(cast("Sequence[Any]", value)) <= MAX_ELEMENTS:
        return list(cast("Sequence[Any]", value))
    raise ValueError(f"no JSON for {kind}")


def _array(value: Any) -> Any:
    """Convert an array, a tensor or a scalar of a numerical library."""
    if _count(value) > MAX_ELEMENTS and hasattr(value, "shape"):
        first = value
        while len(first.shape) > 1:
            first = first[0]
        whole = {"shape": list(value.shape), "dtype": str(value.dtype)}
        return {**whole, "first": first[:FIRST].tolist()}
    made = value.tolist()
    if hasattr(made, "tolist"):
        raise TypeError(f"tolist() returned a {type(made).__name__}")
    return made


def _count(value: Any) -> int:
    """Return the number of elements: `numel()` of torch, `size` of numpy."""
    if callable(getattr(value, "numel", None)):
        return value.numel()
    return value.size if isinstance(getattr(value, "size", None), int) else 1


def _table(value: Any) -> Any:
    """Convert a table or a series of pandas."""
    columns = getattr(value, "columns", None)
    is_long = value.size > MAX_ELEMENTS
    whole = {"shape": list(value.shape)} if is_long else {}
    if is_long:
        value = value.iloc[:FIRST] if columns is None else value.iloc[:FIRST, :FIRST]
    data = value.astype(object).where(value.notna(), None).to_numpy().tolist()
    index = {} if type(value.index).__name__ == "RangeIndex" else {"index": value.index.tolist()}
    if columns is None and not index and not whole:
        return data
    names = {} if columns is None else {"columns": value.columns.tolist()}
    return {**whole, **names, **index, "data": data}
