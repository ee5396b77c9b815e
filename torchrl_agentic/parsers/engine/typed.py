"""Values that a format writes without quotes, typed by the schema of the tool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from torchrl_agentic.messages import JSON, Fields, fields_of
from torchrl_agentic.parsers.base import Limits
from torchrl_agentic.parsers.engine.attempts import Unreadable
from torchrl_agentic.parsers.engine.jsontext import decode_any

_ORDER = ("null", "integer", "number", "boolean", "object", "array")
_MAX_REFERENCES = 16


def property_schema(schema: Fields | None, key: str) -> Fields | None:
    """Return the schema of one argument, or None if the schema says nothing about it."""
    return None if schema is None else _property(schema, key, schema, set())


def _property(schema: Fields, key: str, root: Fields, seen: set[int], depth: int = 0) -> Fields | None:
    if id(schema) in seen:  # references multiply, and lead back
        return None
    seen.add(id(schema))
    found = (fields_of(schema.get("properties")) or {}).get(key)
    branches = schema.get("allOf")
    if found is None and isinstance(branches, list) and depth < _MAX_REFERENCES:
        for branch in cast("list[JSON]", branches):
            fields = _resolved(fields_of(branch), root)
            inner = None if fields is None else _property(fields, key, root, seen, depth + 1)
            if inner is not None:
                return inner
    if found is None:
        found = schema.get("additionalProperties")
    return _resolved(fields_of(found), root)


def inner_schema(schema: Fields | None, key: str | int, root: Fields | None) -> Fields | None:
    """Return the schema of one value inside of a value, or None if the schema of that one does not say.

    Args:
        schema: Of the outer value.
        key: The name of a field, or the index of an item of a list.
        root: The schema that references lead into.
    """
    for branch in _branches(schema, root or {}):
        found = _property(branch, key, root or {}, set()) if isinstance(key, str) else _item(branch, key)
        if found is not None:
            return _resolved(found, root or {})
    return None


def _branches(schema: Fields | None, root: Fields) -> Iterable[Fields]:
    """Give a schema and all that it names as its alternatives, each once."""
    seen, left = set[int](), [schema]
    while left:
        found = _resolved(left.pop(), root)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        for key in ("allOf", "oneOf", "anyOf"):
            branches = found.get(key)
            if isinstance(branches, list):
                left += [fields_of(branch) for branch in reversed(cast("list[JSON]", branches))]


def _item(schema: Fields, index: int) -> Fields | None:
    first = schema.get("prefixItems")
    if isinstance(first, list) and index < len(cast("list[JSON]", first)):
        return fields_of(cast("list[JSON]", first)[index])
    return fields_of(schema.get("items"))


def _resolved(schema: Fields | None, root: Fields) -> Fields | None:
    for _ in range(_MAX_REFERENCES):
        reference = None if schema is None else schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: JSON = root
        for step in reference[2:].split("/"):
            found = (fields_of(found) or {}).get(step)
        schema = fields_of(found)
    return None


def types_of(schema: Fields | None, root: Fields | None) -> frozenset[str] | None:
    """Return the JSON types that a schema allows; None if it does not say."""
    return _types(schema, root, set())


def _types(
    schema: Fields | None, root: Fields | None, seen: set[int], depth: int = 0
) -> frozenset[str] | None:
    if schema is None or depth > _MAX_REFERENCES:
        return None
    if id(schema) in seen:  # its types are, or will be, among those found
        return frozenset()
    seen.add(id(schema))
    found = _declared_types(schema, root, seen, depth)
    return found | {"null"} if found is not None and schema.get("nullable") is True else found


def _declared_types(schema: Fields, root: Fields | None, seen: set[int], depth: int) -> frozenset[str] | None:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(item for item in cast("list[JSON]", kind) if isinstance(item, str))
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            found = [_resolved(fields_of(branch), root or {}) for branch in cast("list[JSON]", branches)]
            known = [_types(branch, root, seen, depth + 1) for branch in found]
            if all(types is not None for types in known):
                return frozenset[str]().union(*(types for types in known if types is not None))
            return None
    values = schema.get("enum")
    if isinstance(values, list):
        return _types_of_values(cast("list[JSON]", values))
    return _types_of_values([schema["const"]]) if "const" in schema else None


def _types_of_values(values: Iterable[JSON]) -> frozenset[str]:
    return frozenset(kind for value in values for kind in kinds_of(value)[:1])


def kinds_of(value: JSON) -> Sequence[str]:
    """Give the JSON types that a value has, the narrowest first."""
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    if isinstance(value, float):
        return ("integer", "number") if value.is_integer() else ("number",)
    if isinstance(value, str):
        return ("string",)
    return ("object",) if isinstance(value, dict) else ("array",)


def json_or_text(text: str, limits: Limits) -> JSON:
    """Give the JSON value that some text is, or the text if it is none."""
    try:
        return decode_any(text, limits)
    except Unreadable:
        return text


def typed_value(text: str, types: frozenset[str] | None, limits: Limits) -> JSON:
    """Give the value that some text stands for, where these JSON types are allowed.

    A declared string is taken as it stands. Otherwise JSON of an allowed type counts, and what is none stays
    the text it is: validation says then what is wrong with it. Without types: JSON, or else the text.
    """
    if types is not None and not types & set(_ORDER):
        return text
    value = json_or_text(text, limits)
    if isinstance(value, str):
        return text
    if types is None:
        return value
    if not types & set(kinds_of(value)):
        return text
    # "007" and " 5" are what a string may be, and JSON does not have the first at all.
    return value if "string" not in types or text == text.strip() else text


def only_string(schema: Fields | None) -> str | None:
    """Give the name of a tool's one argument if it is a string, so that plain text can be meant for it."""
    properties = fields_of((schema or {}).get("properties")) or {}
    required = (schema or {}).get("required")
    names = list(properties)
    if len(names) > 1 and isinstance(required, list) and len(cast("list[JSON]", required)) == 1:
        names = cast("list[str]", required)
    if len(names) != 1 or types_of(property_schema(schema, names[0]), schema) != frozenset(("string",)):
        return None
    return names[0]
