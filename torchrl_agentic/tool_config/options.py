"""What a class can be told from a file: the arguments it takes, checked before it is called."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pydantic

from torchrl_agentic.errors import MissingExtra
from torchrl_agentic.tool_config.mistakes import ConfigError, unknown_key
from torchrl_agentic.tools.schema import shorten

OURS = frozenset(("repl", "sandbox", "patience", "files", "clock", "call_later", "over", "over_ray"))
"""Arguments that are objects, which no file can hold."""


@functools.lru_cache(maxsize=256)
def parameters_of(kind: Callable[..., Any]) -> tuple[Mapping[str, Any], bool]:
    """Give the arguments that a class takes, with their annotations, and whether it takes any others."""
    try:
        found = inspect.signature(kind).parameters
        hints = typing.get_type_hints(kind.__init__ if isinstance(kind, type) else kind)
    except (TypeError, ValueError, NameError):
        return {}, True
    named = {
        name: hints.get(name, Any)
        for name, parameter in found.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())


def call(
    kind: Callable[..., Any],
    options: Mapping[str, Any],
    place: Callable[[str], str],
    *,
    given: Mapping[str, Any] | None = None,
    hidden: Iterable[str] = OURS,
) -> Any:
    """Make an object of what a file says.

    place: option, or "" for all of them → where that stands, and its name. given: more arguments, of ours.

    Raises:
        ConfigError: an option that it does not take, a value of another type, or what it raised itself.
    """
    named, any_other = parameters_of(kind)
    taken = [name for name in named if name not in hidden and name not in (given or {})]
    for key, value in options.items():
        if key not in taken and not any_other:
            raise ConfigError(f"{place(key)}: {unknown_key(key, taken).replace('(keys:', '(options:')}")
        if (wrong := _misfit(named.get(key, Any), value)) is not None:
            raise ConfigError(f"{place(key)}: {wrong}; got {shorten(value)}")
    try:
        return kind(**(given or {}), **options)
    except MissingExtra:
        raise
    except (TypeError, ValueError, OSError, ImportError) as error:
        about = next((key for key in options if re.search(rf"\b{re.escape(key)}\b", str(error))), "")
        kind_of_error = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
        known = "" if any_other else f" (options: {', '.join(taken) or 'none'})"
        raise ConfigError(f"{place(about)}: {kind_of_error}{error}{known}") from error


def _misfit(hint: Any, value: Any) -> str | None:
    """Say what is expected if a value does not have its type. Lists may stand for other collections."""
    if hint is Any or hint is inspect.Parameter.empty:
        return None
    try:
        _adapter(hint).validate_python(value, strict=not isinstance(value, list))
    except pydantic.ValidationError as error:
        return error.errors(include_url=False)[0]["msg"]
    except (pydantic.errors.PydanticUserError, TypeError):
        return None  # no type that pydantic knows: the class decides itself
    return None


@functools.lru_cache(maxsize=256)
def _adapter(hint: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(hint)
