"""Estimate how much work a JSON Schema makes of checking one value, so that a hostile one is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.tools.schema_simplify import Schema, children_of, path_of

MAX_EVALUATIONS = 100_000
"""How often a schema may look at one value; a schema of 2 kB can do so 2 to the power of 22 times."""
_ANCHORS = ("$anchor", "$dynamicAnchor", "$id", "id")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_UNIONS = ("anyOf", "oneOf")
_CASES = {key: f"cases of {key}" for key in _UNIONS}
_ONE_OF_THEM = ("properties", "prefixItems", *_CASES.values())
"""Keywords of which one subschema at most looks at the same value."""
_NO_CASES = ("draft-04/", "draft-06/")
"""Dialects without `if`."""
_MAX_KEYS, _MAX_TEXTS = 16, 100
"""How many required properties, and how many texts of one, are looked at to tell alternatives apart."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The work that a schema makes.

    Attributes:
        evaluations: How often it looks at one value of the arguments, at most; at most `MAX_EVALUATIONS` + 1.
        is_recursive: Whether a reference leads back to where it came from. Such a one counts once.
    """

    evaluations: int
    is_recursive: bool


@dataclass(frozen=True, slots=True)
class Cases:
    """Alternatives of which one property says which one is meant.

    Attributes:
        key: The name of the property.
        values: Index of an alternative → what the property is there. No two have a value in common.
    """

    key: str
    values: Mapping[int, Sequence[str]]

    def guard(self, indexes: Sequence[int]) -> dict[str, JSON]:
        """Return the schema of objects that one of some alternatives is meant for."""
        values = [value for index in indexes for value in self.values[index]]
        return {"type": "object", "required": [self.key], "properties": {self.key: {"enum": values}}}


class CaseFinder:
    """Finds alternatives that a property tells apart, in one schema.

    Args:
        schema: The JSON Schema.
    """

    def __init__(self, schema: Schema) -> None:
        self.root = schema
        self.named = _named(schema)
        dialect = schema.get("$schema")
        # To tell them apart, alternatives are moved: no reference may lead into them, or elsewhere by an id.
        self._can_find = (
            all(node is schema for node in self.named.values())
            and not (isinstance(dialect, str) and any(name in dialect for name in _NO_CASES))
            and not any(_leads_into_union(node) for node in _nodes(schema))
        )

    def find(self, branches: JSON) -> Cases | None:
        """Return the alternatives that a property tells apart; None if it is not two of them at least.

        Args:
            branches: What `anyOf` or `oneOf` is.
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
        """Yield the properties that every value of an alternative has, with the texts that each can be."""
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
    """Estimate the work that a schema makes, in time linear in its size.

    Of alternatives that a property tells apart, the one that makes most counts, and a look at each.

    Args:
        schema: A JSON Schema, not deeper than `simplify_schema` allows.
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
            told = cases.get(steps[0])
            is_case = told is not None and int(steps[1]) in told.values
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
