"""Estimate the work of checking one value against a JSON Schema, so that hostile schemas are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.tools.schema_simplify import Schema, children_of, path_of

MAX_EVALUATIONS = 100_000
"""Most times that a schema may check one value; a schema of 2 kB can check one 2 to the power of 22 times."""
_ANCHORS = ("$anchor", "$dynamicAnchor", "$id", "id")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_UNIONS = ("anyOf", "oneOf")
_CASES = {key: f"cases of {key}" for key in _UNIONS}
_ONE_OF_THEM = ("properties", "prefixItems", *_CASES.values())
"""Keywords of which at most one subschema checks the same value."""
_NO_CASES = ("draft-04/", "draft-06/")
"""Dialects without `if`."""
_MAX_KEYS, _MAX_TEXTS = 16, 100
"""Most required properties, and most values of one, that are compared to distinguish alternatives."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of checking arguments against a schema.

    Attributes:
        evaluations: Upper bound on the checks of one value of the arguments; at most `MAX_EVALUATIONS` + 1.
        is_recursive: Whether a reference leads back to where it came from. Such a reference counts once.
    """

    evaluations: int
    is_recursive: bool


@dataclass(frozen=True, slots=True)
class Cases:
    """Alternatives that the value of one property distinguishes.

    Attributes:
        key: Name of the property.
        values: Index of an alternative → values of the property. No two alternatives share a value.
    """

    key: str
    values: Mapping[int, Sequence[str]]

    def guard(self, indexes: Sequence[int]) -> dict[str, JSON]:
        """Return the schema of the objects that select one of these alternatives."""
        values = [value for index in indexes for value in self.values[index]]
        return {"type": "object", "required": [self.key], "properties": {self.key: {"enum": values}}}


class CaseFinder:
    """Finds alternatives that a property distinguishes, in one schema.

    Args:
        schema: The JSON Schema.
    """

    def __init__(self, schema: Schema) -> None:
        self.root = schema
        self.named = _named(schema)
        dialect = schema.get("$schema")
        # Such alternatives are moved, so no reference may point into them, and no id may change references.
        self._can_find = (
            all(node is schema for node in self.named.values())
            and not (isinstance(dialect, str) and any(name in dialect for name in _NO_CASES))
            and not any(_leads_into_union(node) for node in _nodes(schema))
        )

    def find(self, branches: JSON) -> Cases | None:
        """Return the alternatives that a property distinguishes; None if there are fewer than two.

        Args:
            branches: Value of `anyOf` or `oneOf`.
        """
        if not self._can_find or not isinstance(branches, list | tuple):
            return None
        found: dict[str, dict[int, list[str]]] = {}
        taken: dict[str, set[str]] = {}
        for index, branch in enumerate(cast("list[JSON]", branches)):
            for key, values in self._constants(branch):
                if taken.setdefault(key, set()).isdisjoint(values):
                    taken[key].update(values)
                    found.setdefault(key, {})[index] = values
        key = max(found, key=lambda name: len(found[name]), default=None)
        return None if key is None or len(found[key]) < 2 else Cases(key, found[key])

    def _constants(self, branch: JSON) -> Iterator[tuple[str, list[str]]]:
        """Yield the required properties of an alternative that have constant values, with these values."""
        for _ in range(8):
            pointer = (fields_of(branch) or {}).get("$ref")
            if not isinstance(pointer, str):
                break
            branch = _target(pointer, self.root, {})
        node = fields_of(branch) or {}
        if "$ref" in node or node.get("type") != "object":
            return
        properties, required = node.get("properties"), node.get("required")
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            return
        for key in cast("Sequence[JSON]", required)[:_MAX_KEYS]:
            child = cast("Schema", properties).get(key) if isinstance(key, str) else None
            if isinstance(child, Mapping) and "$ref" not in child:
                fields = cast("Schema", child)
                known = [fields["const"]] if "const" in fields else fields.get("enum")
                if isinstance(known, list) and 0 < len(cast("list[JSON]", known)) <= _MAX_TEXTS:
                    texts = [value for value in cast("list[JSON]", known) if isinstance(value, str)]
                    if len(texts) == len(cast("list[JSON]", known)):
                        yield key, texts


def _leads_into_union(node: Schema) -> bool:
    pointers = [node[key] for key in _REFERENCES if isinstance(node.get(key), str)]
    return any(not {*_UNIONS}.isdisjoint(path_of(pointer) or ()) for pointer in pointers)


def cost_of(schema: Schema) -> Cost:
    """Estimate the work of checking one value, in time linear in the size of the schema.

    Of alternatives that a property distinguishes, only the most expensive one counts, and one check of each.

    Args:
        schema: A JSON Schema, not deeper than `simplify_schema` allows.

    Returns:
        The cost.
    """
    root = cast("dict[str, JSON]", schema)
    finder = CaseFinder(root)
    costs: dict[int, int] = {}
    started: set[int] = set()
    is_recursive = False
    todo: list[tuple[Schema, bool]] = [(root, False)]
    while todo:
        node, is_last = todo.pop()
        if not is_last and id(node) in started:
            continue
        inner = list(_applied(node, finder))
        if not is_last:
            started.add(id(node))
            todo.append((node, True))
            todo += [(child, False) for _, child in inner]
            continue
        is_recursive = is_recursive or any(id(child) not in costs for _, child in inner)
        sums = 1 + sum(costs.get(id(child), 0) for key, child in inner if key not in _ONE_OF_THEM)
        for one in _ONE_OF_THEM:
            sums += sum(key == one for key, _ in inner) if one in _CASES.values() else 0
            sums += max((costs.get(id(child), 0) for key, child in inner if key == one), default=0)
        costs[id(node)] = min(sums, MAX_EVALUATIONS + 1)
    return Cost(costs[id(root)], is_recursive)


def _applied(node: Schema, finder: CaseFinder) -> Iterator[tuple[str, Schema]]:
    """Yield the subschemas that a schema applies, each with its keyword."""
    cases = {key: finder.find(node[key]) for key in _UNIONS if key in node}
    for steps, child in children_of(node):
        if steps[0] not in ("$defs", "definitions") and isinstance(child, Mapping):
            known = cases.get(steps[0])
            is_case = known is not None and int(steps[1]) in known.values
            yield _CASES[steps[0]] if is_case else steps[0], cast("Schema", child)
    for key in _REFERENCES:
        pointer = node.get(key)
        target = _target(pointer, finder.root, finder.named) if isinstance(pointer, str) else None
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
    return {name: node for node in _nodes(root) for key in _ANCHORS if isinstance(name := node.get(key), str)}


def _nodes(root: Schema) -> Iterator[Schema]:
    """Yield a schema and its subschemas, each once."""
    seen: set[int] = set()
    todo: list[Schema] = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        todo += [cast("Schema", child) for _, child in children_of(node) if isinstance(child, Mapping)]
