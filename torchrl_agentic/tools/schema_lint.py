"""Find mistakes in the hand-written JSON Schema of a tool before a model sees it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jsonschema_rs

from torchrl_agentic.text import nearest, shorten
from torchrl_agentic.tools.options import OptionError
from torchrl_agentic.tools.schema import Validator
from torchrl_agentic.tools.schema_simplify import (
    ANNOTATIONS,
    BY_NAME,
    ONE_OR_MANY,
    TYPES,
    children_of,
    meant_types,
)

_PYTHON: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake in a schema, or a remark about it.

    Attributes:
        path: Keys and indices, as strings, that lead to it.
        message: The mistake and its correction.
        is_error: Whether the schema cannot be used.
    """

    path: tuple[str, ...]
    message: str
    is_error: bool = True


def lint(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Correct and check the JSON Schema of a tool's parameters.

    `item` is read as `items`, because an example in verl's documentation uses it, and keywords that are null
    are dropped.

    Args:
        schema: The JSON Schema of an object.

    Returns:
        A corrected copy, and the findings in the order of the schema: misspelt keywords, required properties
        that do not exist, enum values of another type, and anything else that is invalid in JSON Schema.
    """
    schema = copy.deepcopy(dict(schema))
    findings: list[Finding] = []
    nodes: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    for path, node in nodes:  # the list grows during the loop
        if isinstance(node, dict):
            findings += _correct(cast("dict[str, Any]", node), path)
            findings += _check(cast("dict[str, Any]", node), path)
            nodes += [((*path, *inner), child) for inner, child in children_of(cast("dict[str, Any]", node))]
    if not any(finding.is_error for finding in findings):
        findings += _check_whole(schema)
    return schema, findings


def corrected(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return the corrected JSON Schema of a tool's parameters, and the remarks about it; see `lint`.

    Args:
        schema: The JSON Schema of an object.

    Raises:
        OptionError: If it has a mistake.
    """
    schema, findings = lint(schema)
    for finding in findings:
        if finding.is_error:
            raise OptionError(finding.message, *finding.path)
    return schema, findings


def _correct(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[Finding]:
    """Correct one subschema in place."""
    if node.get("type") == "array":
        if "item" in node and "items" not in node:
            node["items"] = node.pop("item")
            message = "'item' is not a JSON Schema keyword; it is read as 'items'"
            yield Finding((*path, "item"), message, is_error=False)
        elif not {"items", "prefixItems", "contains"} & node.keys():
            message = "the array has no type of its items; add for instance items: {type: string}"
            yield Finding(path, message, is_error=False)
    for key in [key for key, value in node.items() if value is None and key not in ("default", "const")]:
        del node[key]


def _check(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Finding]:
    """Find the mistakes of one subschema that the meta-schema allows."""
    for key in node:
        if not key.startswith("x-") and key not in _KEYWORDS and (hint := _nearest(key, _KEYWORDS, 0.8)):
            yield Finding((*path, key), f"{key!r} is not a JSON Schema keyword{hint}")
    stated, values, required = node.get("type"), node.get("enum"), node.get("required")
    types: list[Any] = [*stated] if isinstance(stated, list) else [stated]
    if node.get("nullable") is True:
        types.append("null")
    python = [_PYTHON[name] for name in types if isinstance(name, str) and name in _PYTHON]
    if python and isinstance(values, list):
        for value in cast("list[Any]", values):
            is_bool = isinstance(value, bool)
            if not (bool in python if is_bool else any(isinstance(value, kind) for kind in python)):
                hint = "; YAML reads yes, no, on and off as booleans: quote them" if is_bool else ""
                yield Finding((*path, "enum"), f"the value {value!r} is not of type {stated}{hint}")
    properties = cast("Any", node.get("properties"))
    if isinstance(required, list) and isinstance(properties, dict) and properties and not _OPEN & node.keys():
        names = list(cast("dict[str, Any]", properties))
        for name in cast("list[Any]", required):
            if name not in names:
                known = f" (properties: {', '.join(names)})"
                yield Finding(
                    (*path, "required"), f"no property {name!r} to require{_nearest(name, names)}{known}"
                )


def _check_whole(schema: dict[str, Any]) -> Iterator[Finding]:
    try:
        jsonschema_rs.meta.validate(schema)
        Validator(schema)
    except jsonschema_rs.ValidationError as error:
        path = tuple(map(str, error.instance_path))
        above, last = ("", "", *path)[-2:]
        is_named = above in BY_NAME
        expected = _EXPECTED["items"] if is_named else _EXPECTED.get(last)
        message = error.message
        if expected:
            meant = meant_types(str(error.instance)) or ""
            hint = _nearest(meant, TYPES) if last == "type" and not is_named else ""
            message = f"expected {expected}; got {shorten(error.instance)}{hint}"
        yield Finding(path, message)
    except ValueError as error:
        yield Finding((), str(error))


def _nearest(word: Any, known: Iterable[str], cutoff: float = 0.6) -> str:
    near = nearest(word, known, cutoff=cutoff)
    return "" if near is None else f"; did you mean {near!r}?"
