"""Simplify JSON Schemas for prompts without changing which values they accept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias, cast
from urllib.parse import unquote

from torchrl_agentic.messages import JSON, fields_of
from torchrl_agentic.text import TooDeepError, TooManyValuesError, count_values

Schema: TypeAlias = Mapping[str, JSON]
Path: TypeAlias = tuple[str, ...]
"""Steps of a JSON pointer from the root of a schema to one of its subschemas."""

MAX_DEPTH = 128
"""Deepest nesting of a schema, in steps of a JSON pointer."""
MAX_INLINE_DEPTH = 64
"""Depth of the result, in steps of a JSON pointer, below which references are kept."""
MAX_INLINED = 2_000
"""Approximate number of subschemas that are inlined; further references are kept."""
MAX_NODES = 10_000
"""Most subschemas of a schema."""
MAX_VALUES = 1_000_000
"""Most values in a schema, those of its enumerations and examples included."""

ONE_OR_MANY = frozenset((
    "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties",
    "unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "contentSchema",
))  # fmt: skip
"""Keywords whose value is a schema or a list of schemas."""
DEFINITIONS = ("$defs", "definitions")
BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "dependencies", *DEFINITIONS))
"""Keywords whose value maps names to schemas."""
ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
))  # fmt: skip
"""Keywords that do not affect validation."""
_VALUES = frozenset(("type", "enum", "const", "required", "format", "pattern", "dependentRequired"))
"""Other keywords whose strings are no pointers."""
_GONE = object()
TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
"""The types of JSON Schema."""
MEANT_TYPES: Mapping[str, str | None] = {
    "str": "string", "text": "string", "char": "string", "varchar": "string",
    "int": "integer", "int32": "integer", "int64": "integer", "uint": "integer", "long": "integer",
    "short": "integer", "bigint": "integer",
    "num": "number", "float": "number", "float32": "number", "float64": "number", "double": "number",
    "decimal": "number",
    "bool": "boolean",
    "list": "array", "tuple": "array", "arr": "array", "arraylist": "array", "set": "array",
    "dict": "object", "dictionary": "object", "map": "object", "mapping": "object", "hashmap": "object",
    "none": "null", "nonetype": "null",
    "any": None,
}  # fmt: skip
"""Type names of other languages, in lower case → the type of JSON Schema; None: any type."""
_GENERIC = re.compile(r"[\[<(]")
_ANCHORS = frozenset(("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"))
_ROOT_ONLY = frozenset((*DEFINITIONS, "$schema", "$id", "$vocabulary"))
_REF_ALONE = ("draft-04/", "draft-06/", "draft-07/")
"""Dialects that ignore the keywords beside `$ref`."""


def meant_types(kind: JSON) -> JSON:
    """Translate the value of the keyword `type` into JSON Schema.

    Args:
        kind: A name, such as `float`, `dict` or `STRING`, or a list of names. What a generic type holds is
            ignored: `list[str]` means `array`.

    Returns:
        A name, or a list of names; None if any type is allowed. Unknown names and other values stay.
    """
    if isinstance(kind, str):
        return _meant_type(kind)
    if not isinstance(kind, list):
        return kind
    names: list[JSON] = []
    for name in cast("list[JSON]", kind):
        meant = _meant_type(name) if isinstance(name, str) else name
        if meant is None and name is not None:
            return None
        if meant not in names:
            names.append(meant)
    return names


def _meant_type(name: str) -> str | None:
    bare = name if name in TYPES else _GENERIC.split(name.lower(), maxsplit=1)[0].strip()
    return bare if bare in TYPES else MEANT_TYPES.get(bare, name)


def simplify_schema(schema: Schema) -> dict[str, JSON]:
    """Simplify a schema for a prompt; the result accepts the same values.

    Replaces references by their definitions, because chat templates do not follow `$ref`, and drops generated
    titles, keywords that are None, definitions that nothing refers to, and pointers to these. Translates
    types that JSON Schema does not have, such as `float` and `dict` (`MEANT_TYPES`). Keeps a reference and
    its definition if it is recursive, if it involves `$id`, anchors or dynamic references, and beyond
    `MAX_INLINED` subschemas.
    Keywords beside `$ref` are kept too, except in draft-07 and older, which ignore them.

    Args:
        schema: A JSON Schema. Its dialect is 2020-12 unless `$schema` names another one.

    Returns:
        A new schema. It may share parts with `schema` and with itself.

    Raises:
        ValueError: If the schema is nested deeper than `MAX_DEPTH`, or has more than `MAX_NODES` subschemas
            or `MAX_VALUES` values.
    """
    try:
        count_values(schema, max_values=MAX_VALUES)
    except TooDeepError as error:
        raise ValueError(f"the schema is {error}") from None
    except TooManyValuesError as error:
        raise ValueError(f"the schema holds {error}") from None
    source = _Source(schema)
    first = _Simplification(source, keeps_definitions=source.keeps_all)
    plain = first.run()
    if not first.keeps_definitions and first.kept & source.in_nested_definitions:
        return _Simplification(source, keeps_definitions=True).run()
    return plain


class _Source:
    """Index of the subschemas and the references of a schema.

    Attributes:
        nodes: The subschemas by their path, without those below a nested `$id` or `$schema`.
        refs: Path of a subschema with `$ref` → path of its target.
        fixed: Paths of subschemas that must not be copied: an anchor or a nested `$id` is in them.
        recursive: Targets of references that recur.
        in_nested_definitions: Paths inside a `$defs` that is not the root's.
        keeps_all: Whether there is a reference that only a validator can follow, so that all definitions are
            needed.
        ref_alone: Whether the dialect ignores the keywords beside `$ref`.
    """

    def __init__(self, schema: Schema) -> None:
        dialect = schema.get("$schema")
        self.ref_alone = isinstance(dialect, str) and any(name in dialect for name in _REF_ALONE)
        self.scope_keys = ("$id", "$schema", *(["id"] if self.ref_alone else []))
        self.nodes: dict[Path, JSON] = {}
        self.refs: dict[Path, Path] = {}
        self.fixed: set[Path] = set()
        self.in_nested_definitions: set[Path] = set()
        self.keeps_all = False
        pointers: dict[Path, str] = {}
        todo: list[tuple[Path, JSON, bool]] = [((), schema, False)]
        while todo:
            path, node, nested = todo.pop()
            if len(path) > MAX_DEPTH:
                raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep; make it flatter")
            if path and self.has_scope(node):
                self._fix(path)
                continue
            self.nodes[path] = node
            if len(self.nodes) > MAX_NODES:
                raise ValueError(f"the schema has more than {MAX_NODES} subschemas; make it smaller")
            if nested:
                self.in_nested_definitions.add(path)
            if not isinstance(node, Mapping):
                continue
            fields = cast("Schema", node)
            if not _ANCHORS.isdisjoint(fields):
                self._fix(path)
            if isinstance(fields.get("$ref"), str):
                pointers[path] = fields["$ref"]
            todo += (
                ((*path, *steps), child, nested or (bool(path) and steps[0] in DEFINITIONS))
                for steps, child in children_of(fields)
            )
        for path, pointer in pointers.items():
            target = path_of(pointer)
            if target is not None and target in self.nodes:
                self.refs[path] = target
            else:
                self.keeps_all = True
        self.recursive = self._recursive()

    def has_scope(self, node: JSON) -> bool:
        """Return whether a nested schema has a base URI or a dialect of its own."""
        fields = fields_of(node) or {}
        return any(isinstance(fields.get(key), str) for key in self.scope_keys)

    def _fix(self, path: Path) -> None:
        self.keeps_all = True
        self.fixed.update(path[:length] for length in range(1, len(path) + 1))

    def _recursive(self) -> set[Path]:
        """Return the targets on a cycle of references, or between two cycles."""
        targets = set(self.refs.values()) - {()}
        edges = {
            (path[:length], target)
            for path, target in self.refs.items()
            for length in range(1, len(path) + 1)
            if path[:length] in targets and target in targets
        }
        for end in (0, 1):  # remove what leads to no cycle, then what no cycle leads to
            others: dict[Path, set[Path]] = {}
            count = dict.fromkeys(targets, 0)
            for edge in edges:
                if edge[0] in targets and edge[1] in targets:
                    others.setdefault(edge[1 - end], set()).add(edge[end])
                    count[edge[end]] += 1
            free = [target for target, left in count.items() if not left]
            while free:
                target = free.pop()
                targets.discard(target)
                for other in others.get(target, ()):
                    count[other] -= 1
                    if not count[other]:
                        free.append(other)
        return targets


class _Simplification:
    """One pass over a schema.

    Attributes:
        kept: Targets of the references that the result keeps.
    """

    def __init__(self, source: _Source, *, keeps_definitions: bool) -> None:
        self.source = source
        self.keeps_definitions = keeps_definitions
        self.kept: set[Path] = set()
        self._left = len(source.nodes) + MAX_INLINED

    def run(self) -> dict[str, JSON]:
        plain = cast("dict[str, JSON]", self._node((), self.source.nodes[()], 0, inside=False))
        done: set[Path] = set()
        while not self.keeps_definitions and (pending := {path[:2] for path in self.kept} - done):
            for path in sorted(pending):
                done.add(path)
                if path and path[0] in DEFINITIONS:
                    definition = self._node(path, self.source.nodes[path], 2, inside=True)
                    plain.setdefault(path[0], {})[path[1]] = definition
        return plain

    def _node(self, path: Path, node: JSON, depth: int, *, inside: bool) -> JSON:
        """Simplify the subschema at `path`.

        Args:
            path: Its path in the source.
            node: The subschema.
            depth: Its depth in the result, in steps of a JSON pointer.
            inside: Whether it is part of a recursive definition, which is inlined only once.
        """
        fields = fields_of(node)
        if fields is None or path not in self.source.nodes:
            return node
        self._left -= 1
        inside = inside or path in self.source.recursive
        plain: dict[str, JSON] = {}
        for key, value in _keywords(cast("Schema", node)):
            if key in DEFINITIONS and not self.keeps_definitions:
                continue
            if key in BY_NAME and isinstance(value, Mapping):
                named = plain[key] = {}
                for name, child in cast("Schema", value).items():
                    named[name] = self._node((*path, key, name), child, depth + 2, inside=inside)
            elif key in ONE_OR_MANY and isinstance(value, list | tuple):
                several: list[JSON] = []
                plain[key] = several
                for index, child in enumerate(cast("list[JSON]", value)):
                    several.append(self._node((*path, key, str(index)), child, depth + 2, inside=inside))
            elif key in ONE_OR_MANY:
                plain[key] = self._node((*path, key), value, depth + 1, inside=inside)
            elif self.keeps_definitions or key in _VALUES or key in ANNOTATIONS or key.startswith("$"):
                plain[key] = value
            elif (kept := _without_pointers(value)) is not _GONE:
                plain[key] = kept
        target = self.source.refs.get(path)
        return plain if target is None else self._inlined(plain, target, path, depth, inside=inside)

    def _inlined(self, plain: dict[str, JSON], target: Path, path: Path, depth: int, *, inside: bool) -> JSON:
        """Replace the `$ref` of a simplified subschema by its target, or keep it."""
        is_recursive = target in self.source.recursive
        beside = plain.keys() - {"$ref"} - ANNOTATIONS - (frozenset() if path else _ROOT_ONLY)
        if (
            not target
            or target in self.source.fixed
            or (is_recursive and inside)
            or (beside and self.source.ref_alone)
            or depth > MAX_INLINE_DEPTH
            or self._left < 0
        ):
            self.kept.add(target)
            return plain
        definition = self._node(target, self.source.nodes[target], depth + 1, inside=inside)
        rest = {key: value for key, value in plain.items() if key != "$ref"}
        if not beside and isinstance(definition, dict):
            return {**cast("Schema", definition), **rest}
        if path and not rest:
            return definition
        # At the end of the list, because a reference that is kept may point to an entry before it.
        return {**rest, "allOf": [*rest.get("allOf", ()), definition]}


def _without_pointers(value: JSON) -> JSON:
    """Return the value of a keyword beyond JSON Schema without pointers to definitions, which are inlined.

    An example is the mapping of OpenAPI's `discriminator`. The result is `_GONE` if nothing else remains.
    """
    if isinstance(value, str):
        return _GONE if not {*DEFINITIONS}.isdisjoint(path_of(value) or ()) else value
    if not isinstance(value, Mapping | list | tuple) or not value:
        return cast("JSON", value)
    if isinstance(value, Mapping):
        parts = {name: _without_pointers(part) for name, part in cast("Schema", value).items()}
        return {name: part for name, part in parts.items() if part is not _GONE} or _GONE
    several = list(map(_without_pointers, cast("list[JSON]", value)))
    return [part for part in several if part is not _GONE] or _GONE


def _keywords(node: Schema) -> Iterator[tuple[str, JSON]]:
    """Yield the keywords of one subschema that the result has."""
    for key, value in node.items():
        if value is None and key not in ("default", "const"):
            continue  # chat APIs write `"enum": null` for no enum
        if key == "title" and isinstance(value, str):
            continue
        if key != "type":
            yield key, value
        elif (types := meant_types(value)) is not None:
            yield key, types


def children_of(node: Schema) -> Iterator[tuple[Path, JSON]]:
    """Yield the subschemas of a schema, each with the steps that lead to it."""
    for key, value in node.items():
        if key in BY_NAME and isinstance(value, Mapping):
            for name, child in cast("Schema", value).items():
                yield (key, name), child
        elif key in ONE_OR_MANY and isinstance(value, list | tuple):
            for index, child in enumerate(cast("list[JSON]", value)):
                yield (key, str(index)), child
        elif key in ONE_OR_MANY:
            yield (key,), value


def path_of(pointer: str) -> Path | None:
    """Split the JSON pointer of a reference into the same document; None for any other reference."""
    if pointer == "#":
        return ()
    if not pointer.startswith("#/"):
        return None
    steps = unquote(pointer[2:]).split("/")
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)
