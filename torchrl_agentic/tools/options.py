"""Create objects from options that a user wrote, with checks of their names and types."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.text import shorten, unknown_key
from torchrl_agentic.tools.signatures import keywords_of


def type_checker(hint: Any) -> pydantic.TypeAdapter[Any] | None:
    """Return an adapter that checks a type, or None if the type cannot be checked.

    Args:
        hint: A resolved type hint.
    """
    for config in (pydantic.ConfigDict(arbitrary_types_allowed=True), None):
        with contextlib.suppress(Exception):  # annotations of other libraries may raise anything
            return pydantic.TypeAdapter(hint, config=config)
    return None


@functools.lru_cache(maxsize=256)
def keyword_checkers(function: Callable[..., Any]) -> Mapping[str, pydantic.TypeAdapter[Any] | None]:
    """Return the type checkers of the keywords of a function or class, in order; see `type_checker`."""
    try:
        found = inspect.signature(function).parameters.values()
        hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    except (TypeError, ValueError, NameError):
        return {}
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {each.name: type_checker(hints.get(each.name, Any)) for each in found if each.kind in kinds}


def type_error(checker: pydantic.TypeAdapter[Any] | None, value: Any) -> str | None:
    """Return what is wrong with a value of another type, or None if it fits or cannot be checked.

    The JSON form of a value fits too: a list for a tuple, a string for a date.

    Args:
        checker: The type, from `type_checker`.
        value: The value.
    """
    if checker is None:
        return None
    try:
        checker.validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        try:
            checker.validate_json(json.dumps(value), strict=True)
        except pydantic.ValidationError as in_json:
            return in_json.errors(include_url=False)[0]["msg"]
        except (ValueError, TypeError, RecursionError):  # no JSON
            return error.errors(include_url=False)[0]["msg"]
    except Exception:  # the annotation cannot be resolved
        return None
    return None


class OptionError(ValueError):
    """An option that a class does not take, or refuses.

    Args:
        message: What is wrong.
        *steps: Keys that lead to the option, if it is known.
    """

    def __init__(self, message: str, *steps: str) -> None:
        super().__init__(message)
        self.steps = steps


_OBJECTS = ("repl", "sandbox", "patience", "files", "clock", "call_later", "over", "over_ray")
"""Arguments of our classes that cannot be written as plain data."""


def create(kind: Callable[..., Any], options: Mapping[str, Any], **given: Any) -> Any:
    """Call a class with options that a user wrote, after checking their names and types.

    Args:
        kind: The class.
        options: Arguments that the user wrote.
        **given: Further arguments, which the user cannot set.

    Raises:
        MissingExtra: If the class needs an extra that is not installed.
        OptionError: If an option is unknown or has another type, or the class raises an error.
    """
    checkers, takes_others = keyword_checkers(kind), keywords_of(kind).any_other
    known = [name for name in checkers if name not in given and name not in _OBJECTS]
    for key, value in options.items():
        if key not in known and not takes_others:
            raise OptionError(unknown_key(key, known), key)
        if wrong := type_error(checkers.get(key), value):
            raise OptionError(f"{wrong}; got {shorten(value)}", key)
    try:
        return kind(**given, **options)
    except MissingExtra:
        raise
    except (TypeError, ValueError, OSError, ImportError) as error:
        about = [key for key in options if re.search(rf"\b{re.escape(key)}\b", str(error))]
        hint = "" if takes_others else f" (options: {', '.join(known) or 'none'})"
        raise OptionError(f"{error}{hint}", *about[:1]) from error
