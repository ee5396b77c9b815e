"""YAML that remembers the line of each value, and refuses what PyYAML takes in silence."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from torchrl_agentic.text import MAX_DEPTH
from torchrl_agentic.tool_config.mistakes import ConfigError

Steps = Sequence[int | str]
_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, and worse at explaining
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)(?:,([^}]*))?\}")
MAX_NODES = 1_000_000
"""More values than this come from anchors that are nested in each other, not from a configuration."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML file holds, with the line of each value.

    Anchors, aliases and `<<` mean what they mean in YAML, and `${oc.env:NAME}` or `${oc.env:NAME,default}`
    what it means to OmegaConf, which reads verl's files.
    """

    path: Path
    data: Any
    root: yaml.Node

    def line(self, steps: Steps) -> int:
        """Give the line of a value, by the keys and indices that lead to it; or the nearest around."""
        node, mark = self.root, self.root.start_mark
        for step in steps:
            if isinstance(node, yaml.MappingNode):
                pairs = cast("list[tuple[yaml.Node, yaml.Node]]", node.value)
                found = [(key, value) for key, value in pairs if key.value == str(step)]
                if found:
                    key, node = found[-1]  # those merged by << stand before
                    mark = key.start_mark
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = cast("list[yaml.Node]", node.value)[step]
                mark = node.start_mark
        return cast("int", mark.line) + 1

    def place(self, steps: Steps) -> str:
        """Say where a value stands, as `file:line`."""
        return f"{self.path}:{self.line(steps)}"


def read_yaml(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        ConfigError: there is no such file, it is no YAML, a key stands twice or is no text, an environment
            variable is not set, it is nested deeper than `MAX_DEPTH`.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        text = path.read_text("utf-8")
        _check_depth(path, text)
        loader = _FAST(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{path}:1: the file is empty; expected e.g. 'tools: [python, stop]'")
        _check(path, root)
        return Document(path, loader.construct_document(root), root)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(_explain(path, error)) from None


def _check_depth(path: Path, text: str) -> None:
    """Raise ConfigError if the text is nested too deep; composing nodes recurses in C, events do not."""
    loader, depth = _FAST(text), 0
    while loader.check_event():
        event = loader.get_event()
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise _too_deep(path, event)


def _too_deep(path: Path, place: yaml.Event | yaml.Node) -> ConfigError:
    return ConfigError(f"{_at(path, place)}: nested more than {MAX_DEPTH} levels deep; make it flatter")


def _check(path: Path, root: yaml.Node) -> None:
    """Look at each node once; fill in environment variables."""
    known: dict[int, tuple[int, int]] = {}
    above: set[int] = set()

    def visit(node: yaml.Node) -> tuple[int, int]:
        """Return how many values a node stands for, and how deep they are nested."""
        if id(node) in above:
            raise ConfigError(f"{_at(path, node)}: an alias to what it stands in itself")
        if id(node) in known:
            return known[id(node)]
        above.add(id(node))
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.ScalarNode):
            _fill_in(path, node)
        elif isinstance(node, yaml.SequenceNode):
            inner = cast("list[yaml.Node]", node.value)
        elif isinstance(node, yaml.MappingNode):
            pairs = cast("list[tuple[yaml.Node, yaml.Node]]", node.value)
            _check_keys(path, [key for key, _ in pairs])
            inner = [value for _, value in pairs]
        size, depth = 1, 0
        for child in inner:
            found = visit(child)
            size, depth = size + found[0], max(depth, found[1] + 1)
        above.remove(id(node))
        if size > MAX_NODES:
            raise ConfigError(f"{_at(path, node)}: its aliases stand for more than {MAX_NODES} values")
        if depth > MAX_DEPTH:  # aliases nest further
            raise _too_deep(path, node)
        known[id(node)] = size, depth
        return known[id(node)]

    visit(root)


def _check_keys(path: Path, keys: Sequence[yaml.Node]) -> None:
    first: dict[str, yaml.Node] = {}
    for key in keys:
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            met = repr(key.value) if isinstance(key, yaml.ScalarNode) else "something else"
            raise ConfigError(
                f"{_at(path, key)}: a key is a text; got {met}, which YAML reads otherwise: quote it"
            )
        name = cast("str", key.value)
        if name in first:
            line = cast("int", first[name].start_mark.line) + 1
            raise ConfigError(
                f"{_at(path, key)}: {name!r} stands twice, here and in line {line}; leave one of them out"
            )
        first[name] = key


def _fill_in(path: Path, node: yaml.ScalarNode) -> None:
    """Put in what `${oc.env:NAME}` stands for."""

    def variable(found: re.Match[str]) -> str:
        name: str = found.group(1)
        default: str | None = found.group(2)
        value = os.environ.get(name, default)
        if value is None:
            raise ConfigError(f"{_at(path, node)}: the environment variable {name!r} is not set; set it")
        return value

    text = cast("str", node.value)
    if "${" in text:
        node.value = _ENVIRONMENT.sub(variable, text)


def _at(path: Path, node: yaml.Event | yaml.Node) -> str:
    return f"{path}:{cast('int', node.start_mark.line) + 1}"


def _explain(path: Path, error: Exception) -> str:
    """Say why a file is no YAML, in the words of the parser that explains better."""
    if isinstance(error, UnicodeDecodeError):
        return f"{path}: no text in UTF-8: {error}"
    try:
        yaml.SafeLoader(path.read_text("utf-8")).get_single_node()
    except yaml.MarkedYAMLError as better:
        error = better
    except (yaml.YAMLError, RecursionError):  # it reads on where the other one stops
        pass
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{path}: no YAML: {error}"
    line = error.problem_mark.line + 1
    if "'\\t'" in str(error.problem):
        return f"{path}:{line}: a tab; YAML is indented by spaces"
    indented = "mapping values" in str(error.problem) or "<block" in str(error.problem)
    hint = "; does it stand in the same column as what it belongs to?" if indented else ""
    problem = ", ".join(str(part) for part in (error.context, error.problem) if part)
    return f"{path}:{line}: no YAML: {problem}{hint}"
