"""What is wrong with a configuration, in words: file, line, what was met, what was expected."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import pydantic

from torchrl_agentic.tools.schema import shorten

Model = type[pydantic.BaseModel]
Steps = tuple[int | str, ...]


class ConfigError(ValueError):
    """A file that does not say what it should; the message names the file and what was expected."""


def mistakes_of(
    error: pydantic.ValidationError,
    model: Model,
    say: Callable[[Steps], str],
    elsewhere: Mapping[str, Iterable[str]] | None = None,
) -> str:
    """Say what pydantic found, one line each.

    say: steps → where that stands, and its name. elsewhere: section → its keys, for what is in the wrong one.
    """
    lines: list[str] = []
    for item in error.errors(include_url=False):
        steps = item["loc"]
        if item["type"] == "extra_forbidden":
            words = unknown_key(str(steps[-1]), keys_at(model, steps[:-1]), elsewhere or {})
        elif item["type"] == "missing":
            words = f"{steps[-1]!r} is missing"
        elif item["type"] == "value_error":
            words = item["msg"].removeprefix("Value error, ")
        else:
            words = f"{item['msg']}; got {shorten(item['input'])}"
        lines.append(f"{say(steps)}: {words}")
    return "\n".join(lines)


def unknown_key(key: str, known: Sequence[str], elsewhere: Mapping[str, Iterable[str]] | None = None) -> str:
    """Say that there is no such key: the nearest one, or the section that it belongs to."""
    near = difflib.get_close_matches(key, known, 1)
    sections = [name for name, keys in (elsewhere or {}).items() if key in keys]
    if near:
        hint = f"; did you mean {near[0]!r}?"
    elif sections:
        hint = f"; it belongs to {' or '.join(sections)}: is it indented as far as it should be?"
    else:
        hint = ""
    return f"unknown key {key!r}{hint} (keys: {', '.join(known) or 'none'})"


def keys_at(model: Model, steps: Sequence[int | str]) -> list[str]:
    """Give the keys that stand where `steps` lead to in what a model describes."""
    for step in steps:
        if isinstance(step, str) and step in model.model_fields:
            inner = _model_in(model.model_fields[step].annotation)
            if inner is None:
                return []
            model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> Model | None:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, typing.Annotated):
        found = (_model_in(each) for each in typing.get_args(annotation))
        return next((each for each in found if each is not None), None)
    return None


def nearest(word: str, known: Iterable[str]) -> str:
    """Give "; did you mean …?" if something is near."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def described(value: object) -> str:
    """Say in a word what a value of YAML is."""
    kinds = {dict: "a mapping", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    return kinds.get(cast("Any", type(value)), "a number")
