"""Read signatures of functions: awaitable or not, keywords, and the JSON Schema of type hints."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or the `__call__` of an object, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True, slots=True)
class Keywords:
    """Keywords that a function takes.

    Attributes:
        names: Names of its parameters that can be passed as keywords.
        any_other: Whether it has `**kwargs`.
    """

    names: frozenset[str]
    any_other: bool

    def __contains__(self, name: str) -> bool:
        return self.any_other or name in self.names


def keywords_of(function: Callable[..., Any]) -> Keywords:
    """Return the keywords that a function takes; any, if it has no readable signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Keywords(frozenset(), any_other=True)
    named = (each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
    return Keywords(frozenset(named), any(each.kind is each.VAR_KEYWORD for each in parameters))


_NAMES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def hint_schema(hint: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of a type hint, or None if the hint is beyond the form.

    `X | None` becomes `nullable: true`, a union of plain types a list of types, `Literal` and enums `enum`.

    Args:
        hint: A resolved type hint.

    Returns:
        The schema, or None for other classes, `Annotated`, `tuple[X, ...]` and the like.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _enum([member.value for member in hint])
        found = _NAMES.get(hint) if isinstance(hint, Hashable) else None
        return None if found is None else dict(found)
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is typing.Literal:
        return _enum(args)
    if origin is list:
        return _with("array", items=hint_schema(args[0]))
    if origin is dict:
        return _with("object", additionalProperties=hint_schema(args[1]))
    if origin is tuple and len(args) > 1 and ... not in args:
        items = [hint_schema(arg) for arg in args]
        return None if None in items else {"type": "array", "prefixItems": items}
    return None


def described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """Return a parameter's schema with its description from the docstring.

    A description may end with the values that are allowed: `(choices: ["tea", "coffee"])`.

    Args:
        schema: JSON Schema of the parameter.
        text: The description; line breaks in it become spaces.

    Raises:
        ValueError: If the choices are not a JSON list.
    """
    text = re.sub(r"\s*\n+\s*", " ", text.strip())
    choices = _CHOICES.search(text)
    if choices is None:
        return {**schema, "description": text}
    try:
        values = json.loads(choices[1])
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list):
        raise ValueError(f'expected choices as a JSON list, e.g. (choices: ["a", "b"]); got {choices[0]!r}')
    return {**schema, "enum": values, "description": text[: choices.start()].strip()}


def docstring_error(message: str) -> TypeError:
    """Return a TypeError that is also transformers' `DocstringParsingException`."""
    return _error_class("DocstringParsingException")(message)


def type_hint_error(message: str) -> TypeError:
    """Return a TypeError that is also transformers' `TypeHintParsingException`."""
    return _error_class("TypeHintParsingException")(message)


@functools.cache
def _error_class(name: str) -> type[TypeError]:
    """Make the class when the first error is raised: transformers takes half a second to import."""
    theirs: type[Exception] = getattr(importlib.import_module("transformers.utils"), name)
    bases: tuple[Any, ...] = (theirs, TypeError)
    return type(name, bases, {"__doc__": theirs.__doc__, "__module__": __name__})


def _with(kind: str, **inner: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if None in inner.values() else {"type": kind, **inner}


def _union(args: Sequence[Any]) -> dict[str, Any] | None:
    known = [hint_schema(arg) for arg in args if arg is not type(None)]
    schemas = [schema for schema in known if schema is not None]
    if len(schemas) < len(known):
        return None
    if len(schemas) == 1:
        made = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        made: dict[str, Any] = {"type": names[0] if len(names) == 1 else names}
    else:
        made = {"anyOf": schemas}
    return {**made, "nullable": True} if type(None) in args else made


def _enum(values: Sequence[Any]) -> dict[str, Any] | None:
    if not values or any(type(value) not in _SCALARS for value in values):
        return None
    kinds = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}
