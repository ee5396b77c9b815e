"""Read a YAML file once, as plain values and one mapping from each value to its line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import yaml

from torchrl_agentic.errors import ConfigError, MissingExtra
from torchrl_agentic.text import MAX_DEPTH, count_values, shorten
from torchrl_agentic.tools.options import OptionError

Steps = tuple[str, ...]
T = TypeVar("T")
MAX_VALUES = 200_000
"""Bound on the values of a file, with its aliases expanded."""
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)(?:,([^}]*))?\}")
_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Location:
    """A position in a configuration.

    Attributes:
        folder: Directory that relative paths refer to.
        path: YAML file, or None for a configuration made in Python.
        lines: Line of each value, by the keys and indices (as strings) that lead to it.
        steps: Keys and indices that lead to this position.
    """

    folder: Path
    path: Path | None = None
    lines: Mapping[Steps, int] = field(default_factory=dict[Steps, int], repr=False, hash=False)
    steps: Steps = ()

    def at(self, *steps: int | str) -> Location:
        """Return a position further inside."""
        return replace(self, steps=(*self.steps, *map(str, steps)))

    @property
    def place(self) -> str:
        """The `file:line` of this value, or of the nearest value around it."""
        known = (self.lines.get(self.steps[:length]) for length in range(len(self.steps), -1, -1))
        return f"{self.path}:{next(filter(None, known), 1)}" if self.path else "the configuration"

    def __str__(self) -> str:
        name = ".".join(self.steps)
        return f"{self.place}: {name}" if self.path and name else name or self.place

    def fail(self, message: object) -> NoReturn:
        """Raise ConfigError with this position before the message."""
        raise ConfigError(f"{self}: {message}")

    def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function; its errors become those of this position, or of the option that they name.

        Args:
            function: The function.
            *args: Its arguments.
            **options: Its keyword arguments.
        """
        try:
            return function(*args, **options)
        except MissingExtra:
            raise
        except (ImportError, TypeError, ValueError, FileNotFoundError) as error:
            where = self.at(*error.steps) if isinstance(error, OptionError) else self
            raise ConfigError(f"{where}: {error}") from error

    def find(self, function: Callable[..., T], name: str, **options: Any) -> T:
        """Call `find_file`, `load_object` or `load_tool`; files are next to the YAML file, or in the cwd.

        Args:
            function: The function.
            name: Name of the file or object.
            **options: Further arguments of the function.
        """
        return self.call(function, name, self.folder, Path.cwd(), **options)


class _Mistake(yaml.MarkedYAMLError):
    def __init__(self, message: str, node: Any) -> None:
        super().__init__(problem=message, problem_mark=node.start_mark)


class _Loader(_FastLoader):
    """Refuses keys that are duplicate or not strings; replaces `${oc.env:NAME,default}` as OmegaConf does."""

    def flatten_mapping(self, node: Any) -> None:
        if hasattr(node, "is_flat"):
            return
        node.is_flat = True
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise _Mistake(f"a key must be a string; quote {shorten(key.value)!r}", key)
            if key.value in lines:
                raise _Mistake(f"duplicate key {key.value!r}, first in line {lines[key.value]}", key)
            lines[key.value] = key.start_mark.line + 1
        _FastLoader.flatten_mapping(self, node)
        if len(node.value) > MAX_VALUES:
            raise _Mistake(f"merges more than {MAX_VALUES} values", node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return _FastLoader.construct_object(self, node, deep)
        except ValueError as error:
            raise _Mistake(f"cannot read {shorten(node.value)!r}: {error}", node) from None

    def construct_scalar(self, node: Any) -> Any:
        def variable(found: re.Match[str]) -> str:
            default: str | None = found[2]
            if (value := os.environ.get(found[1], default)) is None:
                raise _Mistake(f"the environment variable {found[1]!r} is not set; set it", node)
            return value

        value = _FastLoader.construct_scalar(self, node)
        return _ENVIRONMENT.sub(variable, value) if isinstance(value, str) else value


def read_yaml(path: str | Path) -> tuple[Any, Location]:
    """Return the plain dicts, lists and scalars of a YAML file, and the location of the root.

    Args:
        path: The file.

    Raises:
        ConfigError: If the file is missing, empty or not YAML, has a duplicate key or a key that is not a
            string, uses an unset environment variable, or is too large or too deeply nested.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        text, depth = path.read_text("utf-8"), 0
        for event in cast("Any", yaml).parse(text, _Loader):  # composing nodes recurses in C: check before
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _Mistake(f"nested more than {MAX_DEPTH} levels deep", event)
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{path}:1: the file is empty; expected keys, such as 'tools: [python, stop]'")
        data = loader.construct_document(root)
        count_values(data, max_values=MAX_VALUES)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        place = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else str(path)
        if isinstance(error, _Mistake):
            raise ConfigError(f"{place}: {error.problem}") from None
        problem = ", ".join(filter(None, (error.context, error.problem)))
        hint = "check the indentation (spaces, never a tab), the quotes and the brackets"
        raise ConfigError(f"{place}: not YAML: {problem}; {hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return data, Location(path.resolve().parent, path, dict(_lines(root)))


def _lines(node: yaml.Node, steps: Steps = (), line: int = 1) -> Iterator[tuple[Steps, int]]:
    """Yield the line of each value; for a key of a mapping, that of the key."""
    yield steps, line
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:  # merged keys come first
            yield from _lines(value, (*steps, key.value), key.start_mark.line + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines(item, (*steps, str(index)), item.start_mark.line + 1)
