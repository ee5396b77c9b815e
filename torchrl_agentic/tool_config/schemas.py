"""Mistakes in the JSON Schema of a tool, found before a model reads it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torchrl_agentic.tool_config.mistakes import ConfigError
from torchrl_agentic.tools.schema import Validator, shorten
from torchrl_agentic.tools.schema_simplify import TYPES, meant_types

Steps = tuple[int | str, ...]
Place = Callable[[Steps], str]
_PYTHON: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_PLAIN = (
    "type", "description", "title", "default", "enum", "const", "examples", "required", "format", "pattern",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
    "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties", "nullable", "deprecated",
    "$ref", "$id", "$schema", "$comment", "$anchor", "strict", "readOnly", "writeOnly", "minContains",
    "maxContains", "dependentRequired", "unevaluatedItems", "unevaluatedProperties", "contentEncoding",
    "contentMediaType", "contentSchema", "example", "discriminator",
)  # fmt: skip
KEYWORDS = frozenset((*_ONE, *_MANY, *_NAMED, *_PLAIN))
_COMBINE = frozenset(("anyOf", "oneOf", "allOf", "$ref", "if", "patternProperties", "additionalProperties"))


def checked_schema(schema: Mapping[str, Any], place: Place) -> tuple[dict[str, Any], list[str]]:
    """Give a schema as it is meant, and what there is to say about it.

    `item`, as in verl's own example, is read as `items`; keywords of JSON Schema that none of us knows stay.
    place: the steps inside the schema → where that stands.

    Raises:
        ConfigError: it is no JSON Schema, or says what nobody can have meant.
    """
    notes: list[str] = []
    mended = _node(schema, (), place, notes)
    try:
        Validator(mended)
    except ValueError as error:
        raise ConfigError(f"{place(())}: {error}") from None
    return mended, notes


def _node(node: Any, steps: Steps, place: Place, notes: list[str]) -> Any:
    if not isinstance(node, Mapping):
        if isinstance(node, bool):
            return node
        raise ConfigError(
            f"{place(steps)}: a schema is a mapping, e.g. {{type: string}}; got {shorten(node)}"
        )
    schema = dict(cast("Mapping[str, Any]", node))
    if "item" in schema and "items" not in schema and schema.get("type") == "array":
        notes.append(f"{place((*steps, 'item'))}: 'item' is no keyword of JSON Schema; it is read as 'items'")
        schema = {("items" if key == "item" else key): value for key, value in schema.items()}
    _check_keywords(schema, steps, place)
    _check_type(schema, steps, place)
    if schema.get("type") == "array" and not {"items", "prefixItems", "contains"} & schema.keys():
        notes.append(f"{place(steps)}: an array of what? Say it, e.g. items: {{type: string}}")
    for key, value in schema.items():
        inner = (*steps, "item" if key == "items" and "items" not in node else key)
        if key in _ONE and value is not None:
            schema[key] = _node(value, inner, place, notes)
        elif key in _MANY and isinstance(value, list):
            each = enumerate(cast("list[Any]", value))
            schema[key] = [_node(item, (*inner, n), place, notes) for n, item in each]
        elif key in _NAMED and value is not None:
            schema[key] = _named(value, inner, place, notes)
    _check_required(schema, steps, place)
    return schema


def _named(value: Any, steps: Steps, place: Place, notes: list[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{place(steps)}: {steps[-1]!r} is a mapping from names to schemas; got {shorten(value)}"
        )
    items = cast("dict[str, Any]", value).items()
    return {name: _node(item, (*steps, name), place, notes) for name, item in items}


def _check_keywords(schema: Mapping[str, Any], steps: Steps, place: Place) -> None:
    for key in schema:
        near = (
            []
            if key in KEYWORDS or key.startswith("x-")
            else difflib.get_close_matches(key, KEYWORDS, 1, 0.8)
        )
        if near:
            raise ConfigError(
                f"{place((*steps, key))}: {key!r} is no keyword of JSON Schema; did you mean {near[0]!r}?"
            )


def _check_type(schema: Mapping[str, Any], steps: Steps, place: Place) -> None:
    stated = schema.get("type")
    kinds = cast("list[Any]", stated) if isinstance(stated, list) else [] if stated is None else [stated]
    for kind in kinds:
        if kind not in TYPES:
            meant = meant_types(str(kind))
            near = [meant] if meant in TYPES else difflib.get_close_matches(str(kind), TYPES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{place((*steps, 'type'))}: no type {kind!r} in JSON Schema{hint} "
                f"(types: {', '.join(TYPES)})"
            )
    values = schema.get("enum")
    if values is None or not kinds:
        return
    if not isinstance(values, list):
        raise ConfigError(f"{place((*steps, 'enum'))}: 'enum' is a list of values; got {shorten(values)}")
    if schema.get("nullable") is True:
        kinds = [*kinds, "null"]
    for value in cast("list[Any]", values):
        if not any(_is(value, kind) for kind in kinds):
            yes = (
                "; YAML reads yes, no, on and off as booleans: quote them" if isinstance(value, bool) else ""
            )
            raise ConfigError(
                f"{place((*steps, 'enum'))}: {value!r} is no {' or '.join(map(str, kinds))}{yes}"
            )


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _PYTHON[kind])


def _check_required(schema: Mapping[str, Any], steps: Steps, place: Place) -> None:
    required = schema.get("required")
    if required is None:
        return
    if not isinstance(required, list):
        raise ConfigError(
            f"{place((*steps, 'required'))}: 'required' is the list of the properties that must be given, "
            f"beside 'properties'; got {shorten(required)}"
        )
    if _COMBINE & schema.keys() or not schema.get("properties"):
        return
    known = cast("Sequence[str]", list(schema["properties"]))
    for name in cast("list[Any]", required):
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{place((*steps, 'required'))}: {name!r} is required, but no property{hint}"
                f" (properties: {', '.join(known)})"
            )
