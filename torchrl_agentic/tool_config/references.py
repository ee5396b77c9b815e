"""Classes and functions that a configuration names. Looking one up runs the code of its file.

Names come from configurations alone, never from data: whoever writes the file runs code here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from torchrl_agentic.tool_config.mistakes import nearest
from torchrl_agentic.tool_config.spot import Spot
from torchrl_agentic.tools.base import Tool
from torchrl_agentic.tools.function import FunctionTool
from torchrl_agentic.tools.loading import load_module, load_object
from torchrl_agentic.tools.tool_adapter import ensure_tool


class References:
    """What a configuration has looked up: each Python file is run once."""

    def __init__(self) -> None:
        self._modules: dict[Path, ModuleType] = {}

    def find(self, reference: str, spot: Spot) -> tuple[Any, Path | None]:
        """Give what `package.module.Name`, `package.module:Name` or `file.py:Name` names, and the file.

        Raises:
            ConfigError: there is no such thing, or its file raised; the message says where.
        """
        spot = spot.about(reference)
        place, _, name = reference.rpartition(":")
        if place.endswith(".py"):
            path = spot.path(place)
            return _member(self._module(path, spot), name, place, spot), path
        place, name = (place, name) if place else reference.rpartition(".")[::2]
        if not place or not name or reference.endswith(".py"):
            spot.fail("expected 'package.module.Name' or 'file.py:Name'")
        try:
            module = importlib.import_module(place)
        except Exception as error:  # whatever it does when it is run
            spot.fail(f"cannot import {place}: {_told(error)}{_as_file(error, place, name)}")
        return _member(module, name, place, spot), None

    def _module(self, path: Path, spot: Spot) -> ModuleType:
        if path not in self._modules:
            try:
                self._modules[path] = load_module(path)
            except ImportError as error:
                spot.fail(f"{error}{_hint(error.__cause__)}")
        return self._modules[path]

    def function_tool(self, reference: str, spot: Spot) -> Tool:
        """Give what a reference names as a tool; one from a file finds its way into other processes.

        Raises:
            ConfigError: it cannot be had, or is no tool.
        """
        found, path = self.find(reference, spot)
        if isinstance(found, type):
            spot.about(reference).fail(f"this is a class; write '- class_name: {reference}'")
        try:
            made = ensure_tool(found)
        except (TypeError, ValueError) as error:
            spot.about(reference).fail(str(error))
        if path is not None and isinstance(made, FunctionTool) and made.reduced is None:
            made.reduced = (function_again, (str(path), reference.rpartition(":")[2]))
        return made


def function_again(path: str, name: str) -> Tool:
    """Give a function of a file as a tool, in another process than the one that read the configuration."""
    return ensure_tool(load_object(f"{path}:{name}"))


def _member(module: ModuleType, name: str, place: str, spot: Spot) -> Any:
    if not hasattr(module, name):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        spot.fail(f"{place} has no {name!r}{nearest(name, names)}")
    return getattr(module, name)


def _told(error: BaseException) -> str:
    """Say what a module raised, and in which line."""
    where = raised_at(error)
    return f"{f'{where}: ' if where else ''}{type(error).__name__}: {error}{_hint(error)}"


def raised_at(error: BaseException) -> str | None:
    """Give the line of somebody else's file from which an error came."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        f
        for f in frames
        if f.filename[:1] != "<" and not f.filename.startswith((ours, importlib.__path__[0]))
    ]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else None


def _hint(error: BaseException | None) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "verl":
        return "; verl is not installed: import BaseTool and the like from torchrl_agentic.tools.verl"
    return ""


def _as_file(error: Exception, place: str, name: str) -> str:
    """Say how a class in a file is named, if its package is what was not found."""
    top = place.split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != top or top == "verl":
        return ""
    return f"; for a class or function in a file write '{place.replace('.', '/')}.py:{name}'"


def defined_at(thing: Any) -> str:
    """Say where a class or function begins, as `file:line`; its name if it has no source."""
    thing = inspect.unwrap(thing)
    code = getattr(thing, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        module = sys.modules.get(thing.__module__)
        return f"{getattr(module, '__file__', None) or thing.__module__}:{inspect.getsourcelines(thing)[1]}"
    except (OSError, TypeError):
        return f"{thing.__module__}.{thing.__qualname__}"
