"""Check the JSON Schema that a user has written for a tool, before a model sees it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import jsonschema_rs

from torchrl_agentic.text import did_you_mean, nearest, shorten
from torchrl_agentic.tools.options import OptionError
from torchrl_agentic.tools.schema import Validator, with_null
from torchrl_agentic.tools.schema_simplify import (
    ANNOTATIONS,
    BY_NAME,
    ONE_OR_MANY,
    TYPES,
    Path,
    children_of,
    meant_types,
)

_KEYWORDS = frozenset((
    *ONE_OR_MANY, *BY_NAME, *ANNOTATIONS, "type", "enum", "const", "required", "format", "pattern", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems",
    "maxItems", "uniqueItems", "minProperties", "maxProperties", "nullable", "$ref", "$id", "$schema",
    "$anchor", "strict", "minContains", "maxContains", "dependentRequired", "contentEncoding",
    "contentMediaType", "example", "discriminator",
))  # fmt: skip
_OPEN = frozenset(("anyOf", "oneOf", "allOf", "$ref", "if", "patternProperties", "additionalProperties"))
"""Keywords that may declare properties elsewhere."""
_EXPECTED = {
    "type": f"one of {', '.join(TYPES)}",
    "enum": "a list of values",
    "required": "a list of property names, next to 'properties'",
    **dict.fromkeys(BY_NAME, "a mapping from names to schemas"),
    **dict.fromkeys(ONE_OR_MANY, "a schema, such as {type: string}"),
}


def checked_parameters(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Path, str]]]:
    """Correct and check the JSON Schema of a tool's parameters.

    `item` is read as `items`, because an example in verl's documentation uses it, and keywords that are null
    are dropped.

    Args:
        schema: The JSON Schema of an object.

    Returns:
        A corrected copy, and remarks about it, each with the path that leads to its place.

    Raises:
        OptionError: If it is not a valid JSON Schema, has a misspelt keyword, requires a property that does
            not exist, or has an enum value of another type.
    """
    schema = copy.deepcopy(dict(schema))
    remarks: list[tuple[Path, str]] = []
    for path, node in _nodes(schema):
        if node.get("type") == "array" and not node.keys() & {"items", "prefixItems", "contains"}:
            message = "the array has no type of its items; add for instance items: {type: string}"
            if "item" in node:
                node["items"], path = node.pop("item"), (*path, "item")
                message = "'item' is not a JSON Schema keyword; it is read as 'items'"
            remarks.append((path, message))
        for key in [key for key, value in node.items() if value is None and key not in ("default", "const")]:
            del node[key]
        for key in node:
            is_unknown = key not in _KEYWORDS and not key.startswith("x-")
            if is_unknown and (near := nearest(key, _KEYWORDS, cutoff=0.8)):
                message = f"{key!r} is not a JSON Schema keyword; did you mean {near!r}?"
                raise OptionError(message, *path, key)
    try:
        jsonschema_rs.meta.validate(schema)
        Validator(schema)
    except jsonschema_rs.ValidationError as error:
        raise _invalid(error) from None
    except ValueError as error:
        raise OptionError(str(error)) from None
    for path, node in _nodes(schema):
        kind = with_null({key: node[key] for key in ("type", "nullable") if key in node})
        for value in node.get("enum", ()):
            if not jsonschema_rs.is_valid(kind, value):
                hint = "; YAML reads yes, no, on and off as booleans: quote them" * isinstance(value, bool)
                raise OptionError(f"the value {value!r} is not of type {node['type']}{hint}", *path, "enum")
        names: Mapping[str, Any] = node.get("properties", {})
        for name in node.get("required", ()) if names and not node.keys() & _OPEN else ():
            if name not in names:
                known = f"{did_you_mean(name, names)} (properties: {', '.join(names)})"
                raise OptionError(f"no property {name!r} to require{known}", *path, "required")
    return schema, remarks


def _nodes(schema: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a schema and its subschemas, each with its path; a yielded one may be changed."""
    todo: list[tuple[Path, Any]] = [((), schema)]
    for path, node in todo:  # the list grows during the loop
        if isinstance(node, dict):
            fields = cast("dict[str, Any]", node)
            yield path, fields
            todo += [((*path, *steps), child) for steps, child in children_of(fields)]


def _invalid(error: Any) -> OptionError:
    """Return the message for a schema that violates the meta-schema."""
    path = tuple(map(str, error.instance_path))
    above, last = ("", "", *path)[-2:]
    keyword = "items" if above in BY_NAME else last  # the value of a name is a schema
    if keyword not in _EXPECTED:
        return OptionError(error.message, *path)
    hint = did_you_mean(meant_types(str(error.instance)) or "", TYPES) if keyword == "type" else ""
    expected = _EXPECTED[keyword]
    return OptionError(f"expected {expected}; got {shorten(error.instance)}{hint}", *path)
