"""Tools and classes from Python files: each file becomes a module that nobody else shares."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torchrl_agentic.tools.function import FunctionTool, place_of, registering

_numbers = itertools.count()


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a module of its own; a second load gives another one.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: it raised; the message says in which line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    name = f"torchrl_agentic_file_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, pickle and annotations look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        told = str(error)
        if not told.startswith(f"{path}:"):  # our decorators begin with the place already
            told = f"{_where(path, error)}: {type(error).__name__}: {told}"
        raise ImportError(told) from error
    return module


def _where(path: Path, error: BaseException) -> str:
    """The last line of the file that had to do with an error."""
    if isinstance(error, SyntaxError):
        return f"{path}:{error.lineno}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)


def load_function_tools(path: str | Path) -> tuple[FunctionTool, ...]:
    """Give the tools of a file, in their order: what `@function_tool` or `@tool` made there, wherever.

    Behind them come those that the file imports by name.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: it raised.
        ValueError: two functions want one name.
    """
    path = Path(path).resolve()
    made: list[FunctionTool] = []
    token = registering.set(made)
    try:
        module = load_module(path)
    finally:
        registering.reset(token)
    named = [
        value if isinstance(value, FunctionTool) else getattr(value, "__tool__", None)
        for value in vars(module).values()
    ]
    own = [each for each in made if each.function.__module__ == module.__name__]
    made = list(dict.fromkeys([*own, *(each for each in named if isinstance(each, FunctionTool))]))
    by_name: dict[str, FunctionTool] = {}
    for each in made:
        if each.name in by_name:
            first, second = (place_of(one.function) for one in (by_name[each.name], each))
            raise ValueError(f"{second}: the name {each.name!r} is already registered to {first}")
        by_name[each.name] = each
        each.reduced = (load_again, (str(path), each.name))
    if not made:
        warnings.warn(f"{path}: no function in it is marked with @function_tool", stacklevel=2)
    return tuple(made)


@functools.cache
def _loaded(path: str) -> Mapping[str, FunctionTool]:
    return {each.name: each for each in load_function_tools(path)}


def load_again(path: str, name: str) -> FunctionTool:
    """Give a tool of a file that another process has loaded."""
    return _loaded(path)[name]


def load_object(reference: str, folder: Path | None = None) -> Any:
    """Give what `package.module:name`, `package.module.name` or `file.py:name` stands for.

    folder: what the path of a file is relative to; the working folder by default.

    Raises:
        ImportError: there is no such module or file, it raised, or it has no such name.
    """
    place, colon, name = reference.partition(":")
    if not colon:
        place, _, name = reference.rpartition(".")
    if not place or not name:
        raise ImportError(f"{reference!r}: expected 'package.module.Name' or 'file.py:Name'")
    if place.endswith(".py"):
        try:
            module = load_module((folder or Path()) / place)
        except FileNotFoundError as error:
            raise ImportError(str(error)) from None
    else:
        try:
            module = importlib.import_module(place)
        except ImportError:
            raise
        except Exception as error:  # whatever it does when it is run
            raise ImportError(f"{place}: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ImportError(f"{place}: has no {name!r}") from None
