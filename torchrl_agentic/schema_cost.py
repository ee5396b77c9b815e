"""Estimate how much work a JSON Schema makes of checking one value, so that a hostile one is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torchrl_agentic.messages import JSON
from torchrl_agentic.tidy import Schema, children_of, path_of

MAX_EVALUATIONS = 100_000
"""How often a schema may look at one value; a schema of 2 kB can do so 2 to the power of 22 times."""
_ANCHORS = ("$anchor", "$dynamicAnchor", "$id", "id")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ONE_OF_THEM = ("properties", "prefixItems")
"""Keywords of which one subschema at most looks at the same value."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The work that a schema makes.

    Attributes:
        evaluations: How often it looks at one value of the arguments, at most; at most `MAX_EVALUATIONS` + 1.
        is_recursive: Whether a reference leads back to where it came from. Such a one counts once.
    """

    evaluations: int
    is_recursive: bool


def cost_of(schema: Schema) -> Cost:
    """Estimate the work that a schema makes, in time linear in its size.

    Args:
        schema: A JSON Schema, not deeper than `tidy` allows.
    """
    root = cast("dict[str, JSON]", schema)
    named = _named(root)
    costs: dict[int, int] = {}
    started: set[int] = set()
    is_recursive = False
    todo: list[tuple[Schema, bool]] = [(root, False)]
    while todo:
        node, is_last = todo.pop()
        inner = list(_applied(node, root, named))
        if not is_last:
            if id(node) not in started:
                started.add(id(node))
                todo.append((node, True))
                todo += [(child, False) for _, child in inner]
            continue
        is_recursive = is_recursive or any(id(child) not in costs for _, child in inner)
        sums = 1 + sum(costs.get(id(child), 0) for key, child in inner if key not in _ONE_OF_THEM)
        for one in _ONE_OF_THEM:
            sums += max((costs.get(id(child), 0) for key, child in inner if key == one), default=0)
        costs[id(node)] = min(sums, MAX_EVALUATIONS + 1)
    return Cost(costs[id(root)], is_recursive)


def _applied(node: Schema, root: Schema, named: Mapping[str, Schema]) -> Iterator[tuple[str, Schema]]:
    """Yield the subschemas that a schema applies, each with its keyword."""
    for steps, child in children_of(node):
        if steps[0] not in ("$defs", "definitions") and isinstance(child, Mapping):
            yield steps[0], cast("Schema", child)
    for key in _REFERENCES:
        pointer = node.get(key)
        target = _target(pointer, root, named) if isinstance(pointer, str) else None
        if target is not None:
            yield key, target


def _target(pointer: str, root: Schema, named: Mapping[str, Schema]) -> Schema | None:
    path = path_of(pointer)
    if path is None:
        return named.get(pointer.rpartition("#")[2] or pointer)
    found: Any = root
    for step in path:
        if isinstance(found, Mapping):
            found = cast("Schema", found).get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(cast("list[JSON]", found)):
            found = cast("list[JSON]", found)[int(step)]
        else:
            return None
    return cast("Schema", found) if isinstance(found, Mapping) else None


def _named(root: Schema) -> Mapping[str, Schema]:
    """Return the subschemas that have an anchor or an id."""
    named: dict[str, Schema] = {}
    seen: set[int] = set()
    todo: list[Schema] = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        for key in _ANCHORS:
            name = node.get(key)
            if isinstance(name, str):
                named[name] = node
        todo += [cast("Schema", child) for _, child in children_of(node) if isinstance(child, Mapping)]
    return named
