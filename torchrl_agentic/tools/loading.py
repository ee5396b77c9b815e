"""Load tools and classes from Python files; each load of a file creates a separate module."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torchrl_agentic.text import did_you_mean
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.function import FunctionTool, place_of, registering
from torchrl_agentic.tools.tool_adapter import ensure_tool
from torchrl_agentic.tools.verl.equivalents import equivalent_of

_numbers = itertools.count()


def load_module(path: Path) -> ModuleType:
    """Run a Python file as a separate module; a second load returns another one.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If the file does not exist.
        ImportError: If it raises; the message has the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    name = f"torchrl_agentic_file_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, pickle and annotations look for it there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        message = str(error)
        if not message.startswith(f"{path}:"):  # errors of our decorators have the place already
            message = f"{_where(path, error)}: {type(error).__name__}: {message}"
        raise ImportError(message) from error
    return module


def _where(path: Path, error: BaseException) -> str:
    """Return the last line of the file that was running when an error was raised."""
    if isinstance(error, SyntaxError):
        return f"{path}:{error.lineno}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)


def load_function_tools(path: str | Path) -> tuple[FunctionTool, ...]:
    """Return the tools of a file: functions with `@function_tool` or `@tool`, in order, then imported ones.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If the file does not exist.
        ImportError: If it raises.
        ValueError: If two functions have the same tool name.
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
    """Return a tool of a file that another process has loaded.

    Args:
        path: The file.
        name: Name of the tool.
    """
    return _loaded(path)[name]


def find_file(name: str | Path, *folders: Path) -> Path:
    """Return the absolute path of a file.

    Args:
        name: The file, which may begin with "~".
        *folders: Directories that its path may be relative to, the first one first; none for the working
            directory.

    Raises:
        FileNotFoundError: If it is in none of them.
    """
    paths = [folder / Path(name).expanduser() for folder in folders or (Path(),)]
    if found := [path.resolve() for path in paths if path.is_file()]:
        return found[0]
    searched = " or ".join(dict.fromkeys(str(path.parent.resolve()) for path in paths))
    raise FileNotFoundError(f"no file {str(name)!r}: there is no {paths[0].name} in {searched}")


def load_object(reference: str, *folders: Path, load: Callable[[Path], ModuleType] = load_module) -> Any:
    """Return the object that `package.module:name`, `package.module.name` or `file.py:name` refers to.

    The name of a class of verl leads to the class here that does the same.

    Args:
        reference: The name.
        *folders: Directories that the path of a file may be relative to; see `find_file`.
        load: Runs a file as a module.

    Raises:
        ImportError: If the module or file does not exist, raises, or does not have this name.
    """
    found = equivalent_of(reference)
    place, _, name = found.rpartition(":" if ":" in found else ".")
    if not place or not name or found.endswith(".py"):
        raise ImportError(f"{reference!r}: expected 'package.module.Name' or 'file.py:Name'")
    try:
        in_file = place.endswith(".py")
        module = load(find_file(place, *folders)) if in_file else importlib.import_module(place)
    except FileNotFoundError as error:
        raise ImportError(str(error)) from None
    except Exception as error:  # of the code that runs
        has_place = place.endswith(".py") and isinstance(error, ImportError)
        message = str(error) if has_place else error_with_place(error)
        raise ImportError(f"cannot import {place}: {message}{_hint(error, place, name)}") from error
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ImportError(f"{place} has no attribute {name!r}{did_you_mean(name, names)}")
    return getattr(module, name)


def load_tool(reference: str, *folders: Path, load: Callable[[Path], ModuleType] = load_module) -> Tool:
    """Return the tool that a name refers to, or a function as a tool; that of a file can be pickled.

    Args:
        reference: The name, as for `load_object`.
        *folders: Directories that the path of a file may be relative to; see `find_file`.
        load: Runs a file as a module.

    Raises:
        ImportError: If there is no such object.
        TypeError: If it cannot be a tool.
        ValueError: If its docstring and signature do not fit.
    """
    found = load_object(reference, *folders, load=load)
    if isinstance(found, type):
        raise TypeError(f"{reference!r} is a class, not a function; write '- class_name: {reference}'")
    made = ensure_tool(found)
    path, _, name = reference.rpartition(":")
    if path.endswith(".py") and isinstance(made, FunctionTool) and made.reduced is None:
        made.reduced = (load_tool, (f"{find_file(path, *folders)}:{name}",))
    return made


def error_with_place(error: BaseException) -> str:
    """Return the text of an error with the last line of the user's code that was running.

    Args:
        error: Raised by code that a user wrote.
    """
    ours = (str(Path(__file__).parent), importlib.__path__[0], "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}: "
    return f"{place}{type(error).__name__}: {error}"


def _hint(error: BaseException | None, place: str, name: str) -> str:
    """Return advice if a module that does not exist is verl, or the directory of a file."""
    missing = error if isinstance(error, ModuleNotFoundError) else error and error.__cause__
    if not isinstance(missing, ModuleNotFoundError):
        return ""
    top = str(missing.name).partition(".")[0]
    if top == "verl":
        return "; verl is not installed: import BaseTool and the like from torchrl_agentic.tools.verl"
    is_directory = missing is error and top == place.partition(".")[0]
    return f"; for a file write '{place.replace('.', '/')}.py:{name}'" if is_directory else ""
