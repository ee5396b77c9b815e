"""Read a YAML file once, as plain values and one mapping from each value to its line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml

from torchrl_agentic.text import MAX_DEPTH, count_values, did_you_mean
from torchrl_agentic.tools.schema import shorten

Steps = tuple[str, ...]
MAX_VALUES = 200_000
"""Bound on the values of a file, with its aliases expanded."""
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)(?:,([^}]*))?\}")
_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigError(ValueError):
    """A mistake in a configuration; the message begins with `file:line`."""


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

    def fail(self, message: str) -> NoReturn:
        """Raise ConfigError with this position before the message."""
        raise ConfigError(f"{self}: {message}")

    def find_file(self, name: str) -> Path:
        """Return the absolute path of a file next to the YAML file, or else in the working directory."""
        tried = [folder / Path(name).expanduser() for folder in (self.folder, Path.cwd())]
        if found := [path.resolve() for path in tried if path.is_file()]:
            return found[0]
        folders = " or ".join(dict.fromkeys(str(path.parent.resolve()) for path in tried))
        raise ConfigError(f"{self}: no file {name!r}: there is no {tried[0].name} in {folders}")


class _Mistake(yaml.MarkedYAMLError):
    def __init__(self, message: str, node: Any) -> None:
        super().__init__(None, None, message, node.start_mark)


class _Loader(_FastLoader):
    """Refuses keys that are duplicate or not strings; replaces `${oc.env:NAME,default}` as OmegaConf does."""

    def flatten_mapping(self, node: Any) -> None:
        if hasattr(node, "is_flat"):
            return
        node.is_flat = True
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise _Mistake(
                    f"a key must be a string; quote {shorten(key.value)!r}, which YAML reads otherwise", key
                )
            if key.value in lines:
                raise _Mistake(
                    f"duplicate key {key.value!r}, first in line {lines[key.value]}; remove one", key
                )
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
    """Read a YAML file.

    Args:
        path: The file.

    Returns:
        Plain dicts, lists and scalars, and the location of the root.

    Raises:
        ConfigError: If the file is missing, empty or not YAML, has a duplicate key or a key that is not a
            string, uses an unset environment variable, or is too large or too deeply nested.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        text, depth = path.read_text("utf-8"), 0
        # Composing nodes recurses in C: bound the depth before.
        for event in cast("Any", yaml).parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ConfigError(
                    f"{path}:{event.start_mark.line + 1}: nested more than {MAX_DEPTH} levels deep"
                )
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{path}:1: the file is empty; expected keys, such as 'tools: [python, stop]'")
        data = loader.construct_document(root)
        count_values(data, max_values=MAX_VALUES)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}{_explain(error, path)}") from None
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


def _explain(error: yaml.MarkedYAMLError, path: Path) -> str:
    """Return line and message of an error, in the words of PyYAML's own parser where they are clearer."""
    try:
        yaml.SafeLoader(path.read_text("utf-8")).get_single_node()
    except yaml.MarkedYAMLError as clearer:
        error = clearer
    problem = ", ".join(str(part) for part in (error.context, error.problem) if part)
    is_indentation = "mapping values" in problem or "<block" in problem
    hint = "; indent with spaces, not with a tab" if "'\\t'" in problem else "; check the indentation"
    message = problem if isinstance(error, _Mistake) else f"not YAML: {problem}"
    line = error.problem_mark.line + 1 if error.problem_mark else 1
    return f":{line}: {message}{hint if is_indentation or 'tab' in hint else ''}"


def unknown_key(key: str, known: Iterable[str], hint: str = "") -> str:
    """Return the message for a key that does not exist.

    Args:
        key: The key, as it was written.
        known: The valid keys.
        hint: Text to add if no valid key is near.
    """
    known = list(known)
    expected = ", ".join(known) or "(none)"
    return f"unknown key {key!r}; expected one of {expected}{did_you_mean(key, known) or hint}"
